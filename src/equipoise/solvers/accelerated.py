"""Nesterov's accelerated gradient for maps that are gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Accelerated"]


@final
@SOLVERS.register("accelerated")
@dataclass(frozen=True)
class Accelerated(Solver):
    """Accelerated gradient on the merit function of a symmetric cell, with restarts.

    See Nesterov (1983), and O'Donoghue & Candes (2015) for the restarts. If the Jacobian of `f` is
    symmetric with eigenvalues in [0, 1], then `z - f(z)` is the gradient of a convex function with
    unit curvature at most, and `x_new = f(y)`, `y_new = x_new + k / (k + 3) (x_new - x)` is the
    accelerated method. The momentum of a sample starts again when it points uphill.
    """

    needs_symmetric = True
    combines = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Momentum(problem, z)


class _Momentum(Rule):
    def __init__(self, problem: Problem, z: Tensor) -> None:
        self.pair = problem.pair
        self.last = z
        self.age = z.new_zeros(z.shape[0])

    def advance(self, at: Point) -> Move:
        f = at.f
        progress = f - self.last
        uphill = torch.linalg.vecdot(self.pair(at.gap)[0], self.pair(progress)[1]) < 0
        self.age.masked_fill_(uphill, 0.0)
        push = (self.age / (self.age + 3)).unsqueeze_(1)
        self.last = f
        self.age += 1
        return Move(torch.addcmul(f, progress, push))

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        self.last, self.age = self.last[rows], self.age[rows]
