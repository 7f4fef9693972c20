"""Equations in other coordinates, in which their maps are cheaper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.kernels import find_kernels
from equipoise.solvers.problem import Linearization, Problem, Work

__all__ = ["CoordinateProblem", "Coordinates", "ExtremeUnits", "Reduced", "ReducedSystem"]


class ExtremeUnits(Exception):  # noqa: N818 - a signal within a solve, which starts again
    """Rows of coordinates are too large or too small to square."""


@dataclass(frozen=True)
class Coordinates:
    """The map of a state in other coordinates `u`, of which the state is a linear function.

    `decode(step(u))` is the map at `decode(u)`, so that combinations of coordinates with weights of
    sum 1 stand for the same combinations of states: a solver that only combines makes the same
    steps in them. The inner product of the states of `u` and `v` is `factor` times that of the
    first half of `u` with the second half of `v`, so that residuals are those of the state, too.

    Attributes:
        start: Where to start, shape (samples, width).
        step: The map; writes its value into the second argument where there is one.
        factor: See above.
        decode: Returns the state, given its coordinates.
        select_rows: Returns the same for some samples, given their row numbers; its `start` does
            not matter.
    """

    start: Tensor
    step: Callable[..., Tensor]
    factor: float
    decode: Callable[[Tensor], Tensor]
    select_rows: Callable[[Tensor], Coordinates]


@dataclass(frozen=True)
class ReducedSystem:
    """A linear equation `v = J v + g` in other coordinates: `y = A y + b`, `v = decode(y)`.

    `|b| <= |g|`, `|y| <= |v|`, and the residual of `v` is at most as long as that of `y`.

    Attributes:
        constant: `b`.
        local: Products with the symmetric positive semidefinite `A`.
        decode: `y -> v`.
    """

    constant: Tensor
    local: Linearization
    decode: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Reduced:
    """A problem in other coordinates, ready to be solved.

    Attributes:
        problem: The map of the coordinates. Its norm is that of the state.
        start: The coordinates to start at.
        f: The map there, where it is known.
        decode: Returns the state, given its coordinates.
    """

    problem: Problem
    start: Tensor
    f: Tensor | None
    decode: Callable[[Tensor], Tensor]


class CoordinateProblem(Problem):
    """The problem of coordinates, for solvers that combine iterates and values.

    Args:
        coordinates: The coordinates.
        symmetric: Whether the Jacobian of the problem that they belong to is symmetric.
        work: The counter to continue.
    """

    halves = True

    def __init__(self, coordinates: Coordinates, *, symmetric: bool, work: Work) -> None:
        self.coordinates = coordinates
        self.symmetric = symmetric
        self.args = ()
        self.work = work
        self.factor = coordinates.factor

    def __call__(self, z: Tensor) -> Tensor:
        self.work.count += 1
        return self.coordinates.step(z)

    def norm(self, rows: Tensor) -> Tensor:
        # Rounding may make a product of nearly equal rows negative.
        square: Tensor = torch.linalg.vecdot(*self.pair(rows)).clamp_min_(0.0)
        return (square if self.factor == 1 else square.mul_(self.factor)).sqrt_()

    def select_rows(self, rows: Tensor) -> Problem:
        self.work.rows_left = len(rows)
        return CoordinateProblem(
            self.coordinates.select_rows(rows), symmetric=self.symmetric, work=self.work
        )

    def scaled(self, unit: Tensor) -> Problem:
        raise ExtremeUnits

    def compiled(self, z: Tensor) -> CompiledRuns | None:
        return None if find_kernels(z) is None else CompiledRuns(evaluate=self.coordinates.step)

    def linearize(self, z: Tensor) -> Linearization:
        raise ValueError("Coordinates are for solvers that combine iterates and values.")

    def declared(self, z: Tensor) -> Linearization | None:
        return None

    def with_args(self, args: Sequence[Tensor]) -> Problem:
        return self

    def freeze(self) -> Problem:
        return self
