"""Language models: the next token after each token of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from equipoise.core import require_count, require_positive, require_whole
from equipoise.data import Dataset
from equipoise.data.vocabulary import Tokens, Vocabulary
from equipoise.engine.tasks.answer import Answer, TextAnswer
from equipoise.engine.tasks.cross_entropy import CrossEntropyTask
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.score import Mean, Score
from equipoise.engine.tasks.task import TASKS, require_data, to_full_precision

__all__ = ["LanguageModelling"]

MAX_SEED = 2**63 - 1  # what torch.Generator takes


@final
@TASKS.register("language")
@dataclass(frozen=True)
class LanguageModelling(CrossEntropyTask):
    """The next token after each token of a text, by cross-entropy.

    Scored by `perplexity`, `exp` of the mean cross-entropy over tokens, without smoothing, and for
    characters and bytes by its logarithm to base 2, `bits_per_character` or `bits_per_byte`.
    Answers continue a text token by token: by the most probable one, or by one that is drawn with
    the model's probabilities.

    Args:
        classes: How many tokens the vocabulary has.
        ignore: The target of tokens that do not count.
        label_smoothing: Fraction of the true token's weight that is spread over all tokens.
        tokens: What they are: `words`, `characters` or `bytes`.
        continuation: How many tokens an answer adds to a text.
        window: How many of the last tokens the model sees in doing so, by default all; or how many
            at once, if it remembers those before.
        temperature: What scores are divided by before a token is drawn: less than 1 prefers
            probable ones; 0 takes the most probable.
        seed: Seed of the draws. Each text has draws of its own, so that it goes on the same
            whatever other texts are beside it.

    Shape:
        Outputs (batch, length, classes), targets (batch, length).
    """

    name = "language"
    metrics = (
        Metric("perplexity", "Perplexity", higher_is_better=False),
        *(
            Metric(f"bits_per_{each}", f"Bits per {each}", higher_is_better=False, label=label)
            for each, label in (("character", "bits/character"), ("byte", "bits/byte"))
        ),
    )
    answer_type = TextAnswer
    data_kinds = ("text",)
    reads_text = True

    tokens: Tokens = field(default="words", kw_only=True)
    continuation: int = field(default=20, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    temperature: float = field(default=0.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("LanguageModelling.continuation", self.continuation)
        if self.window is not None:
            require_count("LanguageModelling.window", self.window)
        require_positive("LanguageModelling.temperature", self.temperature, or_zero=True)
        require_whole("LanguageModelling.seed", self.seed, MAX_SEED)

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        require_data(cls.name, dataset, cls.data_kinds, "be text")
        tokens = dataset.tokens or "words"
        return cls(
            len(dataset.classes),
            ignore=dataset.ignore,
            label_smoothing=label_smoothing,
            tokens=tokens,
            continuation=20 if tokens == "words" else 100,
            # A model need not know what to do with more than it has seen in training.
            window=dataset.shape[0] if dataset.shape else None,
        )

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.dim() != 2:
            raise self.mismatch(
                "target",
                "have the shape (batch, length), a text in each row",
                f"shape {tuple(target.shape)}",
            )
        batch, length = target.shape
        if batch != length and output.shape == (length, batch, self.classes):
            raise self.mismatch(
                "output",
                "have the shape (batch, length, classes), the batch first",
                f"shape {tuple(output.shape)} for a batch of {batch} texts of {length} tokens",
                "Swap its first two dimensions.",
            )
        super().check(output, target)

    def score(self) -> Score:
        def measure(output: Tensor, target: Tensor) -> Tensor:
            losses = self._losses(output, target, 0.0)
            return losses if self.ignore is None else losses[target.reshape(-1) != self.ignore]

        unit = {"characters": "bits_per_character", "bytes": "bits_per_byte"}.get(self.tokens)
        also = {} if unit is None else {unit: lambda mean: mean / math.log(2)}
        return Mean("perplexity", measure, torch.exp, also)

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        """Return the most probable next word after each text."""
        found = self.predict(output)[:, -1:].tolist()
        return [self._text(tokens, classes) for tokens in found]

    def respond(
        self, model: Callable[[Tensor], Tensor], x: Tensor, classes: Sequence[str]
    ) -> list[Answer]:
        window, memory = self.window or x.shape[1], None
        remembering: Callable[..., tuple[Tensor, Tensor]] = model  # type: ignore[assignment]
        if getattr(model, "memory_length", 0):
            memory = model.start_memory(len(x))  # type: ignore[attr-defined]
            for start in range(0, x.shape[1], window):
                output, memory = remembering(x[:, start : start + window], memory)
        draws = [torch.Generator().manual_seed(self.seed) for _ in x]
        for place in range(self.continuation):
            if memory is None:
                output = model(x if self.window is None else x[:, -window:])
            elif place:
                # What was computed for earlier tokens depends on no later ones, and is remembered.
                output, memory = remembering(x[:, -1:], memory)
            if output.dim() != 3 or output.shape[2] != len(classes):
                raise ValueError(
                    f"the model's output has shape {tuple(output.shape)}; "
                    f"({len(x)}, length, {len(classes)}) expected"
                )
            x = torch.cat([x, self._choose(output[:, -1:], draws).to(x)], dim=1)
        return [self._text(tokens, classes) for tokens in x.tolist()]

    def _choose(self, output: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        """Return the next token of each text, (batch, 1)."""
        if not self.temperature:
            return self.predict(output)
        # In float64, where a temperature near 0 leaves numbers finite.
        scores = to_full_precision(output)[:, 0].double().cpu()
        likely = (scores - scores.amax(1, keepdim=True)).div(self.temperature).softmax(1).cumsum(1)
        drawn = torch.cat([torch.rand(1, 1, generator=each, dtype=torch.float64) for each in draws])
        return torch.searchsorted(likely, drawn * likely[:, -1:], right=True).clamp_(
            max=self.classes - 1
        )

    def _text(self, numbers: Sequence[int], classes: Sequence[str]) -> TextAnswer:
        return TextAnswer(Vocabulary(self.tokens, tuple(classes)).decode(numbers))

    def _classes_last(self, output: Tensor) -> Tensor:
        return output
