"""How `solver="auto"` picks."""

from __future__ import annotations

from equipoise.solvers.anderson import Anderson
from equipoise.solvers.base import Solver
from equipoise.solvers.fixed_point import FixedPoint
from equipoise.solvers.linear import GMRES, ConjugateGradient, Neumann

__all__ = ["pick_adjoint", "pick_forward"]

EASY = 0.3
"""With a Lipschitz bound this small, plain iteration gains a digit in two steps and bookkeeping cannot pay."""


def pick_forward(*, lipschitz: float | None) -> Solver:
    """Plain iteration for cells that declare a Lipschitz bound of at most 0.3, Anderson for all others."""
    return FixedPoint() if lipschitz is not None and lipschitz <= EASY else Anderson()


def pick_adjoint(*, symmetric: bool, lipschitz: float | None) -> Solver:
    """The Neumann series for easy cells, conjugate gradient for symmetric ones, GMRES for all others."""
    if lipschitz is not None and lipschitz <= EASY:
        return Neumann()
    return ConjugateGradient() if symmetric else GMRES()
