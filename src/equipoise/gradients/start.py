"""Where the solves of one call start, when somebody remembers earlier ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from equipoise.core.tree import row_dot
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.policy import Direction
from equipoise.solvers.protocol import Solution

__all__ = ["StartStates", "rescale"]


class StartStates(ABC):
    """Starts of one forward solve and of the adjoint solve through it, on matrices.

    They decide how long a solve takes, and not how it ends: whether a sample has converged is
    decided by its recomputed residual, as ever.
    """

    @abstractmethod
    def forward(self, z0: Tensor) -> Tensor:
        """Return where to start in place of `z0`, of the same shape."""

    @abstractmethod
    def backward(self, g: Tensor) -> Tensor | None:
        """Return earlier solutions of the adjoint equation, up to scale; zeros where none is known.

        Args:
            g: Its constant term.
        """

    @abstractmethod
    def keep(self, direction: Direction, solution: Solution) -> None:
        """Take in a solution, on matrices."""


def rescale(problem: LinearProblem, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return multiples of the rows of `v` to start from, and the map there.

    `v = J v + g` is linear, so one product says which multiple `a v` has the least residual:
    `a = <r, g> / <r, r>`, `r = v - J v`. It is never larger than that of zero, `|g|`.

    Args:
        problem: The linear problem.
        v: Earlier solutions, of problems with other constant terms.
    """
    product = problem.product(v)
    gap = v - product
    size = row_dot(gap, gap)
    factor = torch.where(size > 0, row_dot(gap, problem.g) / size, 0.0)
    factor = torch.where(factor.isfinite(), factor, 0.0)
    return factor * v, torch.addcmul(problem.g, factor, product)
