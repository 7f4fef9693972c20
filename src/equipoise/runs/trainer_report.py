"""The page about a run that was trained from Python, without a config."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import SettingError, write_atomically
from equipoise.core.module_mode import evaluation_mode
from equipoise.engine import Summary, Trainer, read_metrics
from equipoise.models import find_equilibria
from equipoise.report import RunReport, ShownSample, SolvePath, Survey, render_report
from equipoise.runs.closeup import Trained
from equipoise.runs.environment import describe_environment
from equipoise.runs.run_report import describe_run, look_at

__all__ = ["report_trainer"]


def report_trainer(trainer: Trainer, summary: Summary | None = None) -> Path:
    """Write a page about a run of a `Trainer` into its folder, and return where it is.

    The samples that it shows are those that the trainer scores after each epoch, with the weights
    that the model has now.

    Args:
        trainer: The trainer; it must have a folder.
        summary: What its `fit` returned; without it the run counts as not finished.
    """
    folder = trainer.folder
    if folder is None:
        raise SettingError("Trainer.folder", "be given to keep a page about the run", None)
    path = folder / "report.html"
    if not trainer.group.is_main:
        return path
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    environment = describe_environment(trainer.group.world)
    started = environment.pop("started")  # of this page, since nobody wrote down that of the run
    values = None if summary is None else summary.to_dict()
    confusion = None if summary is None else summary.confusion
    solves, shown, found = _look(trainer)
    report = RunReport(
        title=f"{_name(trainer)} on {trainer.train.name}",
        subtitle=describe_run({"started": started}, ""),
        config=_describe_settings(trainer),
        environment=environment,
        steps=[line for line in lines if line.get("kind") == "step"],
        epochs=[line for line in lines if line.get("kind") == "epoch"],
        summary=values,
        classes=trainer.train.classes,
        confusion=None if confusion is None else np.array(confusion),
        samples=shown,
        ignore=trainer.train.ignore,
        solves=solves,
        survey=found,
    )
    write_atomically(path, render_report(report))
    return path


def _look(trainer: Trainer) -> tuple[list[SolvePath], list[ShownSample], Survey | None]:
    if trainer.test is None or not len(trainer.test):
        return [], [], None
    settings = trainer.settings
    trained = Trained(
        trainer.model,
        trainer.task,
        trainer.train.classes,
        trainer.test_transform,
        settings.evaluate_batch,
        settings.precision,
    )
    with evaluation_mode(trainer.model):
        return look_at(trained, trainer.test)


def _name(trainer: Trainer) -> str:
    return str(getattr(trainer.model, "name", type(trainer.model).__name__))


def _describe_settings(trainer: Trainer) -> dict[str, Any]:
    """What a config would say, as far as a trainer knows it."""
    kind, task, data = type(trainer.model), trainer.task, trainer.train
    tolerances = {layer.stop.tolerance for layer in find_equilibria(trainer.model).values()}
    options = {"tolerance": tolerances.pop()} if len(tolerances) == 1 else {}
    return {
        "model": {
            "name": _name(trainer),
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "options": options,
        },
        "data": {
            "name": data.name,
            "shape": list(data.shape),
            "samples": len(data),
            "scored": 0 if trainer.test is None else len(trainer.test),
        },
        "task": {
            "name": task.name,
            # most tasks are dataclasses, but one of the user's own need not be
            **(asdict(task) if is_dataclass(task) else {}),
        },
        "train": asdict(trainer.settings),
        "optimizer": asdict(trainer.optimizer_settings),
        "schedule": asdict(trainer.schedule),
    }
