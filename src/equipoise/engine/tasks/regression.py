"""Numbers to predict, and two classes as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError, choose, require_count, require_positive
from equipoise.data import Dataset
from equipoise.engine.tasks.answer import Answer, LabelAnswer, NumberAnswer
from equipoise.engine.tasks.cross_entropy import ACCURACY, label_answers
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.score import Agreement, Errors, Score
from equipoise.engine.tasks.task import (
    TASKS,
    Task,
    refuse_smoothing,
    require_data,
    to_full_precision,
)

__all__ = ["LOSSES", "BinaryRegression", "Regression"]

LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "square": lambda output, target, _: functional.mse_loss(output, target),
    "absolute": lambda output, target, _: functional.l1_loss(output, target),
    "huber": lambda output, target, delta: functional.huber_loss(output, target, delta=delta),
}
"""The losses of a regression by name."""


@final
@TASKS.register("regression")
@dataclass(frozen=True)
class Regression(Task):
    """Numbers for each sample, by the mean of a loss of `e = f(x) - y` over samples and numbers.

    The losses are `square`, `e^2`; `absolute`, `|e|`; and `huber` (Huber, 1964), `e^2 / 2` for
    `|e| <= delta` and `delta (|e| - delta / 2)` beyond. Scores are `r2`, the coefficient of
    determination `1 - sum e^2 / sum (y - mean y)^2`; `mae`, the mean of `|e|`; and `rmse`, the root
    of the mean of `e^2`: means over all numbers, of which each has an `r2` of its own.

    Args:
        numbers: How many numbers there are to predict.
        kind: The loss, one of `LOSSES`.
        delta: Where the Huber loss becomes linear, in the units in which numbers are learnt.
        mean: What is subtracted from each number before it is learnt; nothing by default. Scores
            and answers are in the numbers' own units.
        std: What it is divided by afterwards.

    Shape:
        Outputs (batch, numbers), or (batch,) for one; targets likewise, floats.
    """

    name = "regression"
    metrics = (
        Metric("r2", "Coefficient of determination", label="R2"),
        Metric("mae", "Mean absolute error", higher_is_better=False, label="MAE"),
        Metric("rmse", "Root mean squared error", higher_is_better=False, label="RMSE"),
    )
    answer_type = NumberAnswer
    data_kinds = ("regression",)

    numbers: int = 1
    kind: str = field(default="square", kw_only=True)
    delta: float = field(default=1.0, kw_only=True)
    mean: tuple[float, ...] = field(default=(), kw_only=True)
    std: tuple[float, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        require_count("Regression.numbers", self.numbers)
        choose("Regression.kind", self.kind, LOSSES)
        require_positive("Regression.delta", self.delta)
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (0, self.numbers):
                rule = f"have a number for each of {self.numbers} to predict, or none"
                raise SettingError(f"Regression.{name}", rule, getattr(self, name))
        for value in self.std:
            require_positive("Regression.std", value)

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        refuse_smoothing(cls.name, label_smoothing)
        require_data(cls.name, dataset, cls.data_kinds, "have numbers as targets")
        targets = dataset.encoding.targets if dataset.encoding else ()
        mean, std = (tuple(getattr(each, key) for each in targets) for key in ("shift", "scale"))
        return cls(len(dataset.classes), mean=mean, std=std)

    def with_loss(self, loss: str, delta: float) -> Self:
        return replace(self, kind="square" if loss == "auto" else loss, delta=delta)

    def outputs(self, dataset: Dataset) -> int | None:
        return self.numbers

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        output = to_full_precision(output).reshape(len(target), -1)
        target = target.reshape(output.shape)
        if self.std:  # in float64, in which large numbers that differ a little still do
            mean, std = (target.new_tensor(each, dtype=torch.float64) for each in self._scale)
            target = (target.double() - mean) / std
        return LOSSES[self.kind](output, target.to(output), self.delta)

    def score(self) -> Score:
        return Errors(self.numbers, self.mean, self.std)

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        mean, std = (torch.tensor(each, dtype=torch.float64) for each in self._scale)
        rows = (output.reshape(len(output), -1).double() * std + mean).tolist()
        # As many digits of what varies, however large the mean is.
        more = max(math.log10(max(abs(m) / s, 1)) for m, s in zip(*self._scale, strict=True))
        digits = min(6 + math.floor(more), 17)
        return [NumberAnswer(tuple(classes), tuple(row), digits) for row in rows]

    @property
    def _scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean or (0.0,) * self.numbers, self.std or (1.0,) * self.numbers

    def check(self, output: Tensor, target: Tensor) -> None:
        allowed = [(len(target), self.numbers)] + [(len(target),)] * (self.numbers == 1)
        if not target.is_floating_point() or target.shape not in allowed:
            raise self.mismatch(
                "target",
                f"be {self.numbers} floats for each sample",
                f"{target.dtype} of shape {tuple(target.shape)}",
            )
        if output.shape not in allowed:
            raise self.mismatch(
                "output",
                f"have {self.numbers} numbers for each sample",
                f"shape {tuple(output.shape)}",
                "Make the model with as many outputs (num_classes).",
            )


@final
@TASKS.register("binary-regression")
@dataclass(frozen=True)
class BinaryRegression(Task):
    """Two classes as the numbers -1 and 1, by the square loss.

    The loss is the mean of `(f(x) - y)^2 / 2` over samples: the objective of Gao et al. (2022, eq.
    5, with the gradients of eqs. 10 to 13) divided by their number. The paper leaves open which
    numbers stand for its two classes. `accuracy` is the fraction with the right sign. The
    probability of the second class is `(1 + f(x)) / 2`, cut to [0, 1], because the square loss is
    least where `f(x)` is the mean of `y` given `x`.

    Shape:
        Outputs (batch, 1) or (batch,), targets (batch,), classes 0 and 1.
    """

    name = "binary-regression"
    metrics = (ACCURACY,)
    answer_type = LabelAnswer

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        refuse_smoothing(cls.name, label_smoothing)
        require_data(
            cls.name, dataset, ("classification", "arrays"), "have one label for each sample"
        )
        if len(dataset.classes) != 2:
            raise SettingError(
                f"The data of task {cls.name!r}",
                "have two classes",
                dataset,
                "Select two of them, or choose task 'classification'.",
                got=f"{len(dataset.classes)} in {dataset.name!r}",
            )
        return cls()

    def outputs(self, dataset: Dataset) -> int | None:
        return 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        output = to_full_precision(output.reshape(-1))
        return 0.5 * functional.mse_loss(output, 2 * target.to(output) - 1)

    def score(self) -> Score:
        return Agreement(self.predict, 2, None)

    def predict(self, output: Tensor) -> Tensor:
        """Return the class on whose side of zero each output lies."""
        return (output.reshape(len(output)) > 0).long()

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        second = ((1 + output.reshape(len(output))) / 2).clamp(0, 1)
        return label_answers(
            torch.stack([1 - second, second], dim=1), self.predict(output), classes
        )

    def check(self, output: Tensor, target: Tensor) -> None:
        if (
            target.is_floating_point()
            or target.dim() != 1
            or (len(target) and not 0 <= int(target.min()) <= int(target.max()) <= 1)
        ):
            raise self.mismatch(
                "target",
                "be classes 0 and 1, shape (batch,)",
                f"{target.dtype} of shape {tuple(target.shape)}",
            )
        if output.shape not in ((len(target), 1), (len(target),)):
            raise self.mismatch(
                "output", "have one number for each sample", f"shape {tuple(output.shape)}"
            )
