"""What a network learns: the loss of its outputs, their score, and what they predict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Self, final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import Registry, choose, require_count
from equipoise.data import Dataset
from equipoise.engine.score import Agreement, Mean, Overlap, Score

__all__ = [
    "TASKS",
    "BinaryRegression",
    "Classification",
    "LanguageModelling",
    "Restoration",
    "Score",
    "Segmentation",
    "Task",
    "make_task",
]

LEAST_ERROR = 1e-10  # mean square error, hence 100 dB at most


class Task(ABC):
    """One kind of problem.

    Attributes:
        name: The name under which it is registered.
        metric: The name of the score that decides which model is the better one.
        higher_is_better: Whether a higher one is.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        """Return the task for a data set, or raise if they do not fit.

        Args:
            dataset: What to learn from.
            label_smoothing: As of `make_task`.
        """

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over all that counts: samples, or pixels or words that are not to be ignored.

        Args:
            output: What the model returned.
            target: What it should have been.
        """

    @abstractmethod
    def score(self) -> Score:
        """Return a new score that has seen nothing."""

    @abstractmethod
    def predict(self, output: Tensor) -> Tensor:
        """Return the model's answer: classes, masks of classes, next words, or pictures."""

    @abstractmethod
    def check(self, output: Tensor, target: Tensor) -> None:
        """Raise unless outputs and targets have the shapes and kinds of numbers that the task is about."""

    def weight(self, target: Tensor) -> float:
        """Return how many things the mean of `loss` is over."""
        return float(len(target))

    def _fail(self, what: str, rule: str, got: object, remedy: str = "") -> ValueError:
        return ValueError(
            f"The {what} of task {self.name!r} must {rule}; got {got}.{remedy and ' ' + remedy}"
        )


TASKS: Registry[Task] = Registry("task", Task)  # type: ignore[type-abstract]
"""All tasks by name."""

_AUTO = {
    "classification": "classification",
    "arrays": "classification",
    "segmentation": "segmentation",
    "text": "language",
}


def make_task(name: str, dataset: Dataset, *, label_smoothing: float = 0.0) -> Task:
    """Return a task for a data set.

    Args:
        name: One of `TASKS`, or `auto` to go by what the targets of the data are.
        dataset: What to learn from.
        label_smoothing: Part of the weight of the true class that all classes share (Szegedy et
            al., 2016).
    """
    choose("task", name, [*TASKS, "auto"])
    return TASKS[_AUTO[dataset.task] if name == "auto" else name].for_dataset(
        dataset, float(label_smoothing)
    )


