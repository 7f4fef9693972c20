"""Conjugate gradient for symmetric linear equations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot
from equipoise.solvers.ahead import Ahead, CompiledRuns, Limits
from equipoise.solvers.kernels import as_rows, find_kernels
from equipoise.solvers.krylov import KrylovRule
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["ConjugateGradient"]


MAX_COMPILED = 2**20
"""Larger states are left to torch, whose step keeps fewer copies of them."""


@final
@SOLVERS.register("conjugate_gradient")
@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Conjugate gradient on `(I - J) v = g`, with `J` symmetric and `I - J` positive definite.

    See Hestenes & Stiefel (1952).
    """

    linear = True
    needs_symmetric = True
    tracks_residual = True
    combines = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        kernels = find_kernels(z) if z.numel() <= MAX_COMPILED else None
        return _Conjugate(problem) if kernels is None else _CompiledConjugate(problem, kernels)


class _Conjugate(KrylovRule):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.direction: Tensor | None = None
        self.energy: Tensor | None = None

    def advance(self, at: Point) -> Move:
        gap = at.gap
        energy = at.size.square().unsqueeze_(1)
        if self.direction is None or self.energy is None:
            self.direction = gap
        else:
            self.direction = torch.addcmul(gap, self.direction, energy / self.energy)
        self.energy = energy
        image = self.image(self.direction)
        curvature = row_dot(self.direction, image)
        # Without positive curvature the system is singular or indefinite along this direction:
        # stand still, and stall.
        length = torch.where(curvature > 0, energy / curvature, 0.0)
        return Move(
            torch.addcmul(at.z, self.direction, length),
            gap=torch.addcmul(gap, image, length, value=-1, out=image),
        )

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        super().select_rows(problem, rows)
        if self.direction is not None and self.energy is not None:
            self.direction, self.energy = self.direction[rows], self.energy[rows]


class _CompiledConjugate(KrylovRule):
    """The same in two calls of compiled kernels, before and after the product."""

    runs_ahead = True

    def __init__(self, problem: Problem, kernels: Any) -> None:
        super().__init__(problem)
        self.kernels = kernels
        self.direction: Tensor | None = None
        self.size: Tensor | None = None
        self.owned = False  # whether the direction may be overwritten
        self.left: Tensor | None = None  # the last gap that it made, which may be, too

    def advance(self, at: Point) -> Move:
        gap, size = at.gap.contiguous(), at.size
        last, last_size = self.direction, self.size
        if last is None or last_size is None:
            direction = gap
        else:
            direction, self.owned = last if self.owned else last.clone(), True
            self.kernels.turn(gap.numpy(), size.numpy(), last_size.numpy(), direction.numpy())
        self.direction, self.size = direction, size
        product = self.problem.product(direction)
        self.left = gap if gap is self.left else gap.clone()
        z, lengths = torch.empty_like(gap), gap.new_empty(2, len(gap))
        self.kernels.move_along(
            as_rows(at.z),
            self.left.numpy(),
            direction.numpy(),
            as_rows(product),
            size.numpy(),
            z.numpy(),
            *lengths.numpy(),
        )
        return Move(z, None, self.left, *lengths.unbind(0))

    def run_ahead(self, at: Point, runs: CompiledRuns, limits: Limits) -> Ahead | None:
        if runs.product is not None:
            return self._run_many(at, runs.product, limits)
        return None if runs.conjugate is None else self._run_few(at, runs.conjugate, limits)

    def _run_many(
        self, at: Point, product: Callable[[Tensor, Tensor], Any], limits: Limits
    ) -> Ahead:
        """Make steps between products by the cell: each is one look and one step at once."""
        z, gap, size = at.z.contiguous(), at.gap.clone(), at.size
        direction = gap.clone() if self.direction is None else self.direction.clone()
        if self.size is not None:
            self.kernels.turn(gap.numpy(), size.numpy(), self.size.numpy(), direction.numpy())
        free, image = torch.empty_like(gap), torch.empty_like(gap)
        floor, last_size, looks, steps, passed = self.problem.scale_floor(), size, 0, 0, True
        while passed:
            steps += 1
            product(direction, image)
            lengths = gap.new_empty(3, len(gap))
            passed = self.kernels.go_on(
                z.numpy(),
                gap.numpy(),
                direction.numpy(),
                image.numpy(),
                size.numpy(),
                floor.numpy(),
                self.problem.forcing,
                limits.tolerance,
                limits.progress if steps < limits.steps else 0.0,  # the last look is not passed
                limits.guard,
                limits.best,
                free.numpy(),
                *lengths.numpy(),
            )
            # The start is not ours to write to.
            before, z, free = z, free, torch.empty_like(free) if steps == 1 else z
            last_size, (size, length, scale) = size, lengths.unbind(0)
            if passed:
                limits.sizes[looks], limits.scales[looks] = size.numpy(), scale.numpy()
                looks += 1
        self.direction, self.size, self.owned = direction, last_size, True
        there = Point.predicted(Move(z, None, gap, size, length), at.norm)
        self.left = gap
        return Ahead(steps, looks, steps, before, z, there)

    def _run_few(self, at: Point, conjugate: Callable[..., Any], limits: Limits) -> Ahead:
        turned = self.direction is not None
        z, gap, size = at.z.contiguous().clone(), at.gap.clone(), at.size.clone()
        direction = torch.empty_like(z) if self.direction is None else self.direction.clone()
        last_size = size.clone() if self.size is None else self.size.clone()
        good, length = torch.empty_like(z), torch.empty_like(size)
        looks, steps = conjugate(
            z.numpy(),
            gap.numpy(),
            direction.numpy(),
            turned,
            size.numpy(),
            last_size.numpy(),
            length.numpy(),
            self.problem.scale_floor().numpy(),
            self.problem.forcing,
            limits.tolerance,
            limits.progress,
            limits.guard,
            limits.best,
            limits.steps,
            good.numpy(),
            limits.sizes,
            limits.scales,
        )
        self.direction, self.size, self.owned = direction, last_size, True
        there = Point.predicted(Move(z, None, gap, size, length), at.norm)
        return Ahead(steps, looks, steps, good, z, there)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        super().select_rows(problem, rows)
        if self.direction is not None and self.size is not None:
            self.direction, self.size = self.direction[rows], self.size[rows]
