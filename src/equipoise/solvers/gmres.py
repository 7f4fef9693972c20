"""Restarted GMRES for linear equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm
from equipoise.core.validate import require_count
from equipoise.solvers.krylov import KrylovRule
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["GMRES"]


@final
@SOLVERS.register("gmres")
@dataclass(frozen=True)
class GMRES(Solver):
    """Generalised minimal residual on `(I - J) v = g`, restarted (Saad & Schultz, 1986).

    In the adaptive simpler form (Jiranek & Rozloznik, 2010): directions `p_i` whose images
    `c_i = (I - J) p_i` are kept orthonormal by two Gram-Schmidt passes. The next direction is the
    residual after a step that helped, and the last image after one that did not. Iterate and
    residual are updated at each step, so that each sample can stop on its own.

    Args:
        memory: Directions before a restart.
    """

    memory: int = 20

    linear = True
    tracks_residual = True

    def __post_init__(self) -> None:
        require_count("GMRES.memory", self.memory)

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Minimal(problem, self.memory)


class _Minimal(KrylovRule):
    def __init__(self, problem: Problem, memory: int) -> None:
        super().__init__(problem)
        self.memory = memory
        self.used = memory  # full: the first step starts a basis
        self.bases = torch.empty(0)  # directions and their images, (samples, memory, 2, width)
        self.fallback: Tensor | None = None

    def advance(self, at: Point) -> Move:
        z, residual = at.z, at.gap
        if self.used == self.memory:
            self.used = 0
            self.fallback = None
            self.bases = z.new_empty(z.shape[0], self.memory, 2, z.shape[1])
        before = at.size[:, None]
        direction = (
            residual
            if self.fallback is None
            else torch.where(self.fallback, self.bases[:, self.used - 1, 1], residual)
        )
        pair = torch.stack([direction, self.image(direction)], dim=1)
        length = row_norm(pair[:, 1])[:, None]
        if self.used:
            images, bases = self.bases[:, : self.used, 1], self.bases[:, : self.used].flatten(2)
            for _ in range(2):
                weights = torch.bmm(pair[:, 1:], images.mT)
                pair = pair - torch.bmm(weights, bases).view_as(pair)
        left = row_norm(pair[:, 1])[:, None]
        # An image that lies in the span of the earlier ones ends the Krylov space: no direction is
        # left.
        ended = left <= 10 * torch.finfo(z.dtype).eps * length
        pair *= torch.where(ended, 0.0, 1 / left).unsqueeze(1)
        self.bases[:, self.used] = pair
        self.used += 1
        weight = row_dot(pair[:, 1], residual)
        z = torch.addcmul(z, pair[:, 0], weight)
        residual = torch.addcmul(residual, pair[:, 1], -weight)
        self.fallback = row_norm(residual)[:, None] > 0.9 * before
        return Move(z, gap=residual)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        super().select_rows(problem, rows)
        if self.bases.numel():
            self.bases = self.bases[rows]
        self.fallback = None if self.fallback is None else self.fallback[rows]
