"""Clean images from damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError
from equipoise.data import Dataset
from equipoise.engine.tasks.answer import Answer, ImageAnswer
from equipoise.engine.tasks.metric import Metric
from equipoise.engine.tasks.score import Mean, Score
from equipoise.engine.tasks.task import TASKS, Task, refuse_smoothing, to_full_precision

__all__ = ["Restoration"]

MIN_ERROR = 1e-10  # mean square error, hence 100 dB at most


@final
@TASKS.register("restoration")
@dataclass(frozen=True)
class Restoration(Task):
    """A clean image from a damaged one, by the mean square error of all pixels and channels.

    The score `psnr` is `-10 log10(mse)` dB of each image, for values in [0, 1], averaged over
    images. An error below 1e-10 counts as 1e-10, so that exact images have 100 dB and not
    infinitely many.

    Shape:
        Outputs and targets (batch, channels, height, width).
    """

    name = "restoration"
    metrics = (Metric("psnr", "Peak signal-to-noise ratio", "dB", label="PSNR"),)
    answer_type = ImageAnswer
    data_kinds = ("images",)
    learns_classes = False
    takes_whole_images = True
    shown_samples = 4
    input_caption = "degraded"

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        refuse_smoothing(cls.name, label_smoothing)
        if dataset.task == "text" or len(dataset.shape) != 3:
            raise SettingError(
                f"The data of task {cls.name!r}",
                "be images",
                dataset,
                got=f"{dataset.task} of shape {dataset.shape} in {dataset.name!r}",
            )
        return cls()

    def outputs(self, dataset: Dataset) -> int | None:
        return dataset.shape[0]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        output = to_full_precision(output)
        return functional.mse_loss(output, target.to(output))

    def score(self) -> Score:
        return Mean("psnr", _decibels, lambda mean: mean)

    def predict(self, output: Tensor) -> Tensor:
        """Return the outputs as images, with values in [0, 1]."""
        return output.clamp(0, 1)

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        return [ImageAnswer(image) for image in self.predict(output)]

    def illustrate(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"restored": self.predict(output), "clean": target}

    def check(self, output: Tensor, target: Tensor) -> None:
        if not target.is_floating_point() or target.dim() != 4:
            raise self.mismatch(
                "target",
                "be clean images of floats",
                f"{target.dtype} of shape {tuple(target.shape)}",
                "Set data.noise or data.degradation, or put Degrade(sigma) into the transform.",
            )
        if output.shape != target.shape:
            raise self.mismatch(
                "output",
                f"have the shape {tuple(target.shape)} of the targets",
                tuple(output.shape),
            )


def _decibels(output: Tensor, target: Tensor) -> Tensor:
    errors = (output.double() - target.double()).square().flatten(1).mean(1)
    return -10 * errors.clamp(min=MIN_ERROR).log10()
