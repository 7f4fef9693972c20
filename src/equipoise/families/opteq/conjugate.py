"""Numerical conjugates: the inverse of a layer, values of `phi`, and its Moreau envelopes."""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.tree import row_norm, to_numpy
from equipoise.families.opteq.damped_newton import TIGHT, DampedNewton
from equipoise.families.opteq.potential import Potential

__all__ = ["conjugate", "envelope", "invert", "objective_value"]

LOOSE = 1e-9
"""Relative residual that is good enough where rounding ends an iteration early."""
MAX_STEPS = 500
PATIENCE = 10
"""Steps in which the gap must halve, or it has reached its limit."""
REACH = 1e9
"""How many times larger than the largest hidden value at hand one is assumed to be possible."""


def invert(potential: Potential, target: Tensor, t: float, start: Tensor) -> Tensor:
    """Return `y` with `(1 - t) f(y) + t y = target`: the inverse of a layer with a skip.

    `t` is in (0, 1].

    It minimises `(1 - t) psi(y) + t |y|^2/2 - <target, y>`, which is strongly convex and 1-smooth.
    Raises `ConvergenceError` where float64 does not get there.

    Args:
        potential: The layer.
        target: Shape (batch, m), float64.
        t: The fraction of the skip connection.
        start: Where to begin, like `target`.
    """
    y = start.clone()
    if not len(y):
        return y
    left = torch.arange(len(y), device=y.device)
    search = DampedNewton(potential, target, t, y)
    for _ in range(MAX_STEPS):
        over = (search.size <= TIGHT) | search.stuck
        y[left[over]] = search.y[over]
        if bool((search.size[over] > LOOSE).any()):
            break
        left, search = left[~over], search.select_rows(~over)
        if not len(left):
            return y
        search.advance()
    else:
        y[left] = search.y
        if bool((search.size <= LOOSE).all()):
            return y
    raise ConvergenceError(
        "The inverse of a layer was not found: relative residual "
        f"{float(search.size.max()):.1e} in float64. Look for NaN or huge "
        "numbers; a larger fraction of the skip connection makes the problem easier."
    )


def conjugate(potential: Potential, z: Tensor, tolerance: float) -> Tensor:
    """Return `psi*(z) = sup_y <z, y> - psi(y)`, shape (batch,); infinite outside of its domain.

    Damped Newton steps climb wherever the supremum is, attained or not. The gap `z - f(y)` tends to
    zero if `z` is in the closed domain, and otherwise to the shortest way there, across which a
    hyperplane separates `z` from all that the layer can return. That hyperplane is verified before
    infinity is returned. Samples that reach neither are NaN, and a `ConvergenceWarning` names them.

    Args:
        potential: The layer.
        z: Shape (batch, m), float64.
        tolerance: How far from the domain a point may lie by rounding, relative to
            `|z| + |f(z)| + |W^T c|/mu`; its value is then that of a point of the domain within this
            distance.
    """
    value = torch.full_like(z[:, 0], math.nan)
    if not len(z):
        return value
    began = time.perf_counter()
    left = torch.arange(len(z), device=z.device)
    search = DampedNewton(potential, z, 0.0, z)
    unit = injected_size(potential)
    record = torch.full_like(value, math.inf)
    age = torch.zeros_like(left)
    for _ in range(MAX_STEPS):
        better = search.size < record / 2
        record, age = torch.where(better, search.size, record), torch.where(better, 0, age + 1)
        tight, ended = search.size <= TIGHT, search.stuck | (age >= PATIENCE)
        wanted = tolerance * (search.scale + unit)
        near = row_norm(search.gradient) <= wanted
        far = ~near & (age > 0) & _separated(search, wanted, age % 5 == 3)
        open_ = search.stuck & ~near & ~far
        if bool(open_.any()):
            far[open_] = _proved_outside(search.select_rows(open_), wanted[open_])
        over = tight | far | (ended & near) | search.stuck
        value[left[over]] = torch.where(far, math.inf, _value(search, tight))[over]
        # What is open stays NaN, and takes nothing from the other samples.
        value[left[over & ~far & ~near]] = math.nan
        left, record, age, unit, search = (
            left[~over],
            record[~over],
            age[~over],
            unit[~over],
            search.select_rows(~over),
        )
        if not len(left):
            break
        search.advance()
    else:
        outside = _proved_outside(search, tolerance * (search.scale + unit))
        value[left[outside]] = math.inf
    _tell_open(value.isnan(), time.perf_counter() - began)
    return value


