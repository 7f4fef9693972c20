"""What every activation promises."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import gradcheck

from equipoise.core.validate import require_type
from equipoise.prox.activation import ACTIVATIONS, Activation
from equipoise.testing.contract import (
    Report,
    require,
    require_close,
    require_copies,
    require_settings,
    run_checks,
)

__all__ = ["check_activation"]

KINKS = (0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5)


def check_activation(
    activation: str | Activation,
    points: Tensor | None = None,
    *,
    skip: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Raise `ContractError` unless an activation keeps every promise.

    Value, derivative, potential, conjugate and slopes must be those of one function, and what it
    says of its admissibility must follow from the slopes.

    Args:
        activation: An activation, or the name of a registered one.
        points: Where to look: any shape for one that acts on each entry alone, else (batch, n),
            which must then be given.
        skip: Names of checks to leave out.
        seed: Seed of what is drawn.
    """
    chosen = ACTIVATIONS.resolve(activation)
    if points is None and chosen.elementwise:
        wide = torch.logspace(-6, 1, 40, dtype=torch.float64)
        kinks = torch.tensor(KINKS, dtype=torch.float64)
        points = torch.cat([torch.linspace(-30, 30, 601, dtype=torch.float64), wide, -wide, kinks])
    require_type(
        "check_activation.points",
        points,
        Tensor,
        "a tensor of shape (batch, n) for an activation that couples entries",
    )
    assert points is not None
    case = _Case(chosen, points.double())
    return run_checks("check_activation", case.name, case, _CHECKS, skip=skip, seed=seed)


class _Case:
    def __init__(self, activation: Activation, a: Tensor) -> None:
        self.s = activation
        self.a = a
        self.name = type(activation).__name__

    def product(self, a: Tensor, y: Tensor) -> Tensor:
        """`<a, y>`, for each entry or for each sample."""
        return a * y if self.s.elementwise else (a * y).sum(dim=-1)

    def smooth(self) -> Tensor:
        """Points away from the usual kinks, few enough for finite differences."""
        if not self.s.elementwise:
            return self.a[:4]
        a = torch.linspace(-9.1, 9.3, 40, dtype=self.a.dtype)
        return a[torch.stack([(a - kink).abs() > 1e-2 for kink in KINKS]).all(dim=0)]


def _copies_equal_the_original(case: _Case) -> str | None:
    return require_copies(case.s, case.name)


def _settings_are_validated(case: _Case) -> str | None:
    return require_settings(case.s, case.name)


def _shapes_and_types_are_kept(case: _Case) -> None:
    s = case.s
    for dtype in (torch.float64, torch.float32):
        a = case.a.to(dtype)
        before = a.clone()
        size = a.shape if s.elementwise else a.shape[:-1]
        slope = a.shape if s.elementwise else (*a.shape, a.shape[-1])
        y = s(a)
        for method, value, shape in (
            ("__call__", y, a.shape),
            ("derivative", s.derivative(a), slope),
            ("potential", s.potential(a), size),
            ("conjugate", s.conjugate(y), size),
        ):
            require(
                value.shape == shape and value.dtype == dtype,
                f"{case.name}.{method}",
                f"return shape {tuple(shape)} in {dtype}",
                f"{tuple(value.shape)} in {value.dtype}",
            )
            require(
                torch.equal(a, before),
                f"{case.name}.{method}",
                "leave its argument as it was",
                "other values in it",
                "Only overwrite may do that.",
            )
    bad = torch.full_like(case.a[:1], math.nan)
    require(s(bad).isnan(), case.name, "give NaN for NaN, which must not be hidden", f"{s(bad)}")


def _derivative_is_autograds(case: _Case) -> None:
    s = case.s
    a = case.a.clone().requires_grad_()
    if s.elementwise:
        (wanted,) = torch.autograd.grad(s(a).sum(), a)
    else:
        wanted = torch.func.jacrev(lambda a: s(a).sum(dim=0))(a).movedim(1, 0).mT
    found = s.derivative(a).detach()
    where = int((found - wanted).abs().flatten().argmax())
    require_close(
        found,
        wanted,
        1e-12,
        f"{case.name}.derivative",
        f"be autograd's, also at kinks (the worst is entry {where} of the points)",
        "At a kink take the one-sided derivative that autograd takes.",
    )


