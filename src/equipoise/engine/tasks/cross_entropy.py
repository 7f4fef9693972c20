"""Tasks with classes: one for each sample, or for each pixel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError, require_between, require_count
from equipoise.data import Dataset
from equipoise.engine.tasks.answer import Answer, LabelAnswer, MaskAnswer
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.score import Labels, Overlap, Score
from equipoise.engine.tasks.task import TASKS, Task, require_data, to_full_precision

__all__ = ["ACCURACY", "Classification", "CrossEntropyTask", "Segmentation", "label_answers"]

ACCURACY = Metric("accuracy", "Accuracy", "%")
TOP5 = Metric("top5", "Top-5 accuracy", "%", label="top-5 accuracy")
AUC = Metric("auc", "Area under the ROC curve", label="AUC")


@dataclass(frozen=True)
class CrossEntropyTask(Task):
    """The base of all tasks that have classes: cross-entropy, smoothed if wanted."""

    classes: int
    ignore: int | None = field(default=None, kw_only=True)
    label_smoothing: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        require_count(f"{type(self).__name__}.classes", self.classes)
        require_between(f"{type(self).__name__}.label_smoothing", self.label_smoothing, 0, 1, "[)")

    @abstractmethod
    def _classes_last(self, output: Tensor) -> Tensor:
        """Return the output with its classes in the last dimension."""

    def outputs(self, dataset: Dataset) -> int | None:
        return len(dataset.classes)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        losses = self._losses(output, target, self.label_smoothing)
        # Where nothing counts, the loss and its gradient are zero.
        return losses.sum() / max(self.weight(target), 1.0)

    def weight(self, target: Tensor) -> float:
        return float(target.numel() if self.ignore is None else (target != self.ignore).sum())

    def predict(self, output: Tensor) -> Tensor:
        """Return the most probable classes."""
        return self._classes_last(output).argmax(-1)

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.is_floating_point():
            raise self.mismatch("target", "hold whole numbers", target.dtype)
        moved = self._classes_last(output) if output.dim() == target.dim() + 1 else output
        if moved.shape != (*target.shape, self.classes):
            targets = " x ".join(map(str, target.shape))
            raise self.mismatch(
                "output",
                f"have {self.classes} numbers for each of {targets} targets",
                f"shape {tuple(output.shape)}",
                "Make the model with as many classes.",
            )
        known = target if self.ignore is None else target[target != self.ignore]
        if known.numel() and (int(known.min()) < 0 or int(known.max()) >= self.classes):
            raise self.mismatch(
                "target",
                f"be in 0 to {self.classes - 1}",
                f"{int(known.min())} to {int(known.max())}",
            )

    def _losses(self, output: Tensor, target: Tensor, smoothing: float) -> Tensor:
        """Cross-entropies, one for each target, zero where it is ignored."""
        logits = self._classes_last(output).reshape(-1, self.classes)
        ignore = -100 if self.ignore is None else self.ignore
        return functional.cross_entropy(
            to_full_precision(logits),
            target.reshape(-1).long(),
            ignore_index=ignore,
            reduction="none",
            label_smoothing=smoothing,
        )


@final
@TASKS.register("classification")
@dataclass(frozen=True)
class Classification(CrossEntropyTask):
    """One class for each sample, by cross-entropy; `accuracy` is the fraction that is right.

    Of more than five classes `top5` is the fraction whose class is among the five most probable
    ones, and of two classes `auc` is the area under the ROC curve (see `Labels`). The probability
    of a class is its softmax.

    A target may also be weights `w` of all classes that add up to 1, of a mixed image: the loss is
    then `-sum_c w_c log p_c`, and scores take the class with the largest weight for the true one.

    Args:
        classes: How many there are.
        ignore: The target that does not count, if there is one.
        label_smoothing: Fraction of the true class's weight that is spread over all classes.

    Shape:
        Outputs (batch, classes), targets (batch,) or floats (batch, classes).
    """

    name = "classification"
    metrics = (ACCURACY, TOP5, AUC)
    answer_type = LabelAnswer
    data_kinds = ("classification", "arrays")
    takes_mixed_targets = True

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        require_data(cls.name, dataset, cls.data_kinds, "have one label for each sample")
        return cls(len(dataset.classes), ignore=dataset.ignore, label_smoothing=label_smoothing)

    def outputs(self, dataset: Dataset) -> int | None:
        if len(dataset.classes) < 2:
            raise SettingError(
                "The training data",
                "have two classes to tell apart",
                dataset.classes,
                got=f"only {', '.join(map(repr, dataset.classes)) or 'none'} in {dataset.name!r}",
            )
        return len(dataset.classes)

    def weight(self, target: Tensor) -> float:
        return float(len(target)) if target.is_floating_point() else super().weight(target)

    def check(self, output: Tensor, target: Tensor) -> None:
        if target.dim() != 2 or not target.is_floating_point():
            super().check(output, target)
            return
        sums = target.sum(1)
        if (
            target.shape[1] != self.classes
            or bool((target < 0).any())
            or not torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
        ):
            raise self.mismatch(
                "target",
                f"be a class, or {self.classes} weights that add up to 1, for each sample",
                f"shape {tuple(target.shape)}, with sums from {sums.min():.4g} to {sums.max():.4g}",
            )
        super().check(output, target.argmax(1))

    def _losses(self, output: Tensor, target: Tensor, smoothing: float) -> Tensor:
        if not target.is_floating_point():
            return super()._losses(output, target, smoothing)
        logits = to_full_precision(output)
        return functional.cross_entropy(
            logits, target.to(logits), reduction="none", label_smoothing=smoothing
        )

    def score(self) -> Score:
        return Labels(self.predict, self.classes, self.ignore)

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        return label_answers(output.softmax(1), self.predict(output), classes)

    def _classes_last(self, output: Tensor) -> Tensor:
        return output


@final
@TASKS.register("segmentation")
@dataclass(frozen=True)
class Segmentation(CrossEntropyTask):
    """One class for each pixel, by cross-entropy.

    With the counts of right (`TP`), wrongly found (`FP`) and missed (`FN`) pixels of each class
    over the whole data set, the scores are `miou`, the mean of `TP / (TP + FP + FN)` over the
    classes in truth or prediction; `macc`, the mean of `TP / (TP + FN)` over the classes in truth;
    `aacc`, the fraction of all pixels that is right. Ignored pixels are left out.

    Args:
        classes: How many there are.
        ignore: The target of pixels that do not count.
        label_smoothing: Fraction of the true class's weight that is spread over all classes.

    Shape:
        Outputs (batch, classes, height, width), targets (batch, height, width).
    """

    name = "segmentation"
    metrics = (
        Metric("miou", "Mean intersection over union", "%", label="mIoU"),
        Metric("macc", "Mean accuracy of classes", "%", label="mAcc"),
        Metric("aacc", "Accuracy of pixels", "%", label="aAcc"),
    )
    answer_type = MaskAnswer
    data_kinds = ("segmentation",)
    takes_whole_images = True
    shown_samples = 4

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        require_data(cls.name, dataset, cls.data_kinds, "have masks")
        return cls(len(dataset.classes), ignore=dataset.ignore, label_smoothing=label_smoothing)

    def score(self) -> Score:
        return Overlap(self.predict, self.classes, self.ignore)

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        return [MaskAnswer(mask) for mask in self.predict(output)]

    def illustrate(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"truth": target, "prediction": self.predict(output[None])[0]}

    def _classes_last(self, output: Tensor) -> Tensor:
        return output.movedim(1, -1)


def label_answers(probability: Tensor, best: Tensor, classes: Sequence[str]) -> list[Answer]:
    """Return the classes of each sample by name, the most probable first.

    Args:
        probability: Of each class, shape (batch, classes).
        best: The class of each sample, which decides on ties, shape (batch,).
        classes: Their names.
    """
    if probability.shape[1] != len(classes):
        raise ValueError(
            f"the model tells {probability.shape[1]} classes apart; {len(classes)} have names"
        )
    order = probability.scatter(1, best[:, None], 2).argsort(dim=1, descending=True, stable=True)
    return [
        LabelAnswer(tuple((classes[i], row[i]) for i in ranked))
        for ranked, row in zip(order.tolist(), probability.tolist(), strict=True)
    ]
