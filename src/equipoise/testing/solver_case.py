"""A solver of nonlinear equations under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.solvers import Solution, Stop, solve
from equipoise.testing.linear_solver import SolverCase
from equipoise.testing.problems import PROBLEMS, Known, symmetric, tanh

__all__ = ["ForwardCase"]


class ForwardCase(SolverCase):
    """A solver of nonlinear equations, and the problems that it may run on."""

    @property
    def tight(self) -> Stop:
        """A stopping rule near the limit of float64."""
        return Stop(tolerance=1e-13, max_steps=self.max_steps)

    def problems(self, dtype: torch.dtype = torch.float64) -> dict[str, Known]:
        """Return the problems that the solver may run on."""
        made = {name: make(dtype=dtype) for name, make in PROBLEMS.items()}
        if self.solver.runs_all_steps:  # it chooses by a function of a state of one tensor
            del made["tree"]
        needed = self.solver.needs_symmetric
        return {name: known for name, known in made.items() if known.symmetric or not needed}

    def suitable(self) -> Known:
        """Return a batch that the solver may run on and that takes it several steps."""
        return symmetric() if self.solver.needs_symmetric else tanh()

    def find(self, known: Known, stop: Stop, **options: Any) -> Solution:
        """Solve a problem with a known answer."""
        return solve(
            known.step,
            known.start,
            self.solver,
            stop,
            context=known.context,
            symmetric=known.symmetric,
            **options,
        )

    def run(self, step: Callable[..., Any], start: Tensor, stop: Stop, context: Any) -> Solution:
        """Solve an equation whose Jacobian is symmetric."""
        return solve(step, start, self.solver, stop, context=context, symmetric=True)
