"""How far equilibria of dense monotone networks move: sharper than `|U|/m`.

Let `z = s(W z + U x + b)` with slopes of `s` in [0, 1], entry by entry. For two inputs let `e` be
the difference of the inputs, `d` that of the equilibria and `p = W d + U e` that of the arguments
of `s`. Then `d_i (p_i - d_i) >= 0`, and the sum with any positive weights `psi_i` is

    d^T S d <= 2 d^T G e,     S = Psi (I - W) + (I - W)^T Psi,     G = Psi U.

Where `S` is positive definite that is an ellipsoid about `S^-1 G e`, over which a linear function
`c` is largest in closed form:

    |c^T d| <= |c^T S^-1 G e| + |S^(-1/2) c| |S^(-1/2) G e|
            <= (|c^T S^-1 G| + |S^(-1/2) c| |S^(-1/2) G|) |e|.

With `Psi = I` and `S >= 2 m I` this is at most `|c| |U|/m`, the bound of Pabbaraju, Winston &
Kolter (2021); it knows of `A^T A` as well, and of the direction `c`. Every `Psi` that makes `S`
positive definite gives a bound, so that it may be searched for.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.operators import dense_norm

__all__ = ["Ellipsoid", "find_weights"]

SLACK = 1e-6
"""What bounds are raised by, relatively, for the rounding of factorisations."""
SEARCH_STEPS = 150
MAX_SEARCHED = 512
"""States up to this long have their weights `Psi` searched for."""


class Ellipsoid(NamedTuple):
    """`L^-1` applied to what matters, where `S = L L^T`.

    Attributes:
        factor: `L`, of an `S` that is lowered by a bound of its rounding.
        moved: `L^-1 G`, shape (n, inputs).
        norm: A bound of `|S^(-1/2) G|`.
    """

    factor: Tensor
    moved: Tensor
    norm: float

    @classmethod
    @torch.no_grad()
    def make(cls, gap: Tensor, U: Tensor, log_psi: Tensor | None = None) -> Ellipsoid | None:
        """Return the ellipsoid; None if `S` is not proved to be positive definite.

        Args:
            gap: `I - W`, shape (n, n), float64.
            U: Shape (n, inputs), float64.
            log_psi: Logarithms of the weights; zeros by default.
        """
        psi = torch.ones_like(gap[0]) if log_psi is None else (log_psi - log_psi.mean()).exp()
        half = psi[:, None] * gap
        S = half + half.T
        unit = 8 * len(S) * torch.finfo(S.dtype).eps
        size = float(torch.linalg.matrix_norm(S))
        # {d : d^T S' d <= 2 d^T g} is larger for a smaller S'.
        S.diagonal().sub_(unit * size)
        factor, failed = torch.linalg.cholesky_ex(S)
        if bool(failed):
            return None
        lowest = float(torch.linalg.eigvalsh(S)[0])
        if not unit * size < SLACK * lowest:  # too close to singular for solves to be exact enough
            return None
        moved = torch.linalg.solve_triangular(factor, psi[:, None] * U, upper=False)
        return cls(factor, moved, float(dense_norm(moved)) * (1 + SLACK))

    def rows(self, rows: Tensor) -> Tensor:
        """Return a bound for each linear function of the equilibrium.

        Args:
            rows: The functions, shape (count, n), float64.
        """
        turned = torch.linalg.solve_triangular(self.factor, rows.T, upper=False)  # (n, count)
        along = torch.linalg.vector_norm(self.moved.T @ turned, dim=0)
        found: Tensor = along + torch.linalg.vector_norm(turned, dim=0) * self.norm
        return found * (1 + SLACK)

    def state(self) -> float:
        """Return a bound for the equilibrium as a whole."""
        back = torch.linalg.solve_triangular(self.factor.T, self.moved, upper=True)  # S^-1 G
        eye = torch.eye(len(self.factor), dtype=back.dtype, device=back.device)
        inverse = torch.linalg.solve_triangular(self.factor, eye, upper=False)
        whole = float(dense_norm(back)) + float(dense_norm(inverse)) * self.norm
        return whole * (1 + SLACK)


def find_weights(gap: Tensor, U: Tensor, rows: Tensor, start: Tensor | None = None) -> Tensor:
    """Return logarithms of weights `Psi` for which the bounds of some functions are small.

    Descent on the mean logarithm of the bounds; whatever it finds, the bounds are proved.

    Args:
        gap: `I - W`, shape (n, n), float64.
        U: Shape (n, inputs), float64.
        rows: The functions, shape (count, n), float64.
        start: Where to begin; by default at equal weights.
    """
    first = torch.zeros_like(gap[0]) if start is None else start.detach().to(gap)
    if len(gap) > MAX_SEARCHED:
        return first
    spread = (U @ U.T).detach()
    best, lowest = first, math.inf
    with torch.enable_grad():
        log_psi = first.clone().requires_grad_()
        optimizer = torch.optim.Adam([log_psi], lr=0.03)
        for _ in range(SEARCH_STEPS):
            psi = log_psi.exp()
            half = psi[:, None] * gap
            factor, failed = torch.linalg.cholesky_ex(half + half.T)
            if bool(failed):
                break
            # |L^-1 G|^2 is the largest eigenvalue of L^-1 Psi U U^T Psi L^-T.
            inner = torch.linalg.solve_triangular(factor, psi[:, None] * spread * psi, upper=False)
            inner = torch.linalg.solve_triangular(factor, inner.T, upper=False)
            turned = torch.linalg.solve_triangular(factor, rows.T, upper=False)
            along = (turned * (inner @ turned)).sum(dim=0).clamp_min(0).sqrt()
            norm = torch.linalg.eigvalsh(inner)[-1].sqrt()
            value = (along + torch.linalg.vector_norm(turned, dim=0) * norm).log().mean()
            reached = float(value.detach())
            if not math.isfinite(reached):
                break
            if reached < lowest:
                best, lowest = log_psi.detach().clone(), reached
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    return best
