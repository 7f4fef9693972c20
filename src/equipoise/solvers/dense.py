"""Direct solves of linear equations, with the Jacobian as a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_norm
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["DenseLU", "Factors", "dense_pays"]

NUMBERS_PER_STEP = 2**13
"""Numbers in the matrices of a batch that cost as much time as one GMRES step on that batch.

A round figure, on the side of GMRES, for what `benchmarks/dense.py` measured for widths of 8 to 512
and batches of 1 to 128. It is a constant and no clock, so that a run can be repeated bit by bit.
"""
FIXED_STEPS = 2
"""GMRES steps that cost as much time as the smallest dense solve."""


def dense_pays(problem: Problem, shape: Sequence[int], steps: float) -> bool:
    """Return whether a dense solve of states of this shape is cheaper than `steps` of GMRES.

    Never for problems whose rows depend on each other, whose matrices take a product for each
    column.
    """
    samples, width = shape
    numbers = samples * width**2
    return problem.can_drop_rows and numbers <= NUMBERS_PER_STEP * (steps - FIXED_STEPS)


@final
@SOLVERS.register("dense")
@dataclass(frozen=True)
class DenseLU(Solver):
    """Solve `(I - J) v = g` by elimination, from the matrix `I - J` of each sample.

    The matrix takes `width` products with the Jacobian and `width^2` numbers for each sample, so
    this is for small states, where it does not matter how close `I - J` is to singular. A first
    step solves, and further ones refine: `v <- v + (I - J)^-1 (g - (I - J) v)`. Where the matrix is
    singular to working precision the steps are those of least squares, `(I - J)^+`, which solve
    what can be solved.
    """

    linear = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        assert isinstance(problem, LinearProblem)  # the loop refuses others
        return _Refine(problem)


class _Refine(Rule):
    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem
        self.factors: Factors | None = None

    def advance(self, at: Point) -> Move:
        if self.factors is None:
            self.factors = Factors(self.problem.matrix())
        return Move(at.z + self.factors.solve(at.gap))

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        assert isinstance(problem, LinearProblem)
        self.problem = problem
        self.factors = None if self.factors is None else self.factors.select_rows(rows)


class Factors:
    """The factors of `I - J` for each sample.

    Args:
        jacobian: `J`, shape (samples, width, width); overwritten.
    """

    def __init__(self, jacobian: Tensor) -> None:
        self.matrix = jacobian.neg_()
        self.matrix.diagonal(dim1=1, dim2=2).add_(1)
        # "ex", because a singular sample must not stop the others.
        self.lu, self.pivots, _ = torch.linalg.lu_factor_ex(self.matrix)

    def solve(self, g: Tensor) -> Tensor:
        """Return `(I - J)^-1 g`, with the pseudo-inverse for samples that are singular.

        NaN for samples whose Jacobian is not finite.
        """
        found: Tensor = torch.linalg.lu_solve(self.lu, self.pivots, g.unsqueeze(2)).squeeze(2)
        eps = torch.finfo(g.dtype).eps
        regular = row_norm(found) <= 0.1 / eps * row_norm(g)
        if bool(regular.all()):
            return found
        for row in (~regular).nonzero().flatten().tolist():
            matrix = self.matrix[row]
            found[row] = torch.nan
            if bool(matrix.isfinite().all() & g[row].isfinite().all()):
                found[row] = torch.linalg.pinv(matrix, rtol=10 * len(matrix) * eps) @ g[row]
        return found

    def select_rows(self, rows: Tensor) -> Factors:
        """Return the factors of some samples."""
        kept = object.__new__(Factors)
        kept.matrix, kept.lu, kept.pivots = self.matrix[rows], self.lu[rows], self.pivots[rows]
        return kept
