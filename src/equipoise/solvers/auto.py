"""How `solver="auto"` picks."""

from __future__ import annotations

from equipoise.solvers.anderson import Anderson
from equipoise.solvers.conjugate_gradient import ConjugateGradient
from equipoise.solvers.fixed_point import FixedPoint
from equipoise.solvers.neumann import Neumann
from equipoise.solvers.protocol import Solver

__all__ = ["pick_adjoint", "pick_forward"]

EASY = 0.3
"""With a Lipschitz bound this small, plain iteration gains a digit in two steps.

Nothing else can pay for itself.
"""


def pick_forward(*, symmetric: bool, lipschitz: float | None) -> Solver:
    """Return plain iteration for a Lipschitz bound of at most 0.3, else Anderson.

    Symmetric cells gain from mixing at once: the eigenvalues of their Jacobians all lie on one
    side. For others it begins with plain steps, and mixes for the samples where they are slow.
    """
    if lipschitz is not None and lipschitz <= EASY:
        return FixedPoint()
    return Anderson() if symmetric else Anderson(plain_rate=0.75)


def pick_adjoint(*, symmetric: bool, lipschitz: float | None) -> Solver:
    """Return the Neumann series, conjugate gradient or Anderson.

    The first for a Lipschitz bound of at most 0.3, the second for symmetric cells.
    """
    if lipschitz is not None and lipschitz <= EASY:
        return Neumann()
    return ConjugateGradient() if symmetric else Anderson(memory=8, plain_rate=0.75)
