"""The Neumann series for linear equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["Neumann"]


@final
@SOLVERS.register("neumann")
@dataclass(frozen=True)
class Neumann(Solver):
    """The series `v = g + J g + J^2 g + ...`, one term a step (Lorraine et al., 2020).

    `max_steps` truncates it.
    """

    linear = True

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Series()


class _Series(Rule):
    def advance(self, at: Point) -> Move:
        return Move(at.f)

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        pass
