"""Equilibria of dense monotone networks with ReLU, and linear systems on their active units.

An equilibrium with the active units `a` solves `(I - W)_aa z_a = c_a` and is zero elsewhere. The
matrices of samples differ, so that one factorisation for each would cost `n^3` a sample. But the
resolvent `R = (I + s (I - W))^-1` serves all of them: with `S = 2 D - I`, `D` the active units,

    u <- 2 R (S u + s b) - S u,    y = D u,

contracts to the solution of `D ((I - W) y - b) = 0` for every `s > 0` (Peaceman & Rachford; that
the projection `D` is the proximal map of a subspace is all that it takes), by one product of a
whole batch a step. Steps are made in float32, and their errors mended by residuals in full
precision, until rounding is all that is left. Rows that are slow are solved by elimination.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ActiveSets", "find_active_sets"]

MAX_STEPS = 100
CHECK_EVERY = 2
"""Steps between two looks at the change."""
SINGLE = 1e-6
"""Relative accuracy that steps in float32 can reach."""
ROUNDING = 256
"""Residuals of so many units of rounding are final."""
MAX_REFINEMENTS = 6
MAX_ROUNDS = 10
"""Times that active units are corrected; each time, fewer samples are left."""


class ActiveSets(NamedTuple):
    """Samples of a network with the units that are active at their equilibria.

    Attributes:
        gap: `I - W`, shape (n, n).
        resolvent: `(I + s (I - W))^-1` in float32.
        s: The step size.
        active: Which units are active, shape (N, n).
        z: The equilibria, shape (N, n).
    """

    gap: Tensor
    resolvent: Tensor
    s: float
    active: Tensor
    z: Tensor

    def solve_adjoint(self, u: Tensor) -> Tensor:
        """Return `D (I - D W)^-T u` for each sample, shape (N, n).

        Args:
            u: Shape (n,).
        """
        given = u.expand(self.active.shape)
        return _solve(self.gap.T, self.resolvent.T, self.s, self.active, given)[0]


@torch.no_grad()
def find_active_sets(gap: Tensor, c: Tensor, s: float) -> ActiveSets:
    """Find the equilibria `z = relu(W z + c)`, exact up to rounding.

    Args:
        gap: `I - W`, whose symmetric part is positive definite.
        c: `U x` of each sample, shape (N, n).
        s: The step size of the splitting, any that is positive.
    """
    eye = torch.eye(len(gap), dtype=torch.float32, device=gap.device)
    resolvent = torch.linalg.inv(eye + s * gap.float())
    rough, scale = _scaled(c)
    u = _iterate(partial(_free_step, rough, resolvent, s), rough, SINGLE)
    active = u > 0
    z = u.relu().to(c) * scale
    rows = torch.arange(len(c), device=c.device)
    for _ in range(MAX_ROUNDS):
        z[rows], products = _solve(gap, resolvent, s, active[rows], c[rows], z[rows])
        # What decides is the sign of `W z + c = z + c - (I - W) z`, which is `z` on active units.
        inside = z[rows] + c[rows] - products > 0
        wrong = (inside != active[rows]).any(dim=1)
        rows = rows[wrong]
        if not len(rows):
            break
        active[rows] = inside[wrong]
    return ActiveSets(gap, resolvent, s, active, z)


def _solve(
    gap: Tensor, resolvent: Tensor, s: float, active: Tensor, b: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The solution of `D (gap y - b) = 0`, `y = D y`, for each row, and `gap y`."""
    on, sign = active.to(b), 2 * active.float() - 1
    b = on * b
    y = torch.zeros_like(b) if start is None else on * start
    products = torch.zeros_like(b) if start is None else y @ gap.T
    residual = b - on * products
    wanted = ROUNDING * torch.finfo(b.dtype).eps * b.norm(dim=1)
    left = residual.norm(dim=1)
    for _ in range(MAX_REFINEMENTS):
        if not bool((left > wanted).any()):
            return y, products
        rough, scale = _scaled(residual)
        # No more digits than the last refinement needs.
        tolerance = float((wanted / left.clamp_min(1e-300)).min().clamp(SINGLE, 0.1))
        u = _iterate(partial(_masked_step, sign, rough, resolvent, s), rough, tolerance)
        y = y + scale * (on * u.to(b))
        products = y @ gap.T
        residual = b - on * products
        left, before = residual.norm(dim=1), left
        if not bool((left < before / 2).any()):
            break
    for i in (~(left <= wanted)).nonzero()[:, 0].tolist():
        units = active[i].nonzero()[:, 0]
        block = gap.index_select(0, units).index_select(1, units)
        y[i] = 0
        y[i, units] = torch.linalg.solve(block, b[i, units])
        products[i] = gap @ y[i]
    return y, products


def _scaled(b: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length 1 in float32, and their lengths."""
    scale = b.norm(dim=1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    return (b / scale).float(), scale


def _free_step(b: Tensor, resolvent: Tensor, s: float, u: Tensor) -> Tensor:
    """A step whose active units are those of `u`: `2 relu(u) - u` is `|u|`."""
    return _moved(u.abs(), b, resolvent, s)


def _masked_step(sign: Tensor, b: Tensor, resolvent: Tensor, s: float, u: Tensor) -> Tensor:
    """A step with given active units, as 1 and -1."""
    return _moved(sign * u, b, resolvent, s)


def _moved(reflected: Tensor, b: Tensor, resolvent: Tensor, s: float) -> Tensor:
    """`2 R (r + s b) - r`."""
    inner = torch.add(reflected, b, alpha=s)
    return torch.addmm(reflected, inner, resolvent.T, beta=-1, alpha=2)


def _iterate(step: Callable[[Tensor], Tensor], like: Tensor, tolerance: float) -> Tensor:
    """Steps from zero until one changes no row by more than a fraction of it."""
    u = torch.zeros_like(like)
    for number in range(1, MAX_STEPS + 1):
        moved = step(u)
        if number % CHECK_EVERY == 0:
            change = (moved - u).norm(dim=1)
            if not bool((change > tolerance * moved.norm(dim=1)).any()):
                return moved
        u = moved
    return u
