"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import to_numpy
from equipoise.core.validate import require_between, require_count, require_fraction
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Anderson"]


@final
@SOLVERS.register("anderson")
@dataclass(frozen=True)
class Anderson(Solver):
    """Mix the last `memory` values of the map so that the mixed residual is smallest.

    Anderson acceleration of type II (Walker & Ni, 2011):
    `z <- sum_i a_i (z_i + damping g_i)`, `g_i = f(z_i) - z_i`, with `a = argmin |sum_i a_i g_i|`
    under `sum_i a_i = 1`, separately for each sample. The Gram matrix is scaled to unit diagonal,
    because residuals of a converging solve span many orders of magnitude, and shifted by machine
    epsilon, which keeps it regular when residuals are dependent.

    Args:
        memory: Pairs kept; 1 is plain fixed-point iteration.
        damping: Fraction of the residual added, in (0, 1].
        plain_rate: Mixing costs as much as a small cell, so a sample takes plain steps as long as
            each shrinks its residual below this fraction. 0 mixes from the start.
    """

    memory: int = 5
    damping: float = 1.0
    plain_rate: float = 0.0

    def __post_init__(self) -> None:
        require_count("Anderson.memory", self.memory)
        require_fraction("Anderson.damping", self.damping)
        require_between("Anderson.plain_rate", self.plain_rate, 0, 1, "[)")

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Mix(self, z)


class _Mix(Rule):
    """Stores gaps with unit length, so that the Gram matrix needs no scaling.

    `inverse` holds the inverses of their lengths. Slots not used yet hold zeros and a unit
    diagonal, and so get no weight: all operations have one shape from the first step on.
    """

    def __init__(self, solver: Anderson, z: Tensor) -> None:
        limits = torch.finfo(z.dtype)
        self.damping = solver.damping
        self.memory = solver.memory
        self.plain_rate = solver.plain_rate
        self.smallest = limits.tiny
        self.diagonal = 1 + solver.memory * limits.eps
        self.count = 0
        # Samples for which plain steps are too slow, and those that mixing has not helped lately.
        self.slow = np.full(len(z), self.plain_rate == 0)
        self.all_fast = self.plain_rate > 0
        self.resting = np.zeros(len(z), dtype=bool)
        self.mark: np.ndarray | None = None
        self.before: np.ndarray | None = None
        self.values = self.gaps = self.gram = self.inverse = z.new_empty(0)
        self.slots: list[tuple[Tensor, ...]] = []

    def _all_plain(self, size: np.ndarray) -> bool:
        """Note which samples have become slow; return whether none has."""
        if self.before is not None:
            fast = size <= self.plain_rate * self.before
            if np.count_nonzero(fast) != len(fast):
                self.slow |= ~fast
                self.all_fast = False
        self.before = size
        return self.all_fast

    def _rest(self, size: np.ndarray) -> None:
        """Let samples whose residual has not fallen by a tenth take `memory` plain steps.

        Their past is forgotten. Mixing goes to where the residual is smallest nearby, which need
        not be an equilibrium.
        """
        if self.mark is not None:
            self.resting = ~(size < 0.9 * self.mark) & ~self.resting
        self.mark = size

    def _allocate(self, z: Tensor) -> None:
        samples, width = z.shape
        self.values = z.new_zeros(samples, self.memory, width)
        self.gaps = z.new_zeros(samples, self.memory, width)
        self.gram = torch.eye(self.memory, dtype=z.dtype, device=z.device).repeat(samples, 1, 1)
        self.inverse = z.new_zeros(samples, self.memory)
        self._cut()

    def _cut(self) -> None:
        """Keep views of the slots: writing to one takes half the time of `x[:, slot] = ...`."""
        self.slots = list(
            zip(
                self.values.unbind(1),
                self.gaps.unbind(1),
                self.inverse.unbind(1),
                self.gram.unbind(1),
                self.gram.unbind(2),
                strict=True,
            )
        )

    def advance(self, at: Point) -> Move:
        value = at.f if self.damping == 1 else torch.add(at.z, at.gap, alpha=self.damping)
        if self.memory == 1 or (self.plain_rate and self._all_plain(to_numpy(at.size))):
            return Move(value)
        if self.count == 0:
            self._allocate(at.z)
        if self.count % self.memory == 0:
            self._rest(to_numpy(at.size))
        slot = self.count % self.memory
        self.count += 1
        values, unit, inverses, row, column = self.slots[slot]
        inverse = at.size.clamp_min(self.smallest).reciprocal_()
        torch.mul(at.gap, inverse.unsqueeze(1), out=unit)
        values.copy_(value)
        mixing = self.slow & ~self.resting
        if not mixing.all():
            # For samples that take plain steps nothing but the present counts.
            self.inverse *= torch.from_numpy(mixing).to(self.inverse.device).unsqueeze(1)
        inverses.copy_(inverse)
        products = torch.bmm(unit.unsqueeze(1), self.gaps.mT).squeeze(1)
        products.select(1, slot).fill_(self.diagonal)
        row.copy_(products)
        column.copy_(products)
        if self.count == 1:
            return Move(value)
        weight = self.inverse / self.inverse.amax(dim=1, keepdim=True)
        # In place, because the solution is not contiguous, and bmm is faster on what is.
        weight.mul_(torch.linalg.solve_ex(self.gram, weight)[0])
        weight /= weight.sum(dim=1, keepdim=True)
        return Move(torch.bmm(weight.unsqueeze(1), self.values).squeeze(1))

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        if self.count:
            self.values, self.gaps = self.values[rows], self.gaps[rows]
            self.gram, self.inverse = self.gram[rows], self.inverse[rows]
            self._cut()
        chosen = to_numpy(rows)
        self.slow, self.resting = self.slow[chosen], self.resting[chosen]
        self.all_fast = not self.slow.any()
        self.mark = None if self.mark is None else self.mark[chosen]
        self.before = None if self.before is None else self.before[chosen]
