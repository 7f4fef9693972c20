"""Damped Newton steps on the convex functions behind a layer's inverse and its conjugate."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm
from equipoise.families.opteq.potential import Potential

__all__ = ["TIGHT", "DampedNewton"]

TIGHT = 1e-13
"""Relative gradient at which a search is over."""
MAX_INNER = 2000
MAX_ENTRIES = 2**23
"""Entries of the matrices factorised together, 64 megabytes."""
ROUNDING = 1e-14
"""Relative error to expect in sums of many terms in float64."""
MIN_DAMPING, MAX_DAMPING = 1e-13, 10.0
"""Damping; from 1 on every step goes down, since the functions are 1-smooth."""


class DampedNewton:
    """Minimise `(1 - t) psi(y) + t |y|^2/2 - <target, y>` for each row, for `t` in [0, 1].

    A step solves `((1 - t) W^T D W/mu + (t + damping) I) d = -gradient`. The damping of a row falls
    fourfold with each step that goes down and rises with each that does not (Levenberg, 1944;
    Marquardt, 1963), so that flat directions are left in few steps without spoiling the others.

    Args:
        potential: The layer.
        target: Shape (batch, m), float64.
        t: The fraction of the quadratic term.
        start: Where to begin, like `target`.

    Attributes:
        y: Where the search is.
        gradient: `(1 - t) f(y) + t y - target`.
        scale: The size of its terms.
        size: Its length in units of `scale`.
        stuck: Rows in which rounding hides every descent.
    """

    def __init__(self, potential: Potential, target: Tensor, t: float, start: Tensor) -> None:
        self.potential = potential
        self.target = target
        self.t = t
        self.y = start
        self.damping = torch.full_like(start[:, 0], 1e-2 * (1 - t))
        self.stuck = torch.zeros_like(start[:, 0], dtype=torch.bool)
        # The start's own size, or a gap to the target 0 would stay as large as the values that it
        # is measured by.
        self.floor = (1 - t) * row_norm(potential.prox(start))
        self.gradient, self.scale, self.size = self._gradient(start)
        self.value = self._value(start)

    def advance(self) -> None:
        """Take one step in every row, where it leads down."""
        direction = self._direction()
        moved = self.y + direction
        gradient, scale, size = self._gradient(moved)
        value = self._value(moved)
        slope = (self.gradient * direction).sum(dim=1)
        # Near the minimum values differ by less than rounding, but the gradient still tells.
        noise = ROUNDING * (
            1 + self.potential.psi(moved).abs() + (moved * self.target).sum(dim=1).abs()
        )
        down = (slope < 0) & (value <= self.value + 1e-4 * slope)
        good = down | (
            (value <= self.value + noise) & (row_norm(gradient) < row_norm(self.gradient))
        )
        self.stuck = ~good & (self.damping >= MAX_DAMPING)
        self.damping = torch.where(good, self.damping / 4, self.damping * 4).clamp(
            MIN_DAMPING, MAX_DAMPING
        )
        self.y = torch.where(good[:, None], moved, self.y)
        self.gradient = torch.where(good[:, None], gradient, self.gradient)
        self.size, self.value = (
            torch.where(good, size, self.size),
            torch.where(good, value, self.value),
        )
        self.scale = torch.where(good, scale, self.scale)

    def select_rows(self, rows: Tensor) -> DampedNewton:
        """Return the search of some rows only."""
        part = object.__new__(DampedNewton)
        part.potential, part.t = self.potential.select_rows(rows), self.t
        for name in (
            "target",
            "y",
            "damping",
            "stuck",
            "gradient",
            "floor",
            "scale",
            "size",
            "value",
        ):
            setattr(part, name, getattr(self, name)[rows])
        return part

    def _gradient(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        f, t = self.potential.prox(y), self.t
        terms = torch.maximum((1 - t) * row_norm(f), self.floor) + t * row_norm(y)
        scale = row_norm(self.target) + terms + torch.finfo(y.dtype).tiny
        gradient = (1 - t) * f + t * y - self.target
        return gradient, scale, row_norm(gradient) / scale

    def _value(self, y: Tensor) -> Tensor:
        return (1 - self.t) * self.potential.psi(y) + (y * (self.t / 2 * y - self.target)).sum(
            dim=1
        )

    def _direction(self) -> Tensor:
        slopes = self.potential.slopes(self.y) * ((1 - self.t) / self.potential.mu)
        shift = (self.t + self.damping)[:, None]
        W = self.potential.matrix
        if W is None or W.shape[1] ** 2 > MAX_ENTRIES:
            return self._iterate(slopes, shift)
        chunk = max(1, MAX_ENTRIES // (W.shape[1] * max(W.shape)))
        direction = torch.empty_like(self.y)
        for first in range(0, len(direction), chunk):
            part = slice(first, first + chunk)
            hessian = (W.T * slopes[part, None, :]) @ W
            hessian.diagonal(dim1=1, dim2=2).add_(shift[part])
            factor = torch.linalg.cholesky_ex(hessian).L
            direction[part] = -torch.cholesky_solve(self.gradient[part, :, None], factor)[:, :, 0]
        return direction  # not finite, and then not taken, where rounding spoils a factorisation

    def _iterate(self, slopes: Tensor, shift: Tensor) -> Tensor:
        """Conjugate gradient, where there is no matrix; stopped early it still descends."""
        residual = direction = -self.gradient
        solution = torch.zeros_like(residual)
        energy = row_dot(residual, residual)
        goal = 1e-6 * energy
        for _ in range(MAX_INNER):
            image = (
                self.potential.adjoint(slopes * self.potential.apply(direction)) + shift * direction
            )
            length = torch.where(energy > goal, energy / row_dot(direction, image), 0.0)
            solution = torch.addcmul(solution, direction, length)
            residual = torch.addcmul(residual, image, -length)
            old, energy = energy, row_dot(residual, residual)
            if bool((energy <= goal).all()):
                break
            direction = torch.addcmul(
                residual, direction, torch.where(old > goal, energy / old, 0.0)
            )
        return solution
