"""Bounds of nonnegative matrices, and projections that keep them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "PerronBound",
    "bound_response",
    "is_below",
    "largest_response",
    "perron_bound",
    "perron_vector",
    "project_rows",
]

PerronBound = tuple[float, Tensor]
"""A number `r` and a positive vector `v` with `|A| v <= r v`, in float64."""

SLACKS = (1e-9, 1e-6, 1e-3)
"""How far above the eigenvalue levels are tried, relative to it; rounding may spoil the least."""
ITERATIONS = 50


def ratio(A: Tensor, v: Tensor) -> float:
    """Return `max_i (|A| v)_i / v_i`, rounded up; infinite unless `v` is positive and finite.

    It bounds the Perron-Frobenius eigenvalue of `|A|` for every positive `v` (Collatz, 1942;
    Wielandt, 1950): `|A| v <= r v` makes `r` the norm of `|A|` in `max_i |z_i|/v_i`. Sums of
    nonnegative numbers are right to a relative `n` units of rounding.

    Args:
        A: A matrix, shape (n, n).
        v: A vector, shape (n,).
    """
    v = v.detach().double()
    if not bool((v.isfinite() & (v > 0)).all()):
        return math.inf
    found = float((A.detach().double().abs() @ v / v).max())
    if math.isnan(found):
        return math.inf
    return found * (1 + (len(v) + 4) * torch.finfo(torch.float64).eps)


def perron_bound(A: Tensor, also: Sequence[Tensor] = ()) -> PerronBound:
    """Return a proven upper bound of the Perron-Frobenius eigenvalue of `|A|`, and its vector.

    For a level `r` above the eigenvalue, `v = (I - |A|/r)^-1 1` is the sum of nonnegative terms
    `(|A|/r)^k 1`, so that `v >= 1` and `|A| v = r (v - 1) < r v`: a vector as the bound of Collatz
    and Wielandt needs, for reducible matrices too. Eigenvalues and `v` are computed without
    guarantee; the bound is proved by the vector, whatever it is.

    Args:
        A: A matrix, shape (n, n).
        also: Further vectors to try; that of ones, which gives the infinity norm, is always tried.
    """
    M = A.detach().double().abs()
    ones = torch.ones_like(M[:, 0])
    tried = [(ratio(M, v), v) for v in (ones, *(v.detach().double() for v in also))]
    if tried[0][0] < math.inf:
        eye, size = torch.diag(ones), max(tried[0][0], torch.finfo(torch.float64).tiny)
        largest = float(torch.linalg.eigvals(M / size).abs().max())
        for slack in SLACKS:
            level = size * max(largest * (1 + slack), slack)
            v, failed = torch.linalg.solve_ex(eye - M / level, ones)
            if not bool(failed):
                tried.append((ratio(M, v), v))
    return min(tried, key=lambda one: one[0])


def largest_response(A: Tensor, B: Tensor, bound: float, v: Tensor) -> float:
    """Return a proven upper bound of the largest row sum of `(I - |A|)^-1 |B|`, given `r < 1`.

    With `w = |B| 1`, every `u` with `(I - |A|) u >= w` is above `(I - |A|)^-1 w`, since the inverse
    has no negative entries. A computed solution becomes such a `u` by a multiple of `v`, for which
    `(I - |A|) v >= (1 - r) v`, that makes up for rounding.

    Args:
        A: A matrix, shape (n, n).
        B: A matrix, shape (n, m).
        bound: `r`, below 1.
        v: A positive vector with `|A| v <= r v`.
    """
    M, w = A.detach().double().abs(), B.detach().double().abs().sum(dim=1)
    unit = (len(M) + B.shape[1] + 8) * torch.finfo(torch.float64).eps
    u, failed = torch.linalg.solve_ex(torch.diag(torch.ones_like(w)) - M, w)
    if bool(failed) or not bool(u.isfinite().all()):
        u = torch.zeros_like(w)
    rounding = unit * (u.abs() + M @ u.abs() + w)
    missing = float(((w - u + M @ u + rounding) / ((1 - bound) * v)).max())
    return float((u + max(missing, 0.0) * v).max()) * (1 + unit)


def bound_response(A: Tensor, B: Tensor, bound: float, v: Tensor) -> Tensor:
    """Return a matrix that is nowhere below `(I - |A|)^-1 |B|`, given `r < 1`.

    As `largest_response`, column by column: `(I - |A|) X >= |B|` makes `X` such a matrix. It bounds
    how far entries of the equilibrium move with those of the input, and its norm how far all do.

    Args:
        A: A matrix, shape (n, n).
        B: A matrix, shape (n, m).
        bound: `r`, below 1.
        v: A positive vector with `|A| v <= r v`.
    """
    M, w = A.detach().double().abs(), B.detach().double().abs()
    unit = (len(M) + 8) * torch.finfo(torch.float64).eps
    eye = torch.diag(torch.ones_like(M[:, 0]))
    X, failed = torch.linalg.solve_ex(eye - M, w)
    X = torch.zeros_like(w) if bool(failed) or not bool(X.isfinite().all()) else X.clamp_min(0)
    rounding = unit * (X + M @ X + w)
    missing = ((w - X + M @ X + rounding) / ((1 - bound) * v[:, None])).amax(dim=0).clamp_min(0)
    raised: Tensor = (X + v[:, None] * missing) * (1 + unit)
    return raised


def is_below(A: Tensor, level: float) -> bool:
    """Return whether the Perron-Frobenius eigenvalue of `|A|` is proved to be below a level."""
    M = A.detach().double().abs()
    ones = torch.ones_like(M[:, 0])
    if ratio(M, ones) < level:
        return True
    v, failed = torch.linalg.solve_ex(torch.diag(ones) - M / level, ones)
    return not bool(failed) and ratio(M, v) < level


def perron_vector(A: Tensor) -> Tensor:
    """Return about the Perron-Frobenius eigenvector of `|A|`, positive, by power iteration."""
    M = A.detach().double().abs()
    # A small positive matrix more: the vector of a reducible one would have zeros.
    floor = 1e-3 * float(M.max()) / len(M)
    v = torch.ones_like(M[:, 0])
    for _ in range(ITERATIONS):
        v = M @ v + floor * v.sum()
        v = v / v.max()
    return v


def project_rows(A: Tensor, radii: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Return the nearest matrix whose rows have `sum_j w_j |A_ij| <= r_i`.

    Without weights it is the projection onto the infinity-norm ball, row by row onto l1 balls
    (El Ghaoui et al., 2021). Its entries are `sign(a_j) max(|a_j| - t w_j, 0)`, where
    `t >= 0` solves a piecewise linear equation whose breakpoints `|a_j|/w_j` are sorted (Duchi et
    al., 2008).

    Args:
        A: A matrix, shape (n, m).
        radii: `r`, positive: one for each row, or one for all.
        weights: `w`, positive, shape (m,).
    """
    a = A.detach().double().abs()
    w = torch.ones_like(a[0]) if weights is None else weights.detach().double()
    r = torch.as_tensor(radii, dtype=torch.float64, device=a.device).expand(len(a))[:, None]
    # By how much breakpoints are below the largest one: that tells entries near to it apart even
    # where the radius is lost in their rounding.
    below = a / w
    below = below - below.amax(dim=1, keepdim=True)
    ordered, order = below.sort(dim=1, descending=True)
    squares = w.square().expand_as(a).gather(1, order)
    rest = (r - (ordered * squares).cumsum(1)) / squares.cumsum(1)  # the largest one less t
    count = (ordered + rest > 0).sum(dim=1, keepdim=True).clamp_min(1)  # of NaN none is
    inside = (a * w).sum(dim=1, keepdim=True) <= r
    kept = torch.where(inside, a, w * (below + rest.gather(1, count - 1)).clamp_min(0))
    return (A.detach().sign() * kept).to(A.dtype)
