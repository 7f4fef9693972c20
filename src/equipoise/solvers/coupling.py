"""Samples that depend on each other although nobody said so, found when a solve has ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core.module_tensors import versions, written_since
from equipoise.solvers.measure import assess
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Solution, Status, Stop

__all__ = ["CheckSchedule", "CouplingError", "check_whole_batch", "refuse_coupling"]

FIRST_CHECKS = 8
"""A layer's first solves are all checked."""
CHECK_PERIOD = 16
"""Later ones now and then, because a check costs an evaluation."""
ROUNDED = 2.0
"""A residual may be this many times its target when it is evaluated in a batch of another size."""
COUPLED = 10.0
"""From this many times its target on, a residual cannot be explained by rounding."""


class CouplingError(ValueError):
    """Samples depend on each other although nobody said so."""


class CheckSchedule:
    """Which solves to check: of each kind the first 8, then every 16th; all after a refusal.

    It counts and looks at no clock, so that equal runs check equal solves.

    Attributes:
        always: Whether a solve was refused.
    """

    def __init__(self) -> None:
        self._count: Counter[Hashable] = Counter()
        self.always = False

    def due(self, kind: Hashable) -> bool:
        """Return whether to check this solve; `kind` tells batch sizes and modes apart."""
        count = self._count[kind]
        self._count[kind] = count + 1
        return self.always or count < FIRST_CHECKS or count % CHECK_PERIOD == 0


def check_whole_batch(problem: Problem, solution: Solution, stop: Stop, start: np.ndarray) -> None:
    """Evaluate the whole batch at the solution, and see that what converged has converged there.

    A sample that ended before others was judged while these were elsewhere, or gone. That makes no
    difference if samples are independent. A residual more than 10 times its target betrays that
    they are not, and raises CouplingError. From twice its target on the sample is called stalled:
    the dtype cannot tell its residual from the target.

    The evaluation is counted, and leaves buffers as they were.

    Args:
        problem: The problem of the whole batch.
        solution: How it ended, on matrices; changed in place.
        stop: The stopping rule.
        start: The sizes of the start.
    """
    z: Tensor = solution.value
    with _buffers_kept(problem) as written:
        f = problem(z)
        drifts = written()
    solution.evaluations += 1
    rounded = replace(stop, tolerance=ROUNDED * stop.tolerance, absolute=ROUNDED * stop.absolute)
    residual, _, reached = assess(problem, z, f, rounded, start)
    short = solution.converged & ~reached
    if bool(short.any()):
        refuse_coupling(problem, z, f, residual, short, stop)
        # A map that moves when it is evaluated, as power iterations on a weight do, was another one
        # when these samples ended.
        if not drifts:
            solution.status[short] = int(Status.STALLED)
            solution.residual[short] = residual[short]


def refuse_coupling(
    problem: Problem, z: Tensor, f: Tensor, residual: Tensor, short: Tensor, stop: Stop
) -> None:
    """Raise CouplingError if samples that fall short of their target do so because of others.

    Args:
        problem: The problem of the whole batch.
        z: The state that is called its solution.
        f: The map there.
        residual: Relative residuals there.
        short: The rows that were said to have converged and have not.
        stop: The stopping rule.
    """
    if problem.coupled or len(z) == 1:
        return
    limit = COUPLED * stop.tolerance + 100 * torch.finfo(z.dtype).eps
    excess = torch.where(short & ~(residual <= limit), residual / limit, 0.0).nan_to_num(torch.inf)
    row = int(excess.argmax())
    if excess[row] == 0 or not _depends_on_others(problem, z, f, row):
        return
    raise CouplingError(
        f"{problem.coupled_name} must be True for a step whose samples depend on each other; got "
        f"False, and sample {row} converged while the others moved on, but in the whole batch its "
        f"relative residual is {float(residual[row]):.1e}. Set it, or see that the "
        "batch is the first axis and that no operation mixes its samples."
    )


def _depends_on_others(problem: Problem, z: Tensor, f: Tensor, row: int) -> bool:
    """Return whether one row of the map changes when the other rows of the state do."""

    def change(state: Tensor) -> float:
        with _buffers_kept(problem):
            return _length(problem(state)[row] - f[row])

    noise = change(z)  # of a random step
    allowed = 10 * noise + 0.01 * _length(f[row] - z[row])
    if not math.isfinite(noise):
        return False
    for factor in (0.0, 2.0):
        others = z * factor
        others[row] = z[row]
        if not change(others) <= allowed:
            return True
    return False


def _length(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))


@contextmanager
def _buffers_kept(problem: Problem) -> Iterator[Callable[[], bool]]:
    """Give the tensors that evaluating may write to their values back at the end.

    Yields whether some have been written to by now.
    """
    known = versions(problem.args[index] for index in problem.mutable_args)
    values = {id(tensor): tensor.clone() for tensor, _ in known}
    try:
        yield lambda: bool(written_since(known))
    finally:
        for tensor in written_since(known):
            tensor.copy_(values[id(tensor)])
