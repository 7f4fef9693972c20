"""What a step of a run costs, found by making some without keeping anything."""

from __future__ import annotations

import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch

from equipoise.core import flush_denormals
from equipoise.engine.step import Verdict
from equipoise.engine.trainer import Trainer

__all__ = ["StepCost", "measure_step"]


@dataclass(frozen=True)
class StepCost:
    """What a step of a run costs.

    Attributes:
        first_seconds: Time of the first step, in which memory is found and code is loaded.
        seconds: Time of a step after it, with the time to load its samples.
        sample_seconds: Time to score a sample; 0 if nothing is scored.
        memory: Bytes that this process had at its peak: on a GPU those of tensors, else all; `None`
            where the system does not tell.
        loss: The loss of the first step.
        skip_reason: Why a step was skipped; empty if none was.
    """

    first_seconds: float
    seconds: float
    sample_seconds: float
    memory: int | None
    loss: float
    skip_reason: str

    def run_seconds(self, trainer: Trainer) -> float:
        """Return how long the whole run will take.

        Args:
            trainer: The run.
        """
        scoring = trainer.scorer.samples_left(trainer.course.epochs) * self.sample_seconds
        seconds = self.seconds * trainer.image_sizes.pixels  # it was measured at their own size
        return self.first_seconds + (trainer.course.steps - 1) * seconds + scoring


def measure_step(trainer: Trainer) -> StepCost:
    """Make a step, another to see how long one takes, and an evaluation of one batch.

    Nothing is written; the weights of the model change.

    Args:
        trainer: A run that was not begun.
    """
    settings, group = trainer.settings, trainer.group
    cpu = group.device.type == "cpu"
    torch.manual_seed(settings.seed + group.rank)
    trainer.stepper.wrapped = group.wrap(trainer.model)
    times: list[float] = []
    losses: list[float] = []
    reason = ""
    with (
        flush_denormals() if settings.flush_denormals and cpu else nullcontext(),
        trainer.solves.listening(),
        closing(trainer.course.batches(trainer.position)) as samples,
    ):
        start = time.monotonic()
        for (x, y), rows in zip(samples, trainer.course.rows(trainer.position), strict=True):
            rate = trainer.learning_rate(len(times))
            step = trainer.stepper.compute(x.to(group.device), y.to(group.device), rate, rows)
            verdict = trainer.stepper.verdict(step)
            trainer.stepper.apply(step, verdict)
            losses.append(step.loss.item())  # waits for a GPU
            times.append(time.monotonic() - start)
            if verdict is Verdict.SKIP:
                reason = trainer.stepper.skip_reason
            if len(times) == 2 or reason:
                break
            start = time.monotonic()
        scoring = 0.0 if reason else _sample_seconds(trainer)
    return StepCost(times[0], times[-1], scoring, _peak_memory(group.device), losses[0], reason)


def _sample_seconds(trainer: Trainer) -> float:
    """How long a sample of an evaluation takes, from one batch."""
    dataset = trainer.test
    if dataset is None or not len(dataset):
        return 0.0
    count = min(len(dataset), trainer.settings.evaluate_batch * trainer.group.world)
    start = time.monotonic()
    trainer.evaluate(dataset.select_rows(range(count)))
    return (time.monotonic() - start) / count


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
