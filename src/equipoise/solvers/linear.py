"""Solvers of affine equations `v = J v + g`: adjoints of equilibria and Newton systems, each sample on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm
from equipoise.core.validate import require_count
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["GMRES", "BiCGStab", "ConjugateGradient", "Neumann"]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`, and 0 where `b` is 0."""
    return torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, torch.ones_like(b), b))


class _Krylov(Rule):
    """A rule that multiplies with `A = I - J`."""

    problem: LinearProblem

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem, LinearProblem)
        self.problem = problem

    def image(self, p: Tensor) -> Tensor:
        return p - self.problem.product(p)


@final
@SOLVERS.register("conjugate_gradient")
@dataclass(frozen=True)
class ConjugateGradient(Solver):
    """Conjugate gradient on `(I - J) v = g` with `J` symmetric and `I - J` positive definite (Hestenes & Stiefel, 1952)."""

    linear = True
    needs_symmetric = True
    tracks_residual = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Conjugate(problem)


class _Conjugate(_Krylov):
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
            gap=torch.addcmul(gap, image, length, value=-1),
        )

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        assert isinstance(problem, LinearProblem)
        self.problem = problem
        if self.direction is not None and self.energy is not None:
            self.direction, self.energy = self.direction[rows], self.energy[rows]


@final
@SOLVERS.register("bicgstab")
@dataclass(frozen=True)
class BiCGStab(Solver):
    """Stabilised bi-conjugate gradient on `(I - J) v = g` (van der Vorst, 1992): two products a step, fixed memory."""

    linear = True
    tracks_residual = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Stabilised(problem)


class _Stabilised(_Krylov):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.memory: list[
            Tensor
        ] = []  # shadow, direction, image, rho, alpha, omega of the last step

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
        assert isinstance(problem, LinearProblem)
        self.problem = problem
        self.memory = [part[rows] for part in self.memory]


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


class _Minimal(_Krylov):
    def __init__(self, problem: Problem, memory: int) -> None:
        super().__init__(problem)
        self.memory = memory
        self.used = memory  # full: the first step starts a basis
        self.bases: Tensor = torch.empty(
            0
        )  # directions and their images, (samples, memory, 2, width)
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
                shares = torch.bmm(pair[:, 1:], images.mT)
                pair = pair - torch.bmm(shares, bases).view_as(pair)
        left = row_norm(pair[:, 1])[:, None]
        # An image that lies in the span of the earlier ones ends the Krylov space: no direction is
        # left.
        ended = left <= 10 * torch.finfo(z.dtype).eps * length
        pair *= torch.where(ended, 0.0, 1 / left).unsqueeze(1)
        self.bases[:, self.used] = pair
        self.used += 1
        share = row_dot(pair[:, 1], residual)
        z = torch.addcmul(z, pair[:, 0], share)
        residual = torch.addcmul(residual, pair[:, 1], -share)
        self.fallback = row_norm(residual)[:, None] > 0.9 * before
        return Move(z, gap=residual)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        assert isinstance(problem, LinearProblem)
        self.problem = problem
        if self.bases.numel():
            self.bases = self.bases[rows]
        self.fallback = None if self.fallback is None else self.fallback[rows]


@final
@SOLVERS.register("neumann")
@dataclass(frozen=True)
class Neumann(Solver):
    """The series `v = g + J g + J^2 g + ...`, one term a step; `max_steps` truncates it (Lorraine et al., 2020)."""

    linear = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Series()


class _Series(Rule):
    def advance(self, at: Point) -> Move:
        return Move(at.f)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        pass
