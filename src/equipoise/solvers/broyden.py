"""Broyden's method with limited memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm
from equipoise.core.validate import require_count
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Broyden"]


@final
@SOLVERS.register("broyden")
@dataclass(frozen=True)
class Broyden(Solver):
    """Good Broyden method on `g(z) = f(z) - z`, from the model Jacobian `-I`.

    See Broyden (1965) and Kelley (1995, section 7.3). The inverse model is
    `H = I + sum_i u_i v_i^T`, so that the step is `s = H g`. After it, with `w = H g_new`,
    `u = -w / <s, w - s>` and `v = H^T s`: one product with `H` for each step. After `memory`
    updates it starts again from `I`.

    Args:
        memory: Updates kept; memory grows with this number, not with the number of steps.
    """

    memory: int = 20

    def __post_init__(self) -> None:
        require_count("Broyden.memory", self.memory)

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Secant(self.memory)


class _Secant(Rule):
    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []
        self.move: Tensor | None = None

    def advance(self, at: Point) -> Move:
        gap = at.gap
        if self.move is None or len(self.left) == self.memory:
            self.left.clear()
            self.right.clear()
            self.move = gap
            return Move(at.f)
        move = self.move
        image, pulled = gap, move
        for u, v in zip(self.left, self.right, strict=True):
            image = torch.addcmul(image, u, row_dot(v, gap))
            pulled = torch.addcmul(pulled, v, row_dot(u, move))
        slope = row_dot(move, image - move)
        # A vanishing slope means that the secant says nothing: keep the old model for that sample.
        useful = slope.abs() > torch.finfo(gap.dtype).eps * row_norm(move)[:, None].square()
        u = image * torch.where(useful, -1 / slope, 0.0)
        self.left.append(u)
        self.right.append(pulled)
        self.move = torch.addcmul(image, u, row_dot(pulled, gap))
        return Move(at.z + self.move)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        self.left = [u[rows] for u in self.left]
        self.right = [v[rows] for v in self.right]
        self.move = None if self.move is None else self.move[rows]
