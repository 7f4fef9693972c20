"""Scores of a model on a data set, and how many of its solves missed their tolerance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import SettingError, interruption, stop_requested
from equipoise.core.module_mode import evaluation_mode
from equipoise.data import Dataset, Loading, Transform, batch_count, batches
from equipoise.engine.distributed import Group
from equipoise.engine.precision import autocast
from equipoise.engine.segment_memory import SegmentMemory
from equipoise.engine.settings import Precision
from equipoise.engine.solve_monitor import SolveMonitor
from equipoise.engine.tasks import ClassScore, Task, finite_samples
from equipoise.engine.totals import Totals

__all__ = ["Evaluation", "ScoreWarning", "evaluate"]


class ScoreWarning(UserWarning):
    """A score cannot be computed from these samples; the sentence says why."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model.

    Attributes:
        metrics: The mean loss, and the scores of the task.
        samples: How many samples were scored.
        missed: How many of them have an equilibrium that missed the tolerance.
        nonfinite: How many of them have an output with NaN or infinity in it.
        status: How their solves ended.
        forward_steps: Steps of a solve, on average; `None` if the model has no equilibrium.
        confusion: How often which class (row) was taken for which (column), if the task has
            classes.
        per_class: Precision, recall and F1 of each class, likewise.
    """

    metrics: dict[str, float | None]
    samples: int
    missed: int
    nonfinite: int
    status: dict[str, int]
    forward_steps: float | None
    confusion: Tensor | None = field(default=None, repr=False)
    per_class: list[ClassScore] | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, without the confusion matrix, as one level of plain values."""
        rest = {
            "samples": self.samples,
            "missed": self.missed,
            "nonfinite": self.nonfinite,
            "status": self.status,
            "forward_steps": self.forward_steps,
        }
        return {**self.metrics, **rest}


def evaluate(
    model: nn.Module,
    task: Task,
    dataset: Dataset,
    *,
    batch: int = 256,
    transform: Transform | None = None,
    group: Group | None = None,
    precision: Precision = "float32",
    flip: bool = False,
    on_batch: Callable[[int, int], None] | None = None,
    loading: Loading | None = None,
) -> Evaluation:
    """Score a model on a data set; its mode and its weights stay as they are.

    A sample with a solve that met NaN has no output, whatever the model returns in its place: it
    is scored as NaN, which is wrong, and left out of the loss.

    A model with a memory reads a text in `batch` pieces side by side, each from its beginning to
    its end, and remembers nothing at the beginning of each.

    A signal that `uninterrupted` puts off stops it between two batches, by `Interrupted`.

    Args:
        model: The model.
        task: What it was trained for.
        dataset: The samples to score.
        batch: Samples in each batch of each process.
        transform: What is done to each batch.
        group: The processes that score together; by default this one alone.
        precision: Of what autocast may run lower than float32.
        flip: Whether to score the mean of the outputs for each image and its mirror image; for
            classes of images only.
        on_batch: Called before each batch and in the end, with how many samples of all processes
            are scored, and how many there are.
        loading: How samples are loaded; by default they are read when they are needed.
    """
    if flip and (dataset.task != "classification" or len(dataset.shape) != 3):
        got = f"{dataset.task} of samples of shape {tuple(dataset.shape)}"
        raise SettingError("evaluate.flip", "be False but for classes of images", flip, got=got)
    group = group or Group()
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    solves, score, totals = SolveMonitor(model), task.score(), Totals(task)
    memory = SegmentMemory(model)
    # Samples, those that missed the tolerance, and those whose output is not finite.
    counted = torch.zeros(3, dtype=torch.float64)
    # Some processes may have one batch more: they agree to stop where all of them have one.
    common = batch_count(dataset, batch, shuffle=False, rank=group.world - 1, world=group.world)
    found = batches(
        dataset,
        batch,
        shuffle=False,
        transform=transform,
        rank=group.rank,
        world=group.world,
        continuous=memory.length > 0,
        loading=loading,
    )
    with torch.no_grad(), evaluation_mode(model), solves.listening(), closing(found):
        for number, (x, y) in enumerate(found):
            if number < common and group.any(stop_requested()):
                raise interruption()
            if on_batch is not None:
                on_batch(min(number * batch * group.world, len(dataset)), len(dataset))
            if not len(x):  # all its samples are bad
                continue
            solves.clear()
            with autocast(device, precision):
                x = x.to(device)
                output = memory.run(model, x)
                memory.advance()
                output = (output + model(x.flip(-1))) / 2 if flip else output
            y = y.to(device)
            task.check(output, y)
            late, broken = solves.missed(len(x)), solves.nonfinite(len(x)).to(device)
            odd = ~finite_samples(output)
            counted += torch.tensor([len(x), int(late.sum()), int(odd.sum())])
            loss, weight = _sound_loss(task, output, y, ~broken)
            totals.add(loss, weight, solves)
            if bool(broken.any()):
                output = output.clone()
                output[broken] = math.nan
            score.update(output, y)
    if on_batch is not None:
        on_batch(len(dataset), len(dataset))
    totals.add_score(score)
    totals.load(group.sum(totals.vector))
    samples, missed, nonfinite = (int(value) for value in group.sum(counted))
    line = totals.line()
    for sentence in totals.score.explain_unknown() if group.rank == 0 else ():
        warnings.warn(f"{dataset.name} {dataset.split}: {sentence}", ScoreWarning, stacklevel=2)
    return Evaluation(
        metrics={name: line[name] for name in ("loss", *totals.score.compute())},
        samples=samples,
        missed=missed,
        nonfinite=nonfinite,
        status=line["forward_status"],
        forward_steps=line["forward_steps"],
        confusion=totals.score.confusion,
        per_class=totals.score.per_class(),
    )


def _sound_loss(task: Task, output: Tensor, y: Tensor, sound: Tensor) -> tuple[float, float]:
    """The mean loss of the samples that have an output, and what the mean is over."""
    if not bool(sound.all()):
        output, y = output[sound], y[sound]
    return (task.loss(output, y).item(), task.weight(y)) if len(y) else (0.0, 0.0)
