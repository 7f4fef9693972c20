"""Stabilised bi-conjugate gradient for linear equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm
from equipoise.solvers.krylov import KrylovRule
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["BiCGStab"]


@final
@SOLVERS.register("bicgstab")
@dataclass(frozen=True)
class BiCGStab(Solver):
    """Stabilised bi-conjugate gradient on `(I - J) v = g` (van der Vorst, 1992).

    Two products a step, and memory that does not grow.
    """

    linear = True
    tracks_residual = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Stabilised(problem)


class _Stabilised(KrylovRule):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        # Of the last step: shadow, direction, image, rho, alpha, omega.
        self.memory: list[Tensor] = []

    def advance(self, at: Point) -> Move:
        z, residual = at.z, at.gap
        if self.memory:
            shadow, direction, image, old, alpha, omega = self.memory
            rho = row_dot(shadow, residual)
            # A shadow residual orthogonal to the residual, or a vanished step, ends the recurrence:
            # start again from here.
            lost = (
                rho.abs()
                <= torch.finfo(z.dtype).eps * (row_norm(shadow) * row_norm(residual))[:, None]
            )
            lost |= omega == 0
            weight = _divide(rho, old) * _divide(alpha, omega)
            direction = torch.where(lost, residual, residual + weight * (direction - omega * image))
            shadow = torch.where(lost, residual, shadow)
            rho = row_dot(shadow, residual)
        else:
            shadow = direction = residual
            rho = at.size.square().unsqueeze_(1)
        image = self.image(direction)
        alpha = _divide(rho, row_dot(shadow, image))
        half = torch.addcmul(residual, image, -alpha)
        pushed = self.image(half)
        omega = _divide(row_dot(pushed, half), row_dot(pushed, pushed))
        z = z + alpha * direction + omega * half
        residual = torch.addcmul(half, pushed, -omega)
        self.memory = [shadow, direction, image, rho, alpha, omega]
        return Move(z, gap=residual)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        super().select_rows(problem, rows)
        self.memory = [tensor[rows] for tensor in self.memory]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b`, and 0 where `b` is 0."""
    return torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, torch.ones_like(b), b))
