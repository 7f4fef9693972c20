"""What a run sees of its model on the first training samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.data import Dataset, Transform, batches
from equipoise.engine.dependence import check_model, trial_size
from equipoise.engine.image_size import ImageSizes
from equipoise.engine.part_activity import MAX_PROBE, PartActivity, has_parts, measure_parts
from equipoise.engine.settings import TrainConfig
from equipoise.engine.tasks import Task
from equipoise.engine.warm_start import WarmStart

__all__ = ["Probe"]


class Probe:
    """Tries a model on the first training samples.

    Args:
        model: What is trained.
        task: What it is trained for.
        train: The samples to learn from.
        transform: What is done to them here: what is done to those that are scored, if any are.
        device: Where to try them.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        train: Dataset,
        transform: Transform | None,
        device: torch.device,
    ) -> None:
        self.model, self.task, self.train = model, task, train
        self.transform, self.device = transform, device

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the first samples and their targets, at most `count`."""
        count = min(count, len(self.train))
        x, y = next(batches(self.train, count, shuffle=False, transform=self.transform))
        return x.to(self.device), y.to(self.device)

    def check_model(self) -> None:
        """Raise `SettingError` if a language model sees at these weights what it must not see.

        What is multiplied by zero at first is seen only later, so each score is preceded by this.
        """
        if self.task.reads_text and len(self.train):
            check_model(self.model, self.task, *self.samples(trial_size(self.train)))

    def measure_parts(self, count: int) -> PartActivity | None:
        """Return what the parts of cells get and give, if there are any.

        Args:
            count: Samples that a step computes at once, of which not all may be needed.
        """
        if not has_parts(self.model):
            return None
        return measure_parts(self.model, self.task, *self.samples(min(MAX_PROBE, count)))

    def make_warm_start(self, settings: TrainConfig) -> WarmStart | None:
        """Return what keeps the equilibria of the samples, if that is wanted."""
        if not settings.warm_start or not len(self.train):
            return None
        x, _ = self.samples(2)
        return WarmStart(self.model, x, len(self.train), settings.warm_start_memory)

    def make_image_sizes(self, settings: TrainConfig) -> ImageSizes:
        """Return what shrinks images; it does nothing if that is not wanted."""
        sides = settings.image_sizes if len(self.train) else ()
        x, y = self.samples(2) if sides else (torch.empty(0), torch.empty(0))
        return ImageSizes(sides, self.model, x, y)