def _overwrite_is_the_value(case: _Case) -> None:
    mine = case.a.clone()
    require_close(
        case.s.overwrite(mine),
        case.s(case.a),
        1e-15,
        f"{case.name}.overwrite",
        "return what the activation returns",
    )


def _potential_is_the_integral(case: _Case) -> None:
    s, a = case.s, case.a
    zero = s.potential(torch.zeros_like(a[:1]))
    require(not zero.any(), f"{case.name}.potential", "be 0 at 0", f"{zero.tolist()}")
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(12))
    # Along a ray the potential is int_0^1 <s(t a), a> dt; short pieces keep the error at kinks low.
    edges = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    t = (edges[:, None] + (nodes + 1) / 2000).flatten()
    ends = a if not s.elementwise else a.flatten()[:: max(1, a.numel() // 40)]
    total = torch.stack([case.product(ends, s(u * ends)) for u in t], dim=0)
    wanted = (total * (weights.repeat(len(edges)) / 2000).view(-1, *[1] * (total.ndim - 1))).sum(0)
    require_close(
        s.potential(ends),
        wanted,
        1e-6,
        f"{case.name}.potential",
        "be the integral of the activation from 0",
    )


def _potential_has_the_value_as_gradient(case: _Case) -> None:
    a = case.a.clone().requires_grad_()
    (found,) = torch.autograd.grad(case.s.potential(a).sum(), a)
    require_close(
        found,
        case.s(a),
        1e-12,
        f"{case.name}.potential",
        "have the activation as its gradient",
    )
    point = case.smooth().requires_grad_()
    for method in ("potential", "__call__"):
        try:
            gradcheck(getattr(case.s, method), (point,), check_forward_ad=True, fast_mode=True)
        except RuntimeError as error:
            require(
                False,
                f"{case.name}.{method}",
                "agree with finite differences in reverse and forward mode",
                " ".join(str(error).split())[:200],
            )


def _potential_is_convex(case: _Case) -> str | None:
    if not case.s.admissible:
        return "the activation is not admissible"
    a, b = case.a, case.a.flip(0)
    middle = (case.s.potential(a) + case.s.potential(b)) / 2 - case.s.potential((a + b) / 2)
    require(
        middle.min() >= -1e-10,
        f"{case.name}.potential",
        "be convex, as that of an admissible activation is",
        f"a midpoint {-float(middle.min()):.1e} above the chord",
    )
    return None


def _conjugate_is_the_supremum(case: _Case) -> None:
    s, a = case.s, case.a
    y = s(a)
    gap = s.potential(a) + s.conjugate(y) - case.product(a, y)
    unit = 1 + case.product(a, y).abs()
    worst = int((gap.abs() / unit).nan_to_num(nan=math.inf).flatten().argmax())
    require(
        (gap.abs() <= 1e-9 * unit).all(),
        f"{case.name}.conjugate",
        "meet the potential at the value, S(a) + S*(s(a)) = a s(a)",
        f"a difference of {float(gap.flatten()[worst]):.3g} at entry {worst} of the points",
        "S*(y) is the supremum of a y - S(a), and finite on the closed range of s.",
    )
    ys, others = y, [a.roll(shift, dims=0) for shift in (1, 7, 50)]
    for other in others:
        below = s.potential(other) + s.conjugate(ys) - case.product(other, ys)
        require(
            below.min() >= -1e-9 * (1 + float(other.abs().max()) ** 2),
            f"{case.name}.conjugate",
            "lie above every line, S(a) + S*(y) >= a y",
            f"{float(below.min()):.3g} less",
        )


def _conjugate_is_infinite_outside(case: _Case) -> str | None:
    if not case.s.elementwise:
        return "the range of an activation that couples entries is no interval"
    probes = torch.tensor([-2e4, -1e4, 1e4, 2e4], dtype=torch.float64)
    low_far, low, high, high_far = case.s(probes).tolist()
    bounded = {end: abs(end - far) < 1e-9 for end, far in ((low, low_far), (high, high_far))}
    tried = [
        value
        for end, is_bounded, side in ((low, bounded[low], -1), (high, bounded[high], 1))
        if is_bounded
        for value in (end + side * 1e-3, end + side * 50)
    ]
    if not tried:
        return "the range is the whole line"
    found = case.s.conjugate(torch.tensor(tried, dtype=torch.float64))
    require(
        (found == math.inf).all(),
        f"{case.name}.conjugate",
        f"be infinite outside the range of the activation, at {tried}",
        f"{found.tolist()}",
    )
    return None


def _conjugate_has_the_inverse_as_gradient(case: _Case) -> str | None:
    low, high = float(case.s(case.a).min()), float(case.s(case.a).max())
    if not case.s.elementwise:
        y = case.s(case.a).detach().requires_grad_()
    elif high - low < 1e-9:
        return "the activation is constant"
    else:
        middle, half = (low + high) / 2, min((high - low) / 2, 6.0)
        grid = torch.linspace(-0.9, 0.9, 31, dtype=torch.float64)
        y = (middle + half * grid[grid.abs() > 1e-3]).requires_grad_()
    (inverse,) = torch.autograd.grad(case.s.conjugate(y).sum(), y)
    require_close(
        case.s(inverse),
        y,
        1e-9,
        f"{case.name}.conjugate",
        "have the inverse of the activation as its gradient",
    )
    return None


def _slopes_are_the_extremes(case: _Case) -> None:
    s = case.s
    lower, upper = s.slopes
    if s.elementwise:
        far = torch.logspace(1.5, 4, 40, dtype=torch.float64)
        grid = torch.linspace(-30, 30, 6001, dtype=torch.float64)
        a = torch.cat([-far.flip(0), grid, far])
        steepness = s.derivative(a)
        secants = s(a).diff() / a.diff()
        least = min(float(steepness.min()), float(secants.min()))
        most = max(float(steepness.max()), float(secants.max()))
    else:
        J = s.derivative(case.a)
        values = torch.linalg.eigvalsh((J + J.mT) / 2)
        least, most = float(values.min()), float(values.max())
    unit = 1e-7 * max(1.0, abs(most))
    require(
        lower <= least + unit and most <= upper + unit,
        f"{case.name}.slopes",
        "bound the slope of the activation",
        f"({lower:.6g}, {upper:.6g}) where slopes go from {least:.6g} to {most:.6g}",
    )
    require(
        not s.elementwise
        or (abs(least - lower) <= 1e-2 * max(1, most) and most >= 0.99 * min(upper, 1e4)),
        f"{case.name}.slopes",
        "be the infimum and the supremum of the slope, not looser bounds",
        f"({lower:.6g}, {upper:.6g}) where slopes go from {least:.6g} to {most:.6g}",
    )


def _admissibility_follows_from_the_slopes(case: _Case) -> None:
    lower, upper = case.s.slopes
    admissible = lower >= 0 and upper < math.inf
    require(
        case.s.admissible == admissible and bool(case.s.reason) != admissible,
        f"{case.name}.admissible",
        "be True if and only if slopes lie in [0, L], with a reason if it is False",
        f"{case.s.admissible} and the reason {case.s.reason!r} for slopes {lower:g} to {upper:g}",
    )


_CHECKS: tuple[Any, ...] = (
    _copies_equal_the_original,
    _settings_are_validated,
    _shapes_and_types_are_kept,
    _derivative_is_autograds,
    _overwrite_is_the_value,
    _potential_is_the_integral,
    _potential_has_the_value_as_gradient,
    _potential_is_convex,
    _conjugate_is_the_supremum,
    _conjugate_is_infinite_outside,
    _conjugate_has_the_inverse_as_gradient,
    _slopes_are_the_extremes,
    _admissibility_follows_from_the_slopes,
)
