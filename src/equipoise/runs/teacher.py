"""Training that learns from the model of another run as well."""

from __future__ import annotations

from pathlib import Path

import torch

from equipoise.core import SettingError, SourceError
from equipoise.data import Dataset, Transform, batches
from equipoise.engine import Task
from equipoise.engine.dependence import trial_size
from equipoise.engine.distillation import Distillation, DistillationLoss
from equipoise.engine.input_scale import describe_scale
from equipoise.runs.build import seen_shape, try_out
from equipoise.runs.config import Config
from equipoise.runs.samples import require_alike
from equipoise.runs.saved_run import Run, open_run

__all__ = ["load_teacher"]

KEY = "task.teacher.run"


def load_teacher(
    config: Config,
    task: Task,
    dataset: Dataset,
    transform: Transform | None,
    device: torch.device,
    *,
    trust: bool = False,
) -> DistillationLoss | None:
    """Return what the run that a config names as its teacher teaches, if it names one.

    The teacher must know the same classes in the same order, and must have seen samples scaled as
    they are here: it would otherwise teach nonsense, and nobody would be told.

    Args:
        config: What to do.
        task: What is learnt.
        dataset: The training samples.
        transform: What is done to each batch that is scored.
        device: Where training runs.
        trust: As of `open_run`.
    """
    settings = config.task.make_distillation()
    if settings is None:
        return None
    run = _open(settings, trust=trust)
    # Whether the task can be taught is said before what is odd about the teacher.
    teacher = run.model.requires_grad_(False).to(device)
    found = DistillationLoss(teacher, task, settings.weight, settings.temperature)
    if not run.task.takes_mixed_targets:
        raise SettingError(KEY, "be a run that gives samples classes", run.task.name)
    if run.about.classes != dataset.classes:
        raise SettingError(
            KEY, "be a run with the classes of these data, in their order", run.about.classes
        )
    try:
        require_alike(run.about, dataset)
    except SettingError as error:
        raise SourceError(run.folder, error) from error
    _require_same_samples(run, config, dataset, transform)
    try_out(teacher, run.task, dataset, transform)
    return found


def _open(settings: Distillation, *, trust: bool) -> Run:
    folder = Path(settings.run)
    try:
        return open_run(folder, trust=trust)
    except SourceError as error:
        if folder.is_dir():
            raise
        raise SettingError(
            KEY, "be the folder of a run", settings.run, got=f"{settings.run!r}, which is none"
        ) from error


def _require_same_samples(
    run: Run, config: Config, dataset: Dataset, transform: Transform | None
) -> None:
    """Raise unless the teacher was scored on samples read and changed in the same ways."""
    raw, own, theirs = (
        next(iter(batches(dataset, trial_size(dataset), shuffle=False, transform=each)))[0]
        for each in (None, transform, run.transform)
    )
    shape, its_shape = seen_shape(config.data, dataset), seen_shape(run.config.data, run.about)
    scale = describe_scale(raw, *(run.about.value_range or (0, 1))) if raw.dim() == 4 else ""
    if shape != its_shape:
        found = f"samples of shape {its_shape}, where they have {shape} here"
    elif scale:
        found = f"images of another scale: here {scale}"
    elif (
        own.shape != theirs.shape
        or not own.isclose(theirs, rtol=0, atol=0, equal_nan=True).all()
        or run.about.encoding != dataset.encoding  # of tables, which are encoded when read
    ):
        found = "them otherwise"
    else:
        return
    raise SettingError(
        KEY,
        "be a run that saw samples as they are here, by the same settings of data (options, mean, "
        "std, size, greyscale, standardize, impute) and, of a table, from the same training rows",
        None,
        got=f"{str(run.folder)!r}, which saw {found}",
    )