def _tell_open(open_: Tensor, seconds: float) -> None:
    """Warn of samples for which it could not be decided whether they lie in the domain."""
    rows = open_.nonzero()[:, 0].tolist()
    if not rows:
        return
    named = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    warnings.warn(
        f"The conjugate of the potential was not found for {len(rows)} of {len(open_)} samples "
        f"(rows {named}) in {seconds:.1f} s, and is NaN there: it is open whether they lie in its "
        "domain. Give a larger tolerance, or use on_step.",
        ConvergenceWarning,
        stacklevel=2,
    )


def _value(search: DampedNewton, tight: Tensor) -> Tensor:
    """`psi*`: at `z` to second order where the gap is within rounding, else at `f(y)` nearby."""
    y, f = search.y, search.potential.prox(search.y)
    near = torch.where(tight[:, None], search.target, f)
    return (near * y).sum(dim=1) - search.potential.psi(y)


def injected_size(potential: Potential) -> Tensor:
    """Return `|W^T c|/mu`, shape (batch,): how large states are by the layer's own measure.

    An equilibrium with no active unit is zero up to rounding, which has no size of its own.
    """
    return row_norm(potential.adjoint(potential.c)) / potential.mu


def _proved_outside(search: DampedNewton, wanted: Tensor) -> Tensor:
    """Whether `W^T q/mu` stays away from `z` for all `q` in the closed range of `s`.

    By a linear program for each row, `min t` subject to `|W^T q/mu - z| <= t` in each entry. It is
    not asked where the operator is not written out.
    """
    from scipy.optimize import linprog  # type: ignore[import-untyped]

    outside = torch.zeros_like(wanted, dtype=torch.bool)
    potential = search.potential
    if potential.matrix is None:
        return outside
    A = to_numpy(potential.matrix.T / potential.mu)
    ones = np.ones((len(A), 1))
    low, high = (float(end) for end in potential.ends(math.inf))
    cost = np.r_[np.zeros(A.shape[1]), 1.0]
    for row, (z, limit) in enumerate(zip(search.target, wanted, strict=True)):
        size = float(z.abs().max()) or 1.0
        target = to_numpy(z) / size
        # In units of z, or the program's own tolerances would not fit; the box then shrinks.
        box = [(low / size, high / size)] * A.shape[1] + [(0.0, math.inf)]
        found = linprog(
            cost,
            A_ub=np.block([[A, -ones], [-A, -ones]]),
            b_ub=np.r_[target, -target],
            bounds=box,
            method="highs",
        )
        # At least this far in the largest entry, hence in length; the program errs by 1e-7.
        outside[row] = found.status == 0 and size * (found.fun - 1e-7) > float(limit)
    return outside


def _separated(search: DampedNewton, wanted: Tensor, stalled: Tensor) -> Tensor:
    """Whether a hyperplane across the gap keeps `z` away from the domain, by `wanted`.

    The domain holds every `W^T q/mu` with `q` in the range of `s`.

    Hidden values are taken to be at most `REACH` times as large as those at hand, since no finite
    number of steps can exclude more. Where the search has stalled, the hyperplane is turned a
    little: see `_turned`.
    """
    gap, potential = -search.gradient, search.potential
    direction = gap / row_norm(gap).clamp_min(torch.finfo(gap.dtype).tiny)[:, None]
    hidden = potential.hidden(search.y)
    largest = REACH * (1 + float(hidden.abs().max()))
    distance = _distance(search, direction, largest)
    for row in (stalled & (distance <= wanted)).nonzero()[:, 0]:
        turned = _turned(potential, hidden[row], direction[row], largest)
        if turned is not None:
            distance[row] = _distance(search.select_rows(row[None]), turned[None], largest)[0]
    return distance > wanted


def _turned(potential: Potential, q: Tensor, direction: Tensor, largest: float) -> Tensor | None:
    """Return the direction without its component along unbounded directions, or nothing.

    These are the rows of `W` along which the domain has no end.

    At the limit of the search it has no such part, but before that any rounding, times hidden
    values without a bound, crosses the hyperplane. These rows are the ones whose hidden value is
    not at an end of the range, and those that point across.
    """
    W = potential.matrix
    low, high = (float(end) for end in potential.ends(largest))
    above, below = high >= largest, low <= -largest
    if not (above or below):
        return None
    if W is None:
        return _across_all(potential, direction)
    margin = 1e-6 * (1 + float(q.abs().max()))
    parallel = (q > low + margin) & (q < high - margin)
    turned = direction
    for _ in range(3):
        turned = direction - torch.linalg.pinv(W[parallel], rtol=1e-10) @ (W[parallel] @ direction)
        across = W @ turned
        crossing = ((across > 1e-14) & above) | ((across < -1e-14) & below)
        if not bool((crossing & ~parallel).any()):
            break
        parallel |= crossing
    return turned