@dataclass(frozen=True)
class _CrossEntropy(Task):
    """Classes of something, by cross-entropy; the base of the tasks that have classes."""

    classes: int
    ignore: int | None = field(default=None, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        require_count(f"{type(self).__name__}.classes", self.classes)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"{type(self).__name__}.label_smoothing must be in [0, 1); got "
                f"{self.label_smoothing}."
            )

    @abstractmethod
    def _move(self, output: Tensor) -> Tensor:
        """Return the output with its classes last."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        losses = self._losses(output, target, self.label_smoothing)
        return losses.sum() / max(
            self.weight(target), 1.0
        )  # nothing that counts: a loss and a gradient of zero

    def weight(self, target: Tensor) -> float:
        return float(target.numel() if self.ignore is None else (target != self.ignore).sum())

    def predict(self, output: Tensor) -> Tensor:
        return self._move(output).argmax(-1)

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point():
            raise self._fail("target", "hold whole numbers", target.dtype)
        moved = self._move(output) if output.dim() == target.dim() + 1 else output
        if moved.shape != (*target.shape, self.classes):
            sizes = (
                f"{self.classes} numbers for each of {' x '.join(map(str, target.shape))} targets"
            )
            raise self._fail(
                "output",
                f"have {sizes}",
                f"shape {tuple(output.shape)}",
                "Make the model with as many classes.",
            )
        known = target if self.ignore is None else target[target != self.ignore]
        if known.numel() and (int(known.min()) < 0 or int(known.max()) >= self.classes):
            raise self._fail(
                "target",
                f"be in 0 to {self.classes - 1}",
                f"{int(known.min())} to {int(known.max())}",
            )

    def _losses(self, output: Tensor, target: Tensor, smoothing: float) -> Tensor:
        """Cross-entropies, one for each target, zero where it is ignored."""
        logits = self._move(output).reshape(-1, self.classes)
        ignore = -100 if self.ignore is None else self.ignore
        return functional.cross_entropy(
            _full(logits),
            target.reshape(-1).long(),
            ignore_index=ignore,
            reduction="none",
            label_smoothing=smoothing,
        )


@final
@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(_CrossEntropy):
    """One class for each sample, by cross-entropy; scored by the part that is right (`accuracy`).

    Args:
        classes: How many there are.
        ignore: The target that does not count, if there is one.
        label_smoothing: Part of the weight of the true class that all classes share.

    Shape:
        Outputs (batch, classes), targets (batch,).
    """

    name = "classification"
    metric = "accuracy"

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        _require_data(
            cls.name, dataset, ("classification", "arrays"), "have one label for each sample"
        )
        return cls(len(dataset.classes), ignore=dataset.ignore, label_smoothing=label_smoothing)

    def score(self) -> Score:
        return Agreement(self.predict, self.classes, self.ignore)

    def _move(self, output: Tensor) -> Tensor:
        return output


@final
@TASKS.register("segmentation")
@dataclass(frozen=True)
class Segmentation(_CrossEntropy):
    """One class for each pixel, by cross-entropy.

    With the counts of right (`TP`), wrongly found (`FP`) and missed (`FN`) pixels of each class
    over the whole data set, the scores are `miou`, the mean of `TP / (TP + FP + FN)` over the
    classes in truth or prediction; `macc`, the mean of `TP / (TP + FN)` over the classes in truth;
    `aacc`, the part of all pixels that is right. Ignored pixels are left out.

    Args:
        classes: How many there are.
        ignore: The target of pixels that do not count.
        label_smoothing: Part of the weight of the true class that all classes share.

    Shape:
        Outputs (batch, classes, height, width), targets (batch, height, width).
    """

    name = "segmentation"
    metric = "miou"

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        _require_data(cls.name, dataset, ("segmentation",), "have masks")
        return cls(len(dataset.classes), ignore=dataset.ignore, label_smoothing=label_smoothing)

    def score(self) -> Score:
        return Overlap(self.predict, self.classes, self.ignore)

    def _move(self, output: Tensor) -> Tensor:
        return output.movedim(1, -1)


@final
@TASKS.register("language")
@dataclass(frozen=True)
class LanguageModelling(_CrossEntropy):
    """The next word after each word, by cross-entropy; scored by `perplexity`, `exp` of the mean over words without smoothing.

    Args:
        classes: How many words the vocabulary has.
        ignore: The target of words that do not count.
        label_smoothing: Part of the weight of the true word that all words share.

    Shape:
        Outputs (batch, length, classes), targets (batch, length).
    """

    name = "language"
    metric = "perplexity"
    higher_is_better = False

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        _require_data(cls.name, dataset, ("text",), "be text")
        return cls(len(dataset.classes), ignore=dataset.ignore, label_smoothing=label_smoothing)

    def score(self) -> Score:
        def measure(output: Tensor, target: Tensor) -> Tensor:
            losses = self._losses(output, target, 0.0)
            return losses if self.ignore is None else losses[target.reshape(-1) != self.ignore]

        return Mean("perplexity", measure, torch.exp)

    def _move(self, output: Tensor) -> Tensor:
        return output


@final
@TASKS.register("binary-regression")
@dataclass(frozen=True)
class BinaryRegression(Task):
    """Two classes as the numbers -1 and 1, by the square loss; scored by the part with the right sign (`accuracy`).

    The loss is the mean of `(f(x) - y)^2 / 2` over samples: the objective of Gao et al. (2022, eq.
    5, with the gradients of eqs. 10 to 13) divided by their number. The paper leaves open which
    numbers stand for its two classes.

    Shape:
        Outputs (batch, 1) or (batch,), targets (batch,), classes 0 and 1.
    """

    name = "binary-regression"
    metric = "accuracy"

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        _refuse_smoothing(cls.name, label_smoothing)
        _require_data(
            cls.name, dataset, ("classification", "arrays"), "have one label for each sample"
        )
        if len(dataset.classes) != 2:
            raise ValueError(
                f"The data of task {cls.name!r} must have two classes; got "
                f"{len(dataset.classes)} in {dataset.name!r}. "
                "Select two of them, or choose task 'classification'."
            )
        return cls()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        output = _full(output.reshape(-1))
        return 0.5 * functional.mse_loss(output, 2 * target.to(output) - 1)

    def score(self) -> Score:
        return Agreement(self.predict, 2, None)

    def predict(self, output: Tensor) -> Tensor:
        return (output.reshape(len(output)) > 0).long()

    def check(self, output: Tensor, target: Tensor) -> None:
        if (
            target.is_floating_point()
            or target.dim() != 1
            or (len(target) and not 0 <= int(target.min()) <= int(target.max()) <= 1)
        ):
            raise self._fail(
                "target",
                "be classes 0 and 1, shape (batch,)",
                f"{target.dtype} of shape {tuple(target.shape)}",
            )
        if output.shape not in ((len(target), 1), (len(target),)):
            raise self._fail(
                "output", "have one number for each sample", f"shape {tuple(output.shape)}"
            )


@final
@TASKS.register("restoration")
@dataclass(frozen=True)
class Restoration(Task):
    """A clean picture from a damaged one, by the mean square error of all pixels and channels.

    The score `psnr` is `-10 log10(mse)` dB of each picture, for values in [0, 1], averaged over
    pictures. An error below 1e-10 counts as 1e-10, so that exact pictures have 100 dB and not
    infinitely many.

    Shape:
        Outputs and targets (batch, channels, height, width).
    """

    name = "restoration"
    metric = "psnr"

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        _refuse_smoothing(cls.name, label_smoothing)
        if dataset.task == "text" or len(dataset.shape) != 3:
            raise ValueError(
                f"The data of task {cls.name!r} must be pictures; got {dataset.task} of shape "
                f"{dataset.shape} in {dataset.name!r}."
            )
        return cls()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        output = _full(output)
        return functional.mse_loss(output, target.to(output))

    def score(self) -> Score:
        return Mean("psnr", _decibels, lambda mean: mean)

    def predict(self, output: Tensor) -> Tensor:
        return output.clamp(0, 1)

    def check(self, output: Tensor, target: Tensor) -> None:
        if not target.is_floating_point() or target.dim() != 4:
            got = f"{target.dtype} of shape {tuple(target.shape)}"
            raise self._fail(
                "target",
                "be clean pictures of floats",
                got,
                "Set data.noise, or put AddNoise(sigma) into the transform.",
            )
        if output.shape != target.shape:
            raise self._fail(
                "output",
                f"have the shape {tuple(target.shape)} of the targets",
                tuple(output.shape),
            )


def _full(output: Tensor) -> Tensor:
    return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output


def _decibels(output: Tensor, target: Tensor) -> Tensor:
    errors = (output.double() - target.double()).square().flatten(1).mean(1)
    return -10 * errors.clamp(min=LEAST_ERROR).log10()


def _refuse_smoothing(name: str, label_smoothing: float) -> None:
    if label_smoothing:
        raise ValueError(
            f"make_task.label_smoothing must be 0 for task {name!r}, which has no "
            f"cross-entropy; got {label_smoothing}."
        )


def _require_data(name: str, dataset: Dataset, kinds: tuple[str, ...], rule: str) -> None:
    if dataset.task not in kinds or not dataset.classes:
        classes = f"{len(dataset.classes)} classes" if dataset.task in kinds else dataset.task
        raise ValueError(
            f"The data of task {name!r} must {rule}; got {classes} in {dataset.name!r}."
        )
