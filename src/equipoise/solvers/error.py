"""How far a solution is from the equilibrium: an estimate, and solving until it is small."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.core.transforms import is_wrapped
from equipoise.core.tree import row_norm
from equipoise.solvers.conjugate_gradient import ConjugateGradient
from equipoise.solvers.dense import DenseLU, dense_pays
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.loop import run
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Solution, Solver, Status, Stop

__all__ = ["ErrorEstimate", "offer_error", "tighten"]

ACCURACY = 0.1
"""Relative accuracy of an estimate."""
INNER_STEPS = 200
"""Steps of the linear solve behind an estimate at most."""
CHANGED = 0.1
"""By which fraction a residual that is recomputed may differ from the one that was reported."""
ROUNDING = 1000
"""How many roundings of the state it may be off besides."""
SAFETY = 0.5
"""The estimate is aimed at this fraction of the tolerance, because it is an estimate."""
MAX_ROUNDS = 10
"""How often a solve continues with a smaller residual at most."""


@dataclass(frozen=True)
class ErrorEstimate:
    """The distance of a solution to the equilibrium, found when it is asked for.

    With `e = z* - z` and `J` the Jacobian at `z`, `(I - J) e = f(z) - z` up to terms of second
    order, so `|e|` is the length of a Newton step. The residual alone says little where `I - J` is
    nearly singular: at a spectral radius of 0.998 the distance may be 500 times the residual. The
    linear equation is solved to 10 %, by elimination where the state is small, else by conjugate
    gradient or GMRES. Where that fails, because `I - J` is singular to working precision, the
    distance is infinite.

    Args:
        problem: The map.
        z: The solution, shape (samples, width).
        residual: Its relative residuals as they were reported, to see that the map is the same.
        scale: What they are relative to.
        trusted: Whether the map is known to be the one that was solved.
    """

    problem: Problem
    z: Tensor
    residual: Tensor
    scale: Tensor
    trusted: bool = False

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the relative distance of each sample, shape (samples,); NaN if not finite."""
        z, problem = self.z, self.problem
        if not z.numel():
            return torch.zeros_like(self.residual)
        local = problem.linearize(z)
        gap = local.value - z
        finite = gap.isfinite().all(dim=1)
        if not self.trusted:
            self._refuse_change(row_norm(gap), finite)
        system = LinearProblem(
            problem,
            z,
            torch.where(finite[:, None], gap, 0.0),
            transpose=False,
            local=local,
            forcing=True,
        )
        inner: Solver = ConjugateGradient() if problem.symmetric else GMRES()
        if dense_pays(system, tuple(z.shape), INNER_STEPS):
            inner = DenseLU()
        stop = Stop(ACCURACY, max_steps=INNER_STEPS, norm="state")
        step = run(system, torch.zeros_like(z), inner, stop, f=system.g)
        length = torch.where(step.converged, row_norm(step.value) / self.scale, torch.inf)
        length = torch.where(self.residual == 0, 0.0, length)
        return torch.where(finite, length, torch.nan)

    def _refuse_change(self, size: Tensor, finite: Tensor) -> None:
        """Raise if the map is no longer the one that was solved."""
        now = torch.where(self.residual == 0, 0.0, size / self.scale)
        rounding = ROUNDING * torch.finfo(size.dtype).eps
        # A residual over leaves is at least the one over the whole state.
        allowed = (1 + CHANGED) * self.residual + rounding
        if bool((finite & ~(now <= allowed)).any()):
            raise RuntimeError(
                "Solution.error must be asked for while the map is the one that was solved; got "
                f"a relative residual of {now[finite].max():.1e} where it was "
                f"{self.residual[finite].max():.1e}. Ask before weights or attributes change."
            )


def offer_error(problem: Problem, solution: Solution, lipschitz: float | None = None) -> None:
    """Let a solution on matrices say how far it is from the equilibrium.

    Args:
        problem: The map; not connected to what its arguments come from.
        solution: How it ended; changed in place.
        lipschitz: A bound of the map's Lipschitz constant, if there is one.
    """
    assert solution.scale is not None
    if lipschitz is not None and lipschitz < 1:
        solution.error_bound = solution.residual / (1 - lipschitz)
    if not any(is_wrapped(arg) for arg in problem.args):
        # What an argument was computed from would live as long as the solution.
        args = [arg if arg.is_leaf else arg.detach() for arg in problem.args]
        solution.estimate = ErrorEstimate(
            problem.with_args(args), solution.value, solution.residual, solution.scale
        )


def tighten(problem: Problem, solution: Solution, lipschitz: float | None) -> None:
    """Continue a solve until the distance to the equilibrium is within the tolerance.

    The distance is the proved bound `residual / (1 - lipschitz)` where that is known, else an
    estimate. Samples for which it stays too large are no longer CONVERGED.

    Args:
        problem: The map.
        solution: The solution by residuals, on matrices; changed in place.
        lipschitz: A bound of the map's Lipschitz constant, if there is one.
    """
    stop, solver = solution.stop, solution.solver
    assert solver is not None
    assert solution.scale is not None
    tolerance = stop.tolerance
    for _ in range(MAX_ROUNDS):
        if lipschitz is not None and lipschitz < 1:
            error = solution.residual / (1 - lipschitz)
        else:
            error = ErrorEstimate(
                problem, solution.value, solution.residual, solution.scale, trusted=True
            )()
        short = solution.converged & ~(error <= stop.tolerance)
        rows = short.nonzero().flatten()
        if not rows.numel():
            return
        amplification = (error[rows] / solution.residual[rows]).max().item()
        tolerance = min(SAFETY * stop.tolerance / amplification, SAFETY * tolerance)
        left = stop.max_steps - int(solution.steps[rows].max())
        if left < 1 or solution.unrolled or not tolerance > 0:
            break
        tighter = replace(stop, tolerance=tolerance, max_steps=left)
        if problem.can_drop_rows:
            again = run(problem.select_rows(rows), solution.value[rows], solver, tighter)
        else:
            again = run(problem, solution.value, solver, tighter).rows(rows)
        solution.value = solution.value.index_copy(0, rows, again.value)
        solution.status[rows] = again.status
        solution.residual[rows] = again.residual
        solution.steps[rows] += again.steps
        solution.evaluations[rows] += again.evaluations
        if again.scale is not None:
            solution.scale[rows] = again.scale
    solution.status[rows] = int(Status.MAX_STEPS)
