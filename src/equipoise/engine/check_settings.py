"""Settings of a run that do not fit its data, its model or its processes."""

from __future__ import annotations

from torch import nn

from equipoise.core import SettingError
from equipoise.data import Transform
from equipoise.engine.log import require_tensorboard
from equipoise.engine.settings import TrainConfig
from equipoise.engine.step import part_size

__all__ = ["check_settings"]


def check_settings(
    settings: TrainConfig,
    model: nn.Module,
    *,
    samples: int,
    world: int,
    held_out: bool,
    transform: Transform | None = None,
) -> None:
    """Raise `SettingError` for settings that do not fit.

    Args:
        settings: How the run goes.
        model: What is trained.
        samples: How many samples it learns from.
        world: How many processes train together.
        held_out: Whether there are held-out samples.
        transform: What is done to each training batch.
    """
    if settings.warm_start and transform is not None and transform.random:
        raise SettingError(
            "train.warm_start",
            "be false where samples are changed at random, so that none comes back as it was",
            True,
            "Leave out data.augment, data.rand_augment, data.mix and data.noise.",
            got=f"true with {transform!r}",
        )
    if settings.patience and not held_out:
        raise SettingError(
            "train.patience",
            "come with held-out samples to watch",
            None,
            "Set data.holdout.",
            got="none",
        )
    if settings.batch % world:
        raise SettingError("train.batch", f"be a multiple of the {world} processes", settings.batch)
    local = settings.batch // world
    if settings.accumulate > local:
        raise SettingError(
            "train.accumulate", f"be at most {local}, the samples of a step", settings.accumulate
        )
    normalised = any(isinstance(part, nn.BatchNorm1d) for part in model.modules())
    if normalised and samples // world * world % settings.batch == 1:
        raise SettingError(
            "train.batch",
            "not leave one sample for the last step, which batch normalisation cannot take",
            settings.batch,
            "Choose another, or another data.subset.",
            got=f"{settings.batch} for {samples} samples",
        )
    if normalised and settings.accumulate > 1 and part_size(local, settings.accumulate) < 3:
        # Of two at most, a part of an odd number of samples would be one alone.
        raise SettingError(
            "train.accumulate",
            "leave three samples for each part, which batch normalisation needs",
            settings.accumulate,
            got=f"{settings.accumulate} for {local} samples",
        )
    if settings.tensorboard:
        require_tensorboard()
