"""A run that is tried out: everything is built, a step is made, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from equipoise.core import ConvergenceError, interruptible
from equipoise.engine import Trainer, make_progress
from equipoise.engine.pace import describe_duration
from equipoise.engine.step_cost import StepCost, measure_step
from equipoise.runs.config import Config
from equipoise.runs.own_code import with_absolute_paths
from equipoise.runs.run import check_folder, open_group, prepare, set_up_process

__all__ = ["dry_run"]


def dry_run(config: Config, folder: Path | None = None, *, trust: bool = False) -> str:
    """Build all of a run, make a step, and return what a step and the run cost, in words.

    A step that would be skipped raises a `ConvergenceError` that says why.

    Args:
        config: What to do.
        folder: Where the run would be kept, which must be new or empty.
        trust: As of `open_run`, for a run that teaches.
    """
    config = with_absolute_paths(config)
    if folder is not None:
        check_folder(folder, resume=False)
    set_up_process(config)
    with interruptible(), open_group(config) as group:
        trainer, _, _ = prepare(config, None, group, make_progress(quiet=True), trust=trust)
        cost = measure_step(trainer)
    if cost.skip_reason:
        raise ConvergenceError(f"the first steps would be skipped: {cost.skip_reason}")
    return "\n".join(_describe(trainer, cost))


def _describe(trainer: Trainer, cost: StepCost) -> Iterator[str]:
    settings = trainer.settings
    yield trainer.title()
    parts = f" in {settings.accumulate} parts" if settings.accumulate > 1 else ""
    yield (
        f"a step of {min(settings.batch, len(trainer.train)):,} samples{parts}: "
        f"{_short(cost.seconds)}, the first {_short(cost.first_seconds)}; loss {cost.loss:.4g}"
    )
    scored = trainer.scorer.sample or trainer.test
    if scored is not None:
        seconds = len(scored) * cost.sample_seconds
        yield f"an evaluation of {len(scored):,} samples: {_short(seconds)}"
    yield from trainer.remarks()
    if cost.memory is not None:
        of = "tensors on the GPU" if trainer.group.device.type == "cuda" else "this process"
        yield f"memory of {of}: {cost.memory / 2**20:,.0f} MiB at its peak"
    yield (
        f"the run: {trainer.course.steps:,} steps in {trainer.course.epochs:,} epochs, about "
        f"{describe_duration(cost.run_seconds(trainer))}"
    )
    yield "nothing was written"


def _short(seconds: float) -> str:
    """A time, in milliseconds if it is less than a second."""
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else describe_duration(seconds)
