"""What the Krylov methods for `(I - J) v = g` share."""

from __future__ import annotations

from torch import Tensor

from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Rule

__all__ = ["KrylovRule"]


class KrylovRule(Rule):
    """A rule that multiplies with `A = I - J`."""

    problem: LinearProblem

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem, LinearProblem)  # the loop refuses others
        self.problem = problem

    def image(self, p: Tensor) -> Tensor:
        """Return `A p`."""
        return p - self.problem.product(p)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        assert isinstance(problem, LinearProblem)
        self.problem = problem
