"""Whether a map is the proximal map of a convex function: a search for counter-examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.validate import require_count, require_positive

__all__ = ["ProxReport", "is_proximal"]

_HALVINGS = 8
"""Halvings of a segment: many enough to find a jump, few enough for rounding in float32."""


@dataclass(frozen=True)
class ProxReport:
    """What a search for counter-examples found; true if it found none.

    Attributes:
        proximal: Whether no counter-example was found.
        reason: One sentence: what fails and by how much, or how much was searched.
        counterexample: A point where the Jacobian breaks a condition, shape (n,), or the two ends
            of a segment along which the map does, shape (2, n); `None` without one.
        asymmetry: Largest `|J - J^T|`.
        smallest_eigenvalue: Smallest eigenvalue of `(J + J^T)/2`, or smallest
            `<b - a, f(b) - f(a)> / |b - a|^2`.
        norm: Largest `|J|`, or largest `|f(b) - f(a)| / |b - a|`.
    """

    proximal: bool
    reason: str
    counterexample: Tensor | None
    asymmetry: float
    smallest_eigenvalue: float
    norm: float

    def __bool__(self) -> bool:
        return self.proximal


def is_proximal(
    function: Callable[[Tensor], Tensor],
    points: Tensor | int,
    *,
    inverse: Callable[[Tensor], Tensor] | None = None,
    samples: int = 64,
    scale: float = 2.0,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
) -> ProxReport:
    """Search for a point that shows that `f` is no proximal map of a convex function.

    OptEq v1, Lemmas 5 and 6.

    `f = prox_phi` for a convex `phi` if and only if `f` is nonexpansive and the gradient of a
    convex function (Lemma 5). For a locally Lipschitz map that is: its Jacobian is symmetric,
    positive semidefinite and of norm at most 1 wherever it exists. The Jacobian is computed at
    every point. Between neighbouring points the map itself is followed into the half of the segment
    where it is steepest, and into the half where it rises least, which finds jumps that no Jacobian
    shows.

    **A counter-example refutes** (up to `tolerance`). **Finding none is evidence, not a proof**:
    the conditions were seen to hold at finitely many points.

    Lemma 6 is about maps `f(z) = argmin_u |u|^2/2 - <u, A(z)> + phi(u)`: then `f o A^-1` must be a
    proximal map. Give `inverse` for that. The lemma as printed asks that `f` be nonexpansive, which
    is not enough: `f(z) = z` and `A(z) = z/2` satisfy it, but need `phi(u) = -|u|^2/4`. What its
    proof uses is that `f o A^-1` is nonexpansive, and this is checked here. The two agree if `A` is
    an isometry, such as the permutation of Theorem 2.

    Args:
        function: `z -> f(z)` on a batch of rows that do not see each other; every row may be a map
            of its own (`layer.map(x)`).
        points: Where to look, shape (batch, n), or the dimension `n`, to draw `samples` points from
            `N(0, scale^2)`.
        inverse: `A^-1` on a batch of rows. The points and the counter-example are then arguments of
            `f o A^-1`.
        samples: Points to draw, if `points` is a dimension.
        scale: Standard deviation of the points drawn.
        tolerance: Violation to put down to rounding; by default the square root of the machine
            epsilon.
        generator: Source of randomness.
    """
    at = _points(points, samples, scale, generator)
    tolerance = math.sqrt(torch.finfo(at.dtype).eps) if tolerance is None else tolerance
    require_positive("is_proximal.tolerance", tolerance, or_zero=True)

    def f(z: Tensor) -> Tensor:
        value = function(z if inverse is None else inverse(z))
        if value.shape != at.shape:
            raise ValueError(
                f"is_proximal.function must keep the shape {tuple(at.shape)}; got "
                f"{tuple(value.shape)}."
            )
        return value

    value = f(at).detach()
    jacobian = (
        torch.func.jacrev(lambda z: f(z).sum(dim=0))(at).detach().movedim(1, 0)
    )  # (batch, n, n)
    finite = value.isfinite().all(dim=1) & jacobian.isfinite().all(dim=2).all(dim=1)
    if not bool(finite.all()):
        where = at[int(finite.int().argmin())]
        return ProxReport(
            False,
            "f or its Jacobian is not finite at the counter-example.",
            where,
            math.nan,
            math.nan,
            math.nan,
        )
    skew = torch.linalg.matrix_norm(jacobian - jacobian.mT, ord=2)
    lowest = torch.linalg.eigvalsh((jacobian + jacobian.mT) / 2)[:, 0]
    norms = torch.linalg.matrix_norm(jacobian, ord=2)
    steep, steepest = _follow(f, at, lambda step, rise: rise.norm(dim=1) / step.norm(dim=1))
    falling, fall = _follow(
        f, at, lambda step, rise: -(step * rise).sum(dim=1) / step.square().sum(dim=1)
    )

    asymmetry, smallest, norm = (
        float(skew.max()),
        min(float(lowest.min()), -fall),
        max(float(norms.max()), steepest),
    )
    counterexample: Tensor | None = None
    if asymmetry > tolerance:
        counterexample = at[int(skew.argmax())]
        reason = (
            f"The Jacobian is not symmetric (|J - J^T| = {asymmetry:.3g}), so f is not a gradient."
        )
    elif smallest < -tolerance:
        counterexample = falling if -fall <= smallest else at[int(lowest.argmin())]
        reason = (
            f"f falls (slope {smallest:.3g} in some direction), so it is not the "
            "gradient of a convex function."
        )
    elif norm > 1 + tolerance:
        counterexample = steep if steepest >= norm else at[int(norms.argmax())]
        reason = f"f is expansive (by a factor of {norm:.6g})."
    else:
        reason = (
            f"No counter-example at {len(at)} points and on the segments between them: "
            "evidence, not a proof."
        )
    return ProxReport(counterexample is None, reason, counterexample, asymmetry, smallest, norm)


def _points(
    points: Tensor | int, samples: int, scale: float, generator: torch.Generator | None
) -> Tensor:
    if isinstance(points, Tensor):
        if points.ndim != 2 or not points.numel() or not points.is_floating_point():
            raise ValueError(
                "is_proximal.points must be a floating-point tensor of shape (batch, n) or a "
                "dimension; got "
                f"{points.dtype} of shape {tuple(points.shape)}."
            )
        return points.detach()
    require_count("is_proximal.points", points)
    require_count("is_proximal.samples", samples)
    require_positive("is_proximal.scale", scale)
    return scale * torch.randn(samples, points, generator=generator)


def _follow(
    f: Callable[[Tensor], Tensor], at: Tensor, score: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor | None, float]:
    """Halve the segment from each point to the next, keeping the half of higher score.

    Returns the best segment and its score.

    Both scores used here are such that the better half scores at least as much as the whole.
    """
    low, high = at, at.roll(1, dims=0)
    best, ends = -math.inf, None
    with torch.no_grad():
        at_low, at_high = f(low), f(high)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            at_middle = f(middle)
            first, second = (
                score(middle - low, at_middle - at_low),
                score(high - middle, at_high - at_middle),
            )
            keep = (first >= second)[:, None]
            low, at_low = torch.where(keep, low, middle), torch.where(keep, at_low, at_middle)
            high, at_high = torch.where(keep, middle, high), torch.where(keep, at_middle, at_high)
            scores = torch.maximum(first, second).nan_to_num(
                nan=-math.inf
            )  # coinciding points have no slope
            if float(scores.max()) > best:
                best, row = float(scores.max()), int(scores.argmax())
                ends = torch.stack([low[row], high[row]])
    return ends, best
