"""Networks for text: tokens to what comes after each of them, with a memory of what came before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.validate import SettingError, require_count, require_whole
from equipoise.layers.dropout import VariationalDropout
from equipoise.models.model import Model

__all__ = ["TextModel"]


class TextModel(Model):
    """A network from tokens to scores of the token after each of them: define `states`.

    The embedding of a token `t` is `sqrt(features) E_t`, and the scores of all tokens after it are
    `E z + b`: both share the matrix `E` (Press & Wolf, 2017).

    With a `memory` of the text before, `forward(x, memory)` returns the scores and the memory of
    the text up to the end of `x`, its last `memory_length` tokens. Nothing is kept in between: who
    calls it carries the memory on. It is detached, so that no gradient flows to earlier segments
    (Transformer-XL; Dai et al., 2019).

    Args:
        num_classes: How many tokens the vocabulary has.
        features: Numbers for each token.
        memory_length: How many tokens before a segment are remembered; 0 remembers nothing.
        memory_width: Numbers that are remembered of each token.
        dropout: Fraction of the features of embeddings and states that is dropped in training, the
            same ones for all tokens of a text (Gal & Ghahramani, 2016).

    Shape:
        int64 (batch, length) to (batch, length, num_classes); the memory is (batch, remembered,
        memory_width).
    """

    def __init__(
        self,
        num_classes: int,
        features: int,
        *,
        memory_length: int = 0,
        memory_width: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        require_count(f"{owner}.num_classes", num_classes)
        require_count(f"{owner}.features", features)
        require_whole(f"{owner}.memory_length", memory_length)
        self.num_classes, self.features = num_classes, features
        self.memory_length, self.memory_width = memory_length, memory_width
        self.dropout = VariationalDropout(dropout, owner=f"{owner}.dropout")
        self.embedding = nn.Embedding(num_classes, features)
        self.bias = nn.Parameter(torch.zeros(num_classes))
        nn.init.normal_(self.embedding.weight, std=features**-0.5)

    def states(self, e: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states of a segment's tokens, and what is to be remembered of them.

        Args:
            e: Their embeddings, (batch, length, features).
            memory: What is remembered of the text before, (batch, remembered, memory_width).
        """
        raise NotImplementedError(f"{type(self).__name__} must define states.")  # abstract

    def prepare(self, x: Tensor) -> Tensor:
        """Return tokens that the network can take; raises `ValueError` for anything else."""
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            rule = "be numbers of tokens, which are integers"
            raise SettingError(f"The input of {self.name}", rule, x, got=str(x.dtype))
        if x.dim() != 2 or not x.shape[1]:
            raise SettingError(
                f"The input of {self.name}",
                "have shape (batch, length), with at least one token",
                tuple(x.shape),
            )
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= self.num_classes):
            raise SettingError(
                f"The input of {self.name}",
                f"be numbers of tokens from 0 to {self.num_classes - 1}",
                x,
                got=f"numbers from {int(x.min())} to {int(x.max())}",
            )
        return x

    def start_memory(self, batch: int) -> Tensor:
        """Return the memory of texts before their first token, in which there is nothing.

        Args:
            batch: How many texts.
        """
        return self.bias.new_zeros(batch, 0, self.memory_width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the scores of the next tokens, and with a memory the next memory as well."""
        e = self.features**0.5 * self.embedding(x)
        z, seen = self.states(self._drop(e), memory)
        output = functional.linear(self._drop(z), self.embedding.weight, self.bias)
        if memory is None:
            return output
        after = torch.cat([memory, seen.detach().to(memory.dtype)], dim=1)
        # A copy, so that nothing longer is held on to.
        return output, after[:, max(after.shape[1] - self.memory_length, 0) :].clone()

    def parameter_counts(self) -> dict[str, int]:
        """Return the parameters of the `embedding` with its bias, of the `body`, and in `total`."""
        embedding = self.embedding.weight.numel() + self.bias.numel()
        total = sum(parameter.numel() for parameter in self.parameters())
        return {"embedding": embedding, "body": total - embedding, "total": total}

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x, self.dropout.draw(x, 1, x.shape[-1]))  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} {count:,}" for part, count in self.parameter_counts().items())
        return (
            f"{type(self).__name__}({self.name}: {self.num_classes:,} tokens, memory of "
            f"{self.memory_length}; parameters: {parts})"
        )