def _across_all(potential: Potential, direction: Tensor) -> Tensor | None:
    """Return the direction without its component along any row of `W`, or nothing if none is left.

    For operators that are not written out: conjugate gradient on `W W^T q = W d` (CGLS).
    """
    rest, step, last = direction[None], None, 1.0
    for _ in range(MAX_STEPS):
        slope = potential.apply(rest)
        size = float(slope.square().sum())
        if size <= 1e-32:
            break
        step = slope if step is None else slope + size / last * step
        image = potential.adjoint(step)
        rest, last = rest - size / float(image.square().sum()) * image, size
    length = float(row_norm(rest))
    return rest[0] / length if length > 1e-6 else None


def _distance(search: DampedNewton, direction: Tensor, largest: float) -> Tensor:
    """By how much the hyperplane across a unit direction keeps `z` away from the domain.

    Negative if it does not.
    """
    low, high = search.potential.ends(largest)
    across = search.potential.apply(direction)
    farthest = torch.maximum(low * across, high * across).sum(dim=1) / search.potential.mu
    return (search.target * direction).sum(dim=1) - farthest


def objective_value(potential: Potential, z: Tensor, tolerance: float) -> Tensor:
    """Return `phi(z) = psi*(z) - |z|^2/2`, shape (batch,); infinite outside of its domain.

    If `W^T` is injective, in closed form: `z = W^T q/mu` has one solution `q`, and
    `psi*(z) = (1/mu) (1^T S*(q) - <c, q>)`, which is OptEq's eq. 4 for the ReLU. Otherwise through
    `conjugate`. Samples whose state or input is not finite are NaN, as infinity has no place in
    either.

    Args:
        potential: The layer.
        z: Shape (batch, m), float64.
        tolerance: As for `conjugate`.
    """
    finite = (z.isfinite() & potential.adjoint(potential.c).isfinite()).all(dim=1)
    if not bool(finite.all()):
        found = torch.full_like(z[:, 0], math.nan)
        found[finite] = objective_value(potential.select_rows(finite), z[finite], tolerance)
        return found
    W = potential.matrix
    inverse = None if W is None or W.shape[0] > W.shape[1] else _right_inverse(W)
    square = z.square().sum(dim=1) / 2
    if inverse is None:
        return conjugate(potential, z, tolerance) - square
    q = potential.mu * z @ inverse
    low, high = potential.ends(math.inf)
    q = q.clamp(low, high)
    scale = row_norm(z) + row_norm(potential.prox(z)) + injected_size(potential)
    outside = row_norm(potential.adjoint(q) / potential.mu - z) > tolerance * scale
    value = (
        potential.activation.conjugate(q).sum(dim=1) - (potential.c * q).sum(dim=1)
    ) / potential.mu - square
    return torch.where(outside, math.inf, value)


def _right_inverse(W: Tensor) -> Tensor | None:
    """`W^+`, shape (m, n), if `W^T` is injective well enough."""
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    return (Vh.T / s) @ U.T if bool(s[-1] > 1e-8 * s[0]) else None


def envelope(potential: Potential, z: Tensor, t: float) -> Tensor:
    """Return the Moreau envelope `M_phi^t(z) = min_u phi(u) + |u - z|^2/(2 t)`.

    `t` is in (0, 1]; the result has shape (batch,).

    `(1 - t) M_phi^t = [(1 - t) psi + t |.|^2/2]* - |.|^2/2` (OptEq v1, proof of Theorem 2, with
    `alpha = 1 - t`); the minimiser is `u = f(y)` where `(1 - t) f(y) + t y = z`. At `t = 1` it is
    `|z|^2/2 - psi(z)`.
    """
    if t == 1:
        return potential.merit(z)
    y = invert(potential, z, t, z)
    return potential.at_step(y) + t / 2 * (potential.prox(y) - y).square().sum(dim=1)
