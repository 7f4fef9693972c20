"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_norm
from equipoise.solvers.base import Move, Rule, Solver, require_count, solvers
from equipoise.solvers.fixed_point import require_fraction
from equipoise.solvers.problem import Problem

__all__ = ["Anderson"]


@final
@solvers.register("anderson")
@dataclass(frozen=True)
class Anderson(Solver):
    """Mix the last `memory` values of the map so that the mixed residual is smallest (type II; Walker & Ni, 2011).

    `z <- sum_i a_i (z_i + damping g_i)`, `g_i = f(z_i) - z_i`, with `a = argmin |sum_i a_i g_i|` under `sum_i a_i = 1`,
    separately for each sample. The Gram matrix is scaled to unit diagonal, because residuals of a converging solve span many
    orders of magnitude, and shifted by machine epsilon, which keeps it regular when residuals are dependent.

    Args:
        memory: Pairs kept; 1 is plain fixed-point iteration.
        damping: Share of the residual added, in (0, 1].
    """

    memory: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_count("Anderson.memory", self.memory)
        require_fraction("Anderson.damping", self.damping)

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Mix(self, z)


class _Mix(Rule):
    """Gaps are stored with unit length, so that the Gram matrix needs no scaling; `inverse` holds their lengths' inverses.

    Places not used yet hold zeros and a unit diagonal, and so get no share: all operations have one shape from the first step on.
    """

    def __init__(self, solver: Anderson, z: Tensor) -> None:
        samples, width = z.shape
        limits = torch.finfo(z.dtype)
        self.damping = solver.damping
        self.memory = solver.memory
        self.smallest = limits.tiny
        self.diagonal = 1 + solver.memory * limits.eps
        self.count = 0
        self.values = z.new_zeros(samples, self.memory, width)
        self.gaps = z.new_zeros(samples, self.memory, width)
        self.gram = torch.eye(self.memory, dtype=z.dtype, device=z.device).repeat(samples, 1, 1)
        self.inverse = z.new_zeros(samples, self.memory)

    def advance(self, z: Tensor, f: Tensor, gap: Tensor) -> Move:
        value = f if self.damping == 1 else torch.add(z, gap, alpha=self.damping)
        if self.memory == 1:
            return Move(value)
        place = self.count % self.memory
        self.count += 1
        inverse = row_norm(gap).clamp_min_(self.smallest).reciprocal_()
        unit = gap * inverse.unsqueeze(1)
        self.gaps[:, place] = unit
        self.values[:, place] = value
        self.inverse[:, place] = inverse
        products = torch.bmm(unit.unsqueeze(1), self.gaps.mT).squeeze(1)
        products[:, place] = self.diagonal
        self.gram[:, place] = products
        self.gram[:, :, place] = products
        if self.count == 1:
            return Move(value)
        weight = self.inverse / self.inverse.amax(dim=1, keepdim=True)
        share = torch.linalg.solve_ex(self.gram, weight)[0].mul_(weight)
        share /= share.sum(dim=1, keepdim=True)
        return Move(torch.bmm(share.unsqueeze(1), self.values).squeeze(1))

    def take(self, problem: Problem, rows: Tensor) -> None:
        self.values, self.gaps = self.values[rows], self.gaps[rows]
        self.gram, self.inverse = self.gram[rows], self.inverse[rows]
