"""Plain and damped fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from equipoise.core.validate import require_fraction
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver

__all__ = ["FixedPoint"]


@final
@SOLVERS.register("fixed_point")
@dataclass(frozen=True)
class FixedPoint(Solver):
    """`z <- z + damping (f(z) - z)` (Picard; damped: Krasnoselskii, 1955, and Mann, 1953).

    Converges for contractions; for nonexpansive maps when `damping < 1`.

    Args:
        damping: Weight of the new value, in (0, 1].
    """

    damping: float = 1.0

    combines = True

    def __post_init__(self) -> None:
        require_fraction("FixedPoint.damping", self.damping)

    def rate(self, lipschitz: float) -> float:
        return 1 - self.damping * (1 - lipschitz) if self.damping < 1 else lipschitz

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Relax(self.damping)


class _Relax(Rule):
    def __init__(self, damping: float) -> None:
        self.damping = damping

    def advance(self, at: Point) -> Move:
        return Move(at.f if self.damping == 1 else torch.add(at.z, at.gap, alpha=self.damping))

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        pass
