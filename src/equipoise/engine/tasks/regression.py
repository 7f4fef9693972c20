"""Two classes as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError
from equipoise.data import Dataset
from equipoise.engine.tasks.answer import Answer, LabelAnswer
from equipoise.engine.tasks.cross_entropy import ACCURACY, label_answers
from equipoise.engine.tasks.score import Agreement, Score
from equipoise.engine.tasks.task import (
    TASKS,
    Task,
    refuse_smoothing,
    require_data,
    to_full_precision,
)

__all__ = ["BinaryRegression"]


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
