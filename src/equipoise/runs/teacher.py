"""Training that learns from the model of another run as well."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from equipoise.core import SettingError, SourceError
from equipoise.core.printable import printable_name
from equipoise.data import Dataset, Transform
from equipoise.engine import Progress, Task
from equipoise.engine.distillation import Distillation, DistillationLoss
from equipoise.engine.input_scale import describe_scale
from equipoise.models import Model
from equipoise.runs.build import first_samples, seen_shape, try_out
from equipoise.runs.config import Config
from equipoise.runs.held_out import may_know_held_out
from equipoise.runs.samples import require_alike
from equipoise.runs.saved_run import Run, open_run

__all__ = ["load_teacher"]

KEY = "task.teacher.run"
READING = ("name", "options", "mean", "std", "size", "greyscale", "standardize", "impute")
"""Settings of data that say how samples are read and scaled."""
BYTES = (0.0, 1.0)
"""The range of images in files."""


def load_teacher(
    config: Config,
    task: Task,
    dataset: Dataset,
    transform: Transform | None,
    device: torch.device,
    progress: Progress,
    *,
    trust: bool = False,
) -> DistillationLoss | None:
    """Return what the run that a config names as its teacher teaches, if it names one.

    The teacher must know the same classes in the same order, and must have seen samples read and
    scaled as they are here: it would otherwise teach nonsense, and nobody would be told.

    Args:
        config: What to do.
        task: What is learnt.
        dataset: The training samples.
        transform: What is done to each batch that is scored.
        device: Where training runs.
        progress: Where it is said who teaches.
        trust: As of `open_run`.
    """
    settings = config.task.make_distillation()
    if settings is None:
        return None
    run = _open(settings, trust=trust)
    # Whether the task can be taught is said before what is odd about the teacher.
    own = run.config.model
    found = DistillationLoss(
        run.model.to(device),
        task,
        settings.weight,
        settings.temperature,
        about={"name": own.name, "options": own.options},
    )
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
    if difference := _find_difference(run, config, dataset, transform):
        raise SettingError(
            KEY,
            "be a run that saw samples as they are here, by the same settings of data "
            f"({', '.join(READING)}) and, of a table, from the same training rows",
            None,
            got=f"{str(run.folder)!r}, which saw {difference}",
        )
    try_out(cast(Model, found.teacher), run.task, dataset, transform)
    doubts = _doubts(run, config, dataset)
    progress.note(f"learning from the model of {printable_name(run.folder)}{doubts}")
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


def _find_difference(
    run: Run, config: Config, dataset: Dataset, transform: Transform | None
) -> str:
    """How the samples that the teacher was scored on were read and changed otherwise, if so."""
    shape, its_shape = seen_shape(config.data, dataset), seen_shape(run.config.data, run.about)
    if shape != its_shape:
        return f"samples of shape {its_shape}, where they have {shape} here"
    for name in READING:
        here, there = (getattr(each.data, name) for each in (config, run.config))
        if here != there:
            return f"them with data.{name} = {there!r}, where it is {here!r} here"
    if len(dataset.shape) == 3:
        own_range = dataset.about().get("value_range") or BYTES
        its_range = run.about.value_range or BYTES
        if scale := describe_scale(torch.tensor(own_range), *its_range):
            return f"images of another scale: here {scale}"
    own, theirs = (first_samples(dataset, each)[0] for each in (transform, run.transform))
    same = own.shape == theirs.shape and bool(
        own.isclose(theirs, rtol=0, atol=0, equal_nan=True).all()
    )
    # Tables are encoded when they are read.
    return "" if same and run.about.encoding == dataset.encoding else "them otherwise"


def _doubts(run: Run, config: Config, dataset: Dataset) -> str:
    """What a user should know of a teacher that is not refused."""
    doubts = []
    if not (run.folder / "summary.json").exists():
        doubts.append("has not finished")
    if may_know_held_out(run.folder, config, dataset):
        doubts.append("may have learnt from samples that are held out here")
    return f", which {' and '.join(doubts)}" if doubts else ""
