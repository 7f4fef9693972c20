"""Whether backward sees the map that was solved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import row_norm, to_numpy
from equipoise.solvers.measure import SETTLED, assess
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Solution, Status, Stop

__all__ = ["ChangeCheck"]

SLACK = 10
"""How many times its target the residual of a converged sample may be when it is recomputed."""
DRIFT = 0.05
"""How large its relative residual may be if evaluating the step moves it, as spectral norms do."""
ROUNDING = 1000
"""How many roundings of its value it may be off besides."""


@dataclass(frozen=True)
class ChangeCheck:
    """Sees whether samples that had converged are still equilibria of the step.

    Otherwise the derivatives would be those of another map.

    Args:
        solution: How the forward solve ended.
        stop: Its stopping rule; each part of the state is judged as it was then.
        whole: Whether states were judged as a whole in any case.
    """

    solution: Solution
    stop: Stop
    whole: bool = False

    def refuse(self, problem: Problem, z: Tensor, value: Tensor, *, declared: bool = False) -> None:
        """Raise RuntimeError if a sample that had converged has not at `value`.

        Args:
            problem: The problem as it was frozen after the forward solve.
            z: The solution.
            value: The step at it, evaluated anew.
            declared: Whether that is the value that the cell's `linearize` gave.
        """
        if not z.numel() or self._surely_same(problem, z, value):
            return
        residual, moved = self._moved(problem, z, value)
        if not moved.any():
            return
        with torch.no_grad():
            own = problem(z)
            # What a rounding of the state changes is no change of the step.
            rounded = problem(z * (1 + 2 * torch.finfo(z.dtype).eps))
        slack = ROUNDING * (rounded - own).abs().nan_to_num(0.0)
        if declared and not self._moved(problem, z, own, slack)[1].any():
            raise RuntimeError(
                "The value of linearize must be that of the step; got one with a relative residual "
                f"of {residual[moved].max():.1e} at a solution of the step. Where a subclass "
                "overrides step or a hook changes its result, define linearize to match, or let it "
                "return None."
            )
        residual, moved = self._moved(problem, z, value, slack)
        if not moved.any():
            return
        written = problem.written()
        raise RuntimeError(
            "The step must read in backward what it read in forward; got a residual of "
            f"{residual[moved].max():.1e} at a solution that had converged to "
            f"{self.stop.tolerance:.0e}. "
            + (
                f"{' and '.join(map(repr, written))} changed in place in between: give the "
                "cell a new tensor instead, or pass it on from inject."
                if written
                else "Something that it reads changed in between (pass it on from inject), or "
                "it is random, or its samples depend on each other (set coupled = True)."
            )
        )

    def _surely_same(self, problem: Problem, z: Tensor, value: Tensor) -> bool:
        """Return whether all samples meet their targets by the norm of the whole state.

        That is ten times as fast as the full measure, and answers for states of one tensor.
        """
        if self.stop.norm == "element" or (self.stop.norm == "leaf" and len(problem.columns) > 1):
            return False
        residual, scale = to_numpy(row_norm(value - z)), to_numpy(row_norm(value))
        same = (residual <= SLACK * self.stop.target(scale)) & (residual < np.inf)
        return bool(np.count_nonzero(same) == len(same))

    def _moved(
        self, problem: Problem, z: Tensor, value: Tensor, slack: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return relative residuals, and which samples had converged and have not now."""
        if slack is not None:
            gap = value - z
            value = value - torch.minimum(torch.maximum(gap, -slack), slack)
        tolerance = SLACK * self.stop.tolerance + ROUNDING * torch.finfo(z.dtype).eps
        if problem.drifts:
            tolerance = max(tolerance, DRIFT)
        stop = replace(self.stop, tolerance=tolerance, absolute=SLACK * self.stop.absolute)
        start: np.ndarray | float = 0.0 if self.solution.start is None else self.solution.start
        if self.whole:
            stop = replace(stop, norm="state")
            start = 0.0
            if self.solution.scale is not None:  # at an equilibrium at zero more than the state
                scale: np.ndarray = self.solution.scale.double().cpu().numpy()
                start = scale * tolerance / min(SETTLED, 1e-3 * tolerance)
        residual, _, reached = assess(problem, z, value, stop, start)
        return residual, ~reached & (self.solution.status == Status.CONVERGED)
