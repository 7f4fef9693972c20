"""How `solver="auto"` picks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise.solvers.anderson import Anderson
from equipoise.solvers.conjugate_gradient import ConjugateGradient
from equipoise.solvers.dense import DenseLU, dense_pays
from equipoise.solvers.fixed_point import FixedPoint
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.loop import run
from equipoise.solvers.neumann import Neumann
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Solution, Solver, Status, Stop

__all__ = ["pick_adjoint", "pick_forward", "solve_adjoint"]

EASY = 0.3
"""With a Lipschitz bound this small, plain iteration gains a digit in two steps.

Nothing else can pay for itself.
"""
CHEAP_STEP = 0.5
"""Time of a plain, mixed or conjugate gradient step as a fraction of a GMRES step's."""
ROUNDINGS = 16
"""A relative residual of so many roundings is as small as any solver makes it."""

# Made once, since every solve picks one.
PLAIN = FixedPoint()
MIXED = Anderson()
MIXED_WHERE_SLOW = Anderson(plain_rate=0.75)


def pick_forward(*, symmetric: bool, lipschitz: float | None) -> Solver:
    """Return plain iteration for a Lipschitz bound of at most 0.3, else Anderson.

    Symmetric cells gain from mixing at once: the eigenvalues of their Jacobians all lie on one
    side. For others it begins with plain steps, and mixes for the samples where they are slow.
    """
    if lipschitz is not None and lipschitz <= EASY:
        return PLAIN
    return MIXED if symmetric else MIXED_WHERE_SLOW


def pick_adjoint(
    problem: Problem,
    shape: Sequence[int],
    *,
    lipschitz: float | None,
    forward: Solver,
    steps: float,
) -> Solver:
    """Return a solver for the adjoint of a forward solve, from what is known of that solve.

    The Neumann series for a Lipschitz bound of at most 0.3, elimination where it is cheaper than as
    many steps as the forward solve took, conjugate gradient for symmetric cells. For others
    Anderson if plain steps, mixed or not, served the forward solve, and GMRES if it took more than
    that: then the spectral radius may be above 1.

    Args:
        problem: The adjoint equation.
        shape: Samples and width.
        lipschitz: The bound that the cell declares, if any.
        forward: The forward solver.
        steps: Evaluations that the forward solve took.
    """
    if lipschitz is not None and lipschitz <= EASY:
        return Neumann()
    plain = isinstance(forward, FixedPoint | Anderson)
    cheap = plain or problem.symmetric
    if dense_pays(problem, shape, steps * CHEAP_STEP if cheap else steps):
        return DenseLU()
    if problem.symmetric:
        return ConjugateGradient()
    return Anderson(memory=8, plain_rate=0.75) if plain else GMRES()


def pick_rescue(
    problem: Problem, shape: Sequence[int], *, failed: Solver, max_steps: int, truncated: bool
) -> Solver | None:
    """Return a solver for samples of a linear problem on which another one failed, if any is left.

    Elimination where it costs no more than `max_steps` Krylov steps, else GMRES. A conjugate
    gradient that ran out of steps has made the best of its Krylov space, and GMRES would only take
    more memory for it.

    Args:
        problem: The problem.
        shape: Samples and width.
        failed: What failed.
        max_steps: Steps that a solve may make.
        truncated: Whether no sample failed for another reason than that.
    """
    if isinstance(failed, DenseLU):
        return None
    if dense_pays(problem, shape, max_steps):
        return DenseLU()
    hopeless = isinstance(failed, ConjugateGradient) and truncated
    return None if isinstance(failed, GMRES) or hopeless else GMRES()


def solve_adjoint(
    problem: Problem,
    start: Tensor,
    f: Tensor,
    solver: Solver,
    stop: Stop,
    check: Callable[[], bool] = lambda: True,
) -> Solution:
    """Solve a linear problem, and solve again for the samples on which the first choice fails.

    But not for those that failed to get below rounding, where nothing helps.

    Steps and evaluations of the two solves add up, and `Solution.solver` is the last solver.

    Args:
        problem: The problem.
        start: Where to start.
        f: The map there.
        solver: The first choice.
        stop: When to stop each of the solves.
        check: As `run` takes it.
    """
    solution = run(problem, start, solver, stop, f=f, check=check)
    if solution.all_converged:
        return solution
    improvable = ~(solution.residual <= ROUNDINGS * torch.finfo(f.dtype).eps)
    rows = (~solution.converged & improvable & f.isfinite().all(dim=1)).nonzero().flatten()
    rescue = pick_rescue(
        problem,
        (len(rows), f.shape[1]),
        failed=solver,
        max_steps=stop.max_steps,
        truncated=bool((solution.status[rows] == Status.MAX_STEPS).all()),
    )
    if rescue is None or not len(rows):
        return solution
    value: Tensor = solution.value
    if len(rows) == len(value) or not problem.can_drop_rows:
        again = run(problem, value, rescue, stop).rows(rows)
    else:
        again = run(problem.select_rows(rows), value[rows], rescue, stop)
    solution.steps[rows] += again.steps
    solution.evaluations[rows] += again.evaluations
    solution.solver = rescue
    better = again.converged | (again.residual < solution.residual[rows])
    rows, again = rows[better], again.rows(better)
    solution.value = value.index_copy(0, rows, again.value)
    solution.status[rows] = again.status
    solution.residual[rows] = again.residual
    return solution
