"""Scores as sums that add up over batches and over processes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

__all__ = ["Agreement", "ClassScore", "Errors", "Labels", "Mean", "Overlap", "Score"]

BINS = 4096  # of log odds, for the area under the ROC curve
MAX_BIN = 16.0  # what asinh(16 log odds) is cut to; log odds of 2.8e5


@dataclass(frozen=True)
class ClassScore:
    """How well one class is told from the others; NaN where nothing was seen.

    Attributes:
        precision: Fraction of those found to be of the class that are.
        recall: Fraction of those of the class that were found.
        f1: The harmonic mean of both, `2 TP / (2 TP + FP + FN)`.
        count: How many are of the class.
    """

    precision: float
    recall: float
    f1: float
    count: int


class Score(ABC):
    """Sums from which a score is computed; sums of two subsets add up to those of the whole.

    Args:
        size: How many sums there are.
    """

    def __init__(self, size: int) -> None:
        self._sums = torch.zeros(size, dtype=torch.float64)

    @abstractmethod
    def update(self, output: Tensor, target: Tensor) -> None:
        """Add the samples of one batch.

        Args:
            output: What the model returned.
            target: What it should have been, as in `Task.loss`.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the scores by name, NaN if nothing was seen."""

    def explain_unknown(self) -> list[str]:
        """Return a sentence for each score that samples were seen for and that is still NaN."""
        return []

    @property
    def confusion(self) -> Tensor | None:
        """How often each class (rows) was taken for each (columns), int64; None if too many."""
        return None

    def per_class(self) -> list[ClassScore] | None:
        """Return the scores of each class; None if there are no classes, or too many."""
        return None

    def sums(self) -> Tensor:
        """Return the sums, float64 of shape (size,)."""
        return self._sums.clone()

    def load(self, sums: Tensor) -> None:
        """Take other sums in place of the present ones.

        Args:
            sums: Of the same shape as `sums()`.
        """
        if sums.shape != self._sums.shape:
            raise ValueError(
                f"Score.sums must have shape {tuple(self._sums.shape)}; got {tuple(sums.shape)}."
            )
        self._sums = sums.detach().to("cpu", torch.float64, copy=True)


@final
class Mean(Score):
    """Functions of the mean of a number for each thing that counts.

    Args:
        name: Of the score.
        measure: Returns the numbers of all things in a batch.
        finish: Turns their mean into the score.
        also: Other scores by name, and what turns the same mean into them.
    """

    def __init__(
        self,
        name: str,
        measure: Callable[[Tensor, Tensor], Tensor],
        finish: Callable[[Tensor], Tensor],
        also: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        super().__init__(2)
        self._measure, self._finish = measure, {name: finish, **(also or {})}

    def update(self, output: Tensor, target: Tensor) -> None:
        values = self._measure(output.detach(), target).double()
        self._sums[0] += values.sum().cpu()
        self._sums[1] += values.numel()

    def compute(self) -> dict[str, float]:
        mean = self._sums[0] / self._sums[1]
        return {name: float(finish(mean)) for name, finish in self._finish.items()}


@final
class Errors(Score):
    """Errors of numbers: `r2`, the mean of that of each number, `mae` and `rmse`.

    Args:
        numbers: How many numbers there are for each sample.
        mean: What each output is short of, after it is multiplied by `std`; nothing by default.
        std: What each output is to be multiplied by to have the unit of the target.
    """

    def __init__(self, numbers: int, mean: Sequence[float] = (), std: Sequence[float] = ()) -> None:
        # Samples; then for each number the sums of y, y^2, e^2 and |e|.
        super().__init__(1 + 4 * numbers)
        self._mean = torch.tensor(mean or [0.0] * numbers, dtype=torch.float64)
        self._std = torch.tensor(std or [1.0] * numbers, dtype=torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        # About the mean, so that squares of large numbers do not hide how they vary.
        y = target.reshape(len(target), -1).double() - self._mean.to(target.device)
        found = output.detach().reshape(y.shape).double() * self._std.to(output.device)
        error = found - y
        sums = torch.stack([y.sum(0), y.square().sum(0), error.square().sum(0), error.abs().sum(0)])
        self._sums[0] += len(y)
        self._sums[1:] += sums.flatten().cpu()

    def compute(self) -> dict[str, float]:
        count = self._sums[0]
        _, _, errors, absolute = self._sums[1:].reshape(4, -1)
        spread, varies = self._find_spread()
        r2 = torch.where(varies, 1 - errors / spread, math.nan)
        return {
            "r2": float(r2.mean()),
            "mae": float((absolute / count).mean()),
            "rmse": float((errors / count).mean().sqrt()),
        }

    def explain_unknown(self) -> list[str]:
        count, (_, varies) = int(self._sums[0]), self._find_spread()
        if not count or bool(varies.all()) or not bool(self._sums.isfinite().all()):
            return []
        about = "R2 is not known, since it compares errors with how the targets vary, and"
        if count == 1:
            return [f"{about} there is only one sample to score."]
        equal = [str(i + 1) for i in (~varies).nonzero().flatten().tolist()]
        which = "" if len(varies) == 1 else f" of number {', '.join(equal)} to predict"
        return [f"{about} those{which} are equal in all {count:,} samples."]

    def _find_spread(self) -> tuple[Tensor, Tensor]:
        """The sum of (y - mean y)^2 of each number, and whether its targets differ."""
        y, squares = self._sums[1:].reshape(4, -1)[:2]
        spread = squares - y.square() / self._sums[0]
        # Of equal targets, which rounding makes differ a little, nothing can be explained.
        return spread, spread > 1e-12 * squares


class Agreement(Score):
    """How often predicted classes are the true ones: `accuracy`, and the confusion matrix.

    Args:
        predict: Turns outputs into classes.
        classes: How many there are.
        ignore: The target that does not count, if there is one.
        more: How many sums a subclass adds, which come last.
    """

    largest: ClassVar[float] = 256  # classes with a matrix, which is added up in every step

    def __init__(
        self,
        predict: Callable[[Tensor], Tensor],
        classes: int,
        ignore: int | None,
        more: int = 0,
    ) -> None:
        self._rows = classes if classes <= self.largest else 0
        # Right ones, all, and the matrix, whose last column counts outputs that are no answer.
        self._cells = slice(2, 2 + self._rows * (self._rows + 1))
        super().__init__(self._cells.stop + more)
        self._predict, self._ignore = predict, ignore

    def update(self, output: Tensor, target: Tensor) -> None:
        found, truth = self._predict(output.detach()).reshape(-1), target.reshape(-1).long()
        # NaN has a largest entry for argmax, but is nobody's answer: it counts as wrong.
        sound = (output.isfinite() if output.dim() == 1 else output.isfinite().all(dim=1)).reshape(
            -1
        )
        if self._ignore is not None:
            counts = truth != self._ignore
            found, truth, sound = found[counts], truth[counts], sound[counts]
        self._sums[1] += len(truth)
        self._sums[0] += ((found == truth) & sound).sum().cpu()
        if self._rows:
            found = found.where(sound, self._rows)
            self._sums[self._cells] += torch.bincount(
                truth * (self._rows + 1) + found, minlength=self._rows * (self._rows + 1)
            ).cpu()

    @property
    def confusion(self) -> Tensor | None:
        return self._matrix()[:, :-1].long() if self._rows else None

    def compute(self) -> dict[str, float]:
        return {"accuracy": float(self._sums[0] / self._sums[1])}

    def _matrix(self) -> Tensor:
        """Counts of true classes (rows) and found ones (columns), the last one for no answer."""
        return self._sums[self._cells].reshape(self._rows, self._rows + 1)

    def per_class(self) -> list[ClassScore] | None:
        if not self._rows:
            return None
        matrix = self._matrix()
        right, truth, found = matrix.diagonal(), matrix.sum(1), matrix[:, :-1].sum(0)
        columns = (right / found, right / truth, 2 * right / (truth + found), truth)
        return [
            ClassScore(precision, recall, f1, int(count))
            for precision, recall, f1, count in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


@final
class Labels(Agreement):
    """Scores of one class for each sample: `accuracy`, `top5` of more than five classes, or `auc`.

    `auc` is of two classes the area under the ROC curve: the probability that the second class gets
    higher odds in a sample that is of it than in one that is not (Hanley & McNeil, 1982). The log
    odds are sorted into 4096 bins, and samples of one bin count as equal.

    Args:
        predict: As of `Agreement`.
        classes: As of `Agreement`.
        ignore: As of `Agreement`.
    """

    def __init__(
        self, predict: Callable[[Tensor], Tensor], classes: int, ignore: int | None
    ) -> None:
        self._classes = classes
        super().__init__(
            predict, classes, ignore, more=1 if classes > 5 else 2 * BINS if classes == 2 else 0
        )
        self._more = slice(self._cells.stop, None)

    def update(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point():  # weights of all classes
            target = target.argmax(1)
        super().update(output, target)
        if self._classes <= 5 and self._classes != 2:
            return
        output = output.detach()
        counts = output.isfinite().all(dim=1)
        if self._ignore is not None:
            counts = counts & (target != self._ignore)
        output, truth = output[counts].double(), target[counts].long()
        if self._classes > 5:
            best = output.topk(5).indices
            self._sums[self._more] += (best == truth[:, None]).any(1).sum().cpu()
            return
        odds = (16 * (output[:, 1] - output[:, 0])).asinh().clamp(-MAX_BIN, MAX_BIN)
        bins = ((odds + MAX_BIN) * ((BINS - 1) / (2 * MAX_BIN))).round().long()
        self._sums[self._more] += torch.bincount(truth * BINS + bins, minlength=2 * BINS).cpu()

    def compute(self) -> dict[str, float]:
        found = super().compute()
        if self._classes > 5:
            found["top5"] = float(self._sums[self._more][0] / self._sums[1])
        elif self._classes == 2:
            first, second = self._sums[self._more].reshape(2, BINS)
            below = first.cumsum(0) - first / 2  # those of the same bin count half
            found["auc"] = float((second * below).sum() / (first.sum() * second.sum()))
        return found

    def explain_unknown(self) -> list[str]:
        if self._classes != 2:
            return []
        counts = self._sums[self._more].reshape(2, BINS).sum(1)
        if bool((counts > 0).all()) or not bool(counts.any()):
            return []
        return [
            "AUC is not known, since it compares samples of two classes, and all "
            f"{int(counts.sum()):,} to score are of one."
        ]


@final
class Overlap(Agreement):
    """Scores of masks from the matrix of their pixels: `miou`, `macc` and `aacc`."""

    largest = math.inf

    def compute(self) -> dict[str, float]:
        matrix = self._matrix()
        right, truth, found = matrix.diagonal(), matrix.sum(1), matrix[:, :-1].sum(0)
        return {
            "miou": _mean_ratio(right, truth + found - right),
            "macc": _mean_ratio(right, truth),
            "aacc": float(self._sums[0] / self._sums[1]),
        }


def _mean_ratio(count: Tensor, total: Tensor) -> float:
    some = total > 0
    return float((count[some] / total[some]).mean()) if some.any() else math.nan
