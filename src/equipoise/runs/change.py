"""Settings that may change when a run is resumed."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

from equipoise.core import SettingError, SourceError
from equipoise.engine.settings import TrainConfig
from equipoise.runs.config import Config, load_config

__all__ = ["require_resumable"]

FREE = {
    "data.root",
    "data.download",
    "data.workers",
    "data.memory",
    "data.on_bad_sample",  # the steps that are over met no bad sample, or went on without it
    *(f"train.{name}" for name in TrainConfig.free),
}


def require_resumable(folder: Path, config: Config) -> None:
    """Raise unless a run can be resumed with a changed config.

    What does not change what is computed may change; and there may be more epochs, if the learning
    rates of the steps that are over do not depend on how many there are.

    Args:
        folder: The folder of the run.
        config: What it is to be resumed with.
    """
    kept = load_config(folder)
    for section in fields(kept):
        before, after = getattr(kept, section.name), getattr(config, section.name)
        for each in fields(before):
            key = f"{section.name}.{each.name}"
            old, new = getattr(before, each.name), getattr(after, each.name)
            if old == new or key in FREE:
                continue
            quoted = shlex.quote(str(folder))
            again = f"equipoise train {quoted} --output NEW {key}=... --from-weights"
            remedy = f"Go on in another run with: {again}"
            if key != "train.epochs":
                rule = f"stay {old!r} when the run is resumed"
                raise SourceError(folder, SettingError(key, rule, new, remedy))
            if kept.train.steps:
                rule = f"stay {old}, since the run is measured in train.steps"
                raise SourceError(folder, SettingError(key, rule, new))
            if new < old:
                raise SourceError(folder, SettingError(key, f"be at least {old} as before", new))
            if kept.train.image_sizes:
                rule = f"stay {old} when the run is resumed, since train.image_sizes depend on it"
                raise SourceError(folder, SettingError(key, rule, new, remedy))
            if kept.schedule.depends_on_length:
                rule = (
                    f"stay {old} when the run is resumed, since the learning rates of the schedule "
                    f"{kept.schedule.name!r} depend on it"
                )
                raise SourceError(folder, SettingError(key, rule, new, remedy))
