"""A look at some of the scored samples: how their solves ended, and which classes are wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from equipoise.core import ConvergenceWarning, stop_if_requested
from equipoise.data import Dataset
from equipoise.engine.precision import autocast
from equipoise.engine.tasks import LabelAnswer
from equipoise.engine.tasks.task import to_full_precision
from equipoise.models import find_equilibria
from equipoise.report import Mistake, SolveSpread, Survey
from equipoise.runs.closeup import Trained, to_pixels
from equipoise.solvers import Solution
from equipoise.solvers.policy import Direction

__all__ = ["survey_samples"]

# A page takes seconds, not the minutes of a whole evaluation.
MAX_SAMPLES = 1000
MAX_NUMBERS = 4_000_000  # of all samples together, so that there are fewer of large images
MIN_SAMPLES = 8
MAX_MISTAKES = 12  # that are kept


def survey_samples(trained: Trained, samples: Dataset) -> Survey:
    """Score some samples, evenly spread over the data, one by one.

    A signal that `uninterrupted` puts off stops it between two batches, by `Interrupted`.

    Args:
        trained: The model.
        samples: The samples.
    """
    affordable = MAX_NUMBERS // max(1, math.prod(samples.shape))
    count = min(len(samples), MAX_SAMPLES, max(MIN_SAMPLES, affordable))
    numbers = [k * len(samples) // count for k in range(count)]
    has_labels = issubclass(trained.task.answer_type, LabelAnswer)
    mistakes: list[Mistake] = []
    seen = 0
    with _listening(trained) as solves, torch.no_grad():
        size = 1 if samples.one_by_one else trained.batch
        for start in range(0, count, size):
            stop_if_requested()
            kept, raw, target = _gather(samples, numbers[start : start + size])
            if not kept:
                continue
            seen += len(kept)
            x, y = trained.prepare(raw, target, kept[0])
            with autocast(trained.device, trained.precision):
                output = trained.model(x)
            if has_labels:
                mistakes += _find_mistakes(trained, to_full_precision(output).cpu(), y, kept, raw)
    mistakes.sort(key=_rank)
    return Survey(
        seen,
        len(samples),
        # of the training data, only what was held out is scored
        "validation" if samples.split == "train" else samples.split,
        solves,
        wrong=len(mistakes) if has_labels else None,
        mistakes=mistakes[:MAX_MISTAKES],
    )


@contextmanager
def _listening(trained: Trained) -> Iterator[list[SolveSpread]]:
    """Gather steps and residuals of the layers' solves while the context lasts."""
    layers = find_equilibria(trained.model)
    spreads: list[SolveSpread] = []
    with ExitStack() as stack:
        # the page counts those that miss the tolerance
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, layer in layers.items():
            steps: list[float] = []
            residual: list[float] = []

            def note(
                direction: Direction,
                solution: Solution,
                steps: list[float] = steps,
                residual: list[float] = residual,
            ) -> None:
                if direction == "forward":
                    steps += solution.steps.tolist()
                    residual += solution.residual.tolist()

            stack.enter_context(layer.solves.listening(note))
            shown = name if len(layers) > 1 else ""
            spreads.append(SolveSpread(steps, residual, layer.stop.tolerance, shown))
        yield spreads


def _gather(samples: Dataset, numbers: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """Samples without those that cannot be read, which are left out, and where they are."""
    pairs = [(number, *samples.gather([number])) for number in numbers]
    pairs = [pair for pair in pairs if len(pair[1])]
    if not pairs:
        return [], torch.zeros(0), torch.zeros(0)
    kept, x, y = zip(*pairs, strict=True)
    return list(kept), torch.cat(x), torch.cat(y)


def _find_mistakes(
    trained: Trained, output: Tensor, target: Tensor, numbers: list[int], raw: Tensor
) -> Iterator[Mistake]:
    answers = trained.task.answer(output, trained.classes)
    ignore = getattr(trained.task, "ignore", None)
    for number, answer, label, x in zip(numbers, answers, target.tolist(), raw, strict=True):
        truth = trained.classes[label] if label != ignore else None
        if isinstance(answer, LabelAnswer) and truth is not None and answer.label != truth:
            yield Mistake(number, truth, answer.label, answer.probability, to_pixels(x))


def _rank(mistake: Mistake) -> tuple[bool, float, int]:
    """The most confident first, those without a finite confidence last."""
    known = math.isfinite(mistake.confidence)
    return not known, -mistake.confidence if known else 0.0, mistake.number
