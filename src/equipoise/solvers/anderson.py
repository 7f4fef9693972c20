"""Anderson acceleration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import to_numpy
from equipoise.core.validate import require_between, require_count, require_fraction
from equipoise.solvers.ahead import Ahead, CompiledRuns, Limits
from equipoise.solvers.kernels import Workspace, as_rows, find_kernels
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Anderson"]

MAX_ARRAY = 2**14
"""Up to this many numbers in a state, NumPy is faster than torch, whose calls cost more."""


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

    combines = True

    def __post_init__(self) -> None:
        require_count("Anderson.memory", self.memory)
        require_fraction("Anderson.damping", self.damping)
        require_between("Anderson.plain_rate", self.plain_rate, 0, 1, "[)")

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Mix(self, problem, z)


class _Mix(Rule):
    """Keeps the last values and gaps as tensors; what is small is kept in NumPy.

    A step is one call of a compiled kernel where there is one, which then does all of `_mix`.

    That is the Gram matrix of the gaps, of unit length, and the inverses of their lengths. Slots
    that count for nothing have the inverse 0, and a row and a column of zeros but for the diagonal,
    and so get no weight: all operations have one shape from the first step on.
    """

    runs_ahead = True

    def __init__(self, solver: Anderson, problem: Problem, z: Tensor) -> None:
        limits = torch.finfo(z.dtype)
        self.pair, self.halves, self.factor = problem.pair, problem.halves, problem.factor
        self.kernels = find_kernels(z)
        self.in_arrays = self.kernels is None and z.is_cpu and z.numel() <= MAX_ARRAY
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
        self.rounds = np.zeros(len(z), dtype=np.int64)  # of rest that are left
        self.next_rounds = np.ones(len(z), dtype=np.int64)
        self.all_mixing = self.plain_rate == 0
        self.mark: np.ndarray | None = None
        self.before: np.ndarray | None = None
        self.values = self.gaps = z.new_empty(0)
        self.gram = self.inverse = np.empty(0)
        self.slots: list[tuple[Any, Any]] = []
        self.arrays: tuple[np.ndarray, ...] = ()

    def _all_plain(self, size: np.ndarray) -> bool:
        """Note which samples have become slow; return whether none has."""
        if self.before is not None:
            fast = size <= self.plain_rate * self.before
            if np.count_nonzero(fast) != len(fast):
                self.slow |= ~fast
                self.all_fast = False
                self._count_mixing()
        self.before = size
        return self.all_fast

    def _rest(self, size: np.ndarray) -> None:
        """Let samples whose residual has not fallen by a tenth take `memory` plain steps.

        Their past is forgotten. Mixing goes to where the residual is smallest nearby, which need
        not be an equilibrium. Each further rest of a sample is twice as long, since mixing can undo
        what a short one has gained, again and again: what plain steps solve is solved in the end.
        """
        if self.mark is not None:
            useless = ~(size < 0.9 * self.mark) & ~self.resting
            self.rounds = np.where(useless, self.next_rounds, np.maximum(self.rounds - 1, 0))
            self.next_rounds = np.where(useless, 2 * self.next_rounds, self.next_rounds)
            self.resting = self.rounds > 0
            self._count_mixing()
        self.mark = size

    def _count_mixing(self) -> None:
        self.all_mixing = bool((self.slow & ~self.resting).all())

    def _allocate(self, at: Point) -> None:
        samples, width = at.z.shape
        columns = self.pair(at.z)[0].shape[1]
        if self.kernels is not None:
            self.workspace = Workspace(at.z, samples * self.memory * (width + columns))
            values, gaps = self.workspace.split((samples, self.memory), (width, columns))
            self.arrays = values, gaps, np.arange(samples)
        else:
            self.values = at.z.new_zeros(samples, self.memory, width)
            self.gaps = at.z.new_zeros(samples, self.memory, columns)
            self._cut()
        self.gram = np.zeros((samples, self.memory, self.memory))
        self.gram[:, range(self.memory), range(self.memory)] = self.diagonal
        self.inverse = np.zeros((samples, self.memory))

    def _cut(self) -> None:
        """Keep views of the slots: writing to one takes half the time of `x[:, slot] = ...`."""
        pairs = zip(self.values.unbind(1), self.gaps.unbind(1), strict=True)
        self.slots = list(pairs)
        if self.in_arrays:
            self.slots = [(to_numpy(value), to_numpy(gap)) for value, gap in self.slots]
            self.arrays = to_numpy(self.values), to_numpy(self.gaps)

    def _products(self, slot: int, value: Tensor, gap: Tensor) -> np.ndarray:
        """Store a value and a gap; return the products of the gap with all that are stored."""
        values, gaps = self.slots[slot]
        first, second = self.pair(gap)
        if self.in_arrays:
            values[:], gaps[:] = to_numpy(value), to_numpy(first)
            products: np.ndarray = np.matmul(self.arrays[1], to_numpy(second)[:, :, None])
            return products[:, :, 0]
        values.copy_(value)
        gaps.copy_(first)
        return to_numpy(torch.bmm(second.unsqueeze(1), self.gaps.mT))[:, 0]

    def _mixture(self, weight: np.ndarray) -> Tensor:
        """Return the values that are stored, mixed."""
        if self.in_arrays:
            values = self.arrays[0]
            return torch.from_numpy(np.matmul(weight.astype(values.dtype)[:, None], values)[:, 0])
        mixed = torch.from_numpy(weight[:, None]).to(self.values.device, self.values.dtype)
        return torch.bmm(mixed, self.values).squeeze(1)

    def _forget(self) -> None:
        """Forget the past of samples that take plain steps."""
        plain = ~(self.slow & ~self.resting)
        self.inverse[plain] = 0.0
        self.gram[plain] = self.diagonal * np.eye(self.memory)

    def advance(self, at: Point) -> Move:
        if self.memory == 1 or (self.plain_rate and self._all_plain(to_numpy(at.size))):
            return Move(self._value(at))
        if self.count == 0:
            self._allocate(at)
        slot = self.count % self.memory
        if slot == 0:
            self._rest(to_numpy(at.size))
        self.count += 1
        if not self.all_mixing:
            self._forget()
        if self.kernels is not None:
            return Move(self._mix_compiled(slot, at))
        with np.errstate(all="ignore"):  # samples that are not finite are the monitor's business
            return Move(self._mix(slot, self._value(at), at.gap))

    def _value(self, at: Point) -> Tensor:
        return at.f if self.damping == 1 else torch.add(at.z, at.gap, alpha=self.damping)

    def _mix_compiled(self, slot: int, at: Point) -> Tensor:
        """Return the next iterate, as `_mix` does."""
        found = torch.empty_like(at.f, memory_format=torch.contiguous_format)
        self.kernels.mix(
            as_rows(at.z),
            as_rows(at.f),
            self.halves,
            self.damping,
            *self.arrays,
            self.gram,
            self.inverse,
            slot,
            self.count,
            self.diagonal,
            self.smallest,
            found.numpy(),
        )
        return found

    def run_ahead(self, at: Point, runs: CompiledRuns, limits: Limits) -> Ahead | None:
        mixing = self.memory > 1 and self.all_mixing and not self.plain_rate
        if self.kernels is None or not mixing:
            return None
        if self.count == 0:
            self._allocate(at)
        if runs.evaluate is not None:
            return self._run_many(at, runs.evaluate, limits)
        return None if runs.anderson is None else self._run_few(at, runs.anderson, limits)

    def _run_few(self, at: Point, anderson: Callable[..., Any], limits: Limits) -> Ahead:
        z, f, good, size = at.z.clone(), at.f.clone(), torch.empty_like(at.f), at.size.clone()
        mark = self._mark(len(z))
        looks, steps, rests = anderson(
            z.numpy(),
            f.numpy(),
            size.numpy(),
            self.damping,
            *self.arrays,
            self.gram,
            self.inverse,
            self.count,
            self.diagonal,
            self.smallest,
            mark,
            limits.tolerance,
            limits.absolute,
            limits.progress,
            limits.guard,
            limits.best,
            limits.excess,
            limits.steps,
            good.numpy(),
            limits.sizes,
            limits.scales,
        )
        self.count += steps
        self.mark = mark if np.isfinite(mark).all() else self.mark
        if rests:
            return Ahead(
                steps, looks, looks, z, z, Point(z, f, None, at.norm).keep_sizes(size), True
            )
        return Ahead(steps, looks, steps - 1, good, z)

    def _run_many(
        self, at: Point, evaluate: Callable[[Tensor, Tensor], Any], limits: Limits
    ) -> Ahead:
        """Make steps between evaluations by the cell: each is one look and one step at once."""
        z, f, before = at.z, at.f, at.z
        free, value = torch.empty_like(f), torch.empty_like(f)
        mark, steps, looks, seen = self._mark(len(z)), 0, 0, True
        lengths = z.new_empty(2, len(z))
        size, scale = lengths.numpy()
        while True:
            found = self.kernels.mix_on(
                as_rows(z),
                as_rows(f),
                self.halves,
                self.factor,
                self.damping,
                *self.arrays,
                self.gram,
                self.inverse,
                self.count,
                self.diagonal,
                self.smallest,
                mark,
                limits.tolerance,
                limits.progress,
                limits.guard,
                limits.best,
                seen,
                size,
                scale,
                free.numpy(),
            )
            if found and not seen:
                limits.sizes[looks], limits.scales[looks] = size, scale
                looks, seen = looks + 1, True
            if found < 2:
                break
            # The start is not ours to write to.
            before, z, free = z, free, torch.empty_like(free) if z is at.z else z
            f = value
            evaluate(z, f)
            self.count, steps, seen = self.count + 1, steps + 1, False
            if steps == limits.steps:
                break
        self.mark = mark if np.isfinite(mark).all() else self.mark
        there = Point(z, f, None, at.norm, at.lengths)
        if found < 2:
            there.keep_sizes(*lengths.unbind(0))
        return Ahead(steps, looks, steps, z if seen else before, z, there, seen)

    def _mark(self, samples: int) -> np.ndarray:
        """Return a copy of the residuals at the last round."""
        # Every residual is below 0.9 times infinity.
        return np.full(samples, np.inf) if self.mark is None else self.mark.astype(float)

    def _mix(self, slot: int, value: Tensor, gap: Tensor) -> Tensor:
        """Return the next iterate, given the value and the gap that go into a slot."""
        products = self._products(slot, value, gap)
        inverse = self.inverse
        inverse[:, slot] = 1 / np.sqrt(np.maximum(products[:, slot], self.smallest))
        row = products * inverse
        row *= inverse[:, slot, None]
        row[:, slot] = self.diagonal
        self.gram[:, slot] = self.gram[:, :, slot] = row
        if self.count == 1:
            return value
        right = inverse / inverse.max(axis=1, keepdims=True)
        weight = _solve(self.gram, right)
        weight *= right
        weight /= weight.sum(axis=1, keepdims=True)
        return self._mixture(weight)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        chosen = to_numpy(rows)
        if self.count:
            self.gram, self.inverse = self.gram[chosen], self.inverse[chosen]
        if self.count and self.kernels is not None:
            values, gaps, places = self.arrays
            self.arrays = values, gaps, places[chosen]
        elif self.count:
            self.slots, self.arrays = [], ()  # views, which would hold what is copied
            self.values = self.values[rows]
            self.gaps = self.gaps[rows]
            self._cut()
        for name in ("slow", "resting", "rounds", "next_rounds"):
            setattr(self, name, getattr(self, name)[chosen])
        self.all_fast = not self.slow.any()
        self._count_mixing()
        self.mark = None if self.mark is None else self.mark[chosen]
        self.before = None if self.before is None else self.before[chosen]


def _solve(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return `gram^-1 right` of each sample, and `right` where rounding made a matrix singular."""
    try:
        found: np.ndarray = np.linalg.solve(gram, right[:, :, None])[:, :, 0]
    except np.linalg.LinAlgError:
        solution, info = torch.linalg.solve_ex(torch.from_numpy(gram), torch.from_numpy(right))
        found = np.where(to_numpy(info)[:, None] == 0, to_numpy(solution), right)
    return found
