"""Broyden's method with limited memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot
from equipoise.core.validate import require_count
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Broyden"]

REGULAR = 0.1
"""An update changes the determinant of the model Jacobian by a factor of at least this."""


@final
@SOLVERS.register("broyden")
@dataclass(frozen=True)
class Broyden(Solver):
    """Good Broyden method on `g(z) = f(z) - z`, from the model Jacobian `-I`.

    See Broyden (1965) and Kelley (1995, section 7.3). The inverse model is
    `H = I + sum_i u_i v_i^T`, so that the step is `s = H g`. After it, with `w = H g_new`,
    `u = -w / <s, w - s>` and `v = H^T s`: one product with `H` for each step.

    Two things keep the model good. `<s, w - s> = -a |s|^2`, where `a` is the factor by which the
    update changes the determinant of the model Jacobian: where `|a| < 0.1` the update is shortened
    until it is 0.1 (Powell, 1970), so that the model stays regular. When `memory` updates are
    there, their sum is replaced by its best approximation of half the rank (van de Rotten & Verduyn
    Lunel, 2005): dropping the oldest terms would leave later ones that make no sense without them,
    and starting again from `I` would forget all that was learnt.

    Args:
        memory: Updates kept at most; memory grows with this number, not with the number of steps.
    """

    memory: int = 20

    def __post_init__(self) -> None:
        require_count("Broyden.memory", self.memory)

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Secant(self.memory)


class _Secant(Rule):
    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.used = 0
        self.left = self.right = torch.empty(0)  # u_i and v_i, (samples, memory, width)
        self.move: Tensor | None = None

    def advance(self, at: Point) -> Move:
        gap = at.gap
        if self.move is None:
            self.move = gap
            self.left = gap.new_empty(gap.shape[0], self.memory, gap.shape[1])
            self.right = torch.empty_like(self.left)
            return Move(at.f)
        if self.used == self.memory:
            self._reduce()
        move = self.move
        left, right = self.left[:, : self.used], self.right[:, : self.used]
        image, pulled = _updated(gap, left, right), _updated(move, right, left)
        u = image * self._weight(row_dot(move, image - move), row_dot(move, move))
        self.left[:, self.used] = u
        self.right[:, self.used] = pulled
        self.used += 1
        self.move = torch.addcmul(image, u, row_dot(pulled, gap))
        return Move(at.z + self.move)

    def _weight(self, slope: Tensor, size: Tensor) -> Tensor:
        """Return `-1 / slope`, or where the model would become singular what is left of it.

        With `t y + (1 - t) B s` in place of the change `y` of `g`, where `B` is the model, the
        slope is `t slope - (1 - t) size`, and `t` is chosen so that it is `REGULAR size`.

        Args:
            slope: `<s, w - s>`.
            size: `<s, s>`.
        """
        factor = -slope / size
        weak = ~(factor.abs() >= REGULAR)
        if not bool(weak.any()):
            return -1 / slope
        least = torch.where(factor < 0, -REGULAR, REGULAR)
        fraction = torch.where(weak, (1 - least) / (1 - factor), 1.0)
        weight = fraction / (size * torch.where(weak, least, factor))
        # A sample that does not move learns nothing.
        return torch.where(size > 0, weight, 0.0)

    def _reduce(self) -> None:
        """Keep the part of `sum_i u_i v_i^T` with the largest singular values."""
        left, right = self.left[:, : self.used].mT, self.right[:, : self.used].mT
        self.used = min(self.memory // 2, left.shape[1])
        finite = (left.sum(dim=(1, 2)) + right.sum(dim=(1, 2))).isfinite()[:, None, None]
        left, right = torch.where(finite, left, 0.0), torch.where(finite, right, 0.0)
        left, upper = torch.linalg.qr(left)
        right, lower = torch.linalg.qr(right)
        a, singular, b = torch.linalg.svd(upper @ lower.mT)
        self.left[:, : self.used] = (left @ (a * singular.unsqueeze(1))).mT[:, : self.used]
        self.right[:, : self.used] = (right @ b.mT).mT[:, : self.used]

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        if self.move is not None:
            self.left = self.left[rows]  # one by one: each is free before the next is copied
            self.right = self.right[rows]
            self.move = self.move[rows]


def _updated(v: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `v + sum_i left_i <right_i, v>`."""
    row = v.unsqueeze(1)
    return torch.baddbmm(row, torch.bmm(row, right.mT), left).squeeze(1)
