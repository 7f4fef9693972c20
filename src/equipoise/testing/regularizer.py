"""What every regulariser promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from equipoise.prox.regularizer import REGULARIZERS, Regularizer
from equipoise.testing.contract import (
    ContractError,
    Report,
    distance,
    require,
    require_close,
    require_copies,
    require_settings,
    run_checks,
)

__all__ = ["check_regularizer"]

SHAPES = ((4, 3), (2, 3, 4, 3))
GAMMAS = (0.05, 0.4, 3.0)


def check_regularizer(
    regularizer: str | Regularizer,
    shapes: Sequence[Sequence[int]] | None = None,
    *,
    skip: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Raise `ContractError` unless a regulariser keeps every promise.

    Value, gradient, proximal map, envelope and constants must be those of one function.

    Args:
        regularizer: A regulariser, or the name of a registered one.
        shapes: Shapes of states to try, at least two samples each; by default vectors and images,
            of which it may refuse one with a `ValueError`.
        skip: Names of checks to leave out.
        seed: Seed of the states.
    """
    chosen = REGULARIZERS.resolve(regularizer)
    name = type(chosen).__name__
    fitting = [tuple(shape) for shape in shapes or SHAPES if shapes or _takes(chosen, shape)]
    if not fitting:
        raise ContractError(
            name, "take states of some shape", "a ValueError for vectors and images", "Give shapes."
        )
    case = _Case(chosen, name, fitting)
    return run_checks("check_regularizer", name, case, _CHECKS, skip=skip, seed=seed)


def _takes(regularizer: Regularizer, shape: Sequence[int]) -> bool:
    try:
        regularizer.value(torch.ones(*shape, dtype=torch.float64))
    except ValueError:
        return False
    return True


class _Case:
    def __init__(
        self, regularizer: Regularizer, name: str, shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.R = regularizer
        self.name = name
        self.shapes = shapes

    def states(self, samples: int | None = None, scale: float = 1.0) -> Iterator[Tensor]:
        for shape in self.shapes:
            yield scale * torch.randn(samples or shape[0], *shape[1:], dtype=torch.float64)

    def total(self, u: Tensor, z: Tensor, gamma: float) -> Tensor:
        """What the proximal map minimises, for each sample or for the batch."""
        apart = (u - z).square() / 2
        size = apart.sum() if self.R.coupled else apart.flatten(1).sum(dim=1)
        return size + gamma * self.R.value(u)


def _copies_equal_the_original(case: _Case) -> str | None:
    return require_copies(case.R, case.name)


def _settings_are_validated(case: _Case) -> str | None:
    return require_settings(case.R, case.name)


def _shapes_and_types_are_kept(case: _Case) -> None:
    R = case.R
    for state in case.states():
        for dtype in (torch.float64, torch.float32):
            z = state.to(dtype)
            before = z.clone()
            size = () if R.coupled else (len(z),)
            made = [("value", R.value(z), size), ("gradient", R.gradient(z), tuple(z.shape))]
            if R.has_prox:
                made.append(("prox", R.prox(z, 0.3), tuple(z.shape)))
                made.append(("envelope", R.envelope(z, 0.3), size))
            for method, value, shape in made:
                require(
                    tuple(value.shape) == shape and value.dtype == dtype,
                    f"{case.name}.{method}",
                    f"return shape {shape} in {dtype} for a state of shape {tuple(z.shape)}",
                    f"{tuple(value.shape)} in {value.dtype}",
                    "Return one number for each sample, or one for the batch if coupled is True.",
                )
            require(
                torch.equal(z, before), case.name, "leave its state as it was", "other values in it"
            )


def _samples_are_independent(case: _Case) -> str | None:
    if case.R.coupled:
        return "it declares that it ties samples together"
    for z in case.states():
        order = torch.arange(len(z)).flip(0)
        for index in (slice(1, 2), order):
            for method in (case.R.value, case.R.gradient):
                require_close(
                    method(z[index]),
                    method(z)[index],
                    1e-10,
                    f"{case.name}.{method.__name__}",
                    "treat each sample for itself",
                    "Set coupled = True, and return one number for the whole batch.",
                )
    return None


def _gradient_is_that_of_the_value(case: _Case) -> None:
    R = case.R
    for state in case.states():
        z = state.requires_grad_()
        (automatic,) = torch.autograd.grad(R.value(z).sum(), z)
        require_close(
            R.gradient(z),
            automatic,
            1e-9,
            f"{case.name}.gradient",
            "be autograd's gradient of the value",
        )
        _numerically(case, "value", gradcheck, R.value, z)
        if R.gradient(z).requires_grad:  # a sign has no history
            _numerically(case, "gradient", gradcheck, R.gradient, z)
            _numerically(case, "value", gradgradcheck, R.value, z)
        with torch.no_grad():
            quiet = R.gradient(z)
        loud = R.gradient(z.detach())
        require(
            not loud.requires_grad and distance(quiet, loud) < 1e-10,
            f"{case.name}.gradient",
            "be the same without recording, and leave no history where the state has none",
            "a history" if loud.requires_grad else f"a difference of {distance(quiet, loud):.1e}",
        )


def _numerically(
    case: _Case,
    method: str,
    check: Callable[..., bool],
    function: Callable[[Tensor], Tensor],
    z: Tensor,
) -> None:
    try:
        check(function, (z,), fast_mode=True)
    except RuntimeError as error:
        require(
            False,
            f"{case.name}.{method}",
            f"pass {check.__name__}, that is agree with finite differences",
            " ".join(str(error).split())[:200].rstrip("."),
        )


def _transforms_work(case: _Case) -> None:
    R = case.R
    for z in case.states():
        stack = torch.stack([z, 2 * z, z.flip(0)])
        one_by_one = torch.stack([R.gradient(member) for member in stack])
        v = torch.randn_like(z)
        pushed = torch.func.jvp(lambda z: R.value(z).sum(), (z,), (v,))[1]
        for found, expected in (
            (torch.func.vmap(R.gradient)(stack), one_by_one),
            (torch.func.grad(lambda z: R.value(z).sum())(z), one_by_one[0]),
            (pushed, (v * one_by_one[0]).sum()),
        ):
            require_close(found, expected, 1e-8, case.name, "serve torch.func: vmap, grad and jvp")


def _zero_is_no_special_point(case: _Case) -> None:
    for state in case.states():
        z = torch.zeros_like(state, requires_grad=True)
        slope = case.R.gradient(z)
        second = slope
        if slope.requires_grad:
            (second,) = torch.autograd.grad(slope, z, state)
        require(
            slope.isfinite().all() and second.isfinite().all(),
            f"{case.name}.gradient",
            "be finite at zero, where solves start, and so must its derivative",
            "NaN or infinity",
        )


def _nan_is_never_hidden(case: _Case) -> None:
    R = case.R
    for z in case.states():
        clean = R.gradient(z)
        bad = z.clone()
        bad[(1,) + (0,) * (z.ndim - 1)] = math.nan
        made = {"value": R.value(bad), "gradient": R.gradient(bad)}
        if R.has_prox:
            made["prox"] = R.prox(bad, 0.3)
        for method, value in made.items():
            where = value if R.coupled else value[1]
            require(
                where.isnan().any(),
                f"{case.name}.{method}",
                "pass NaN on",
                "numbers without NaN",
                "Beware of sign, clamp and maximum, which hide it.",
            )
        if not R.coupled:
            require_close(
                made["gradient"][0], clean[0], 1e-10, case.name, "keep NaN to its own sample"
            )


def _declared_lipschitz_constant_holds(case: _Case) -> str | None:
    R, bound = case.R, case.R.lipschitz
    if bound is None:
        return "it declares none"
    largest = 0.0
    for scale in (1e-3, 0.3, 1.0, 10.0):
        for apart in (1e-6, 0.1, 10.0):
            for a in case.states(100, scale):
                b = a + apart * scale * torch.randn_like(a)
                at_a, at_b, first = R.gradient(a), R.gradient(b), 0 if R.coupled else 1
                change, step, size = (
                    value.flatten(first).norm(dim=first)
                    for value in (at_a - at_b, a - b, at_a.abs() + at_b.abs())
                )
                # Between near points most of a small difference may be rounding.
                rounding = 16 * torch.finfo(a.dtype).eps * size
                largest = max(largest, float(((change - rounding) / step).max()))
    require(
        largest <= bound * (1 + 1e-7),
        f"{case.name}.lipschitz",
        "bound the Lipschitz constant of the gradient from above",
        f"{bound:.6g} where the gradient changes by {largest:.6g} times the step",
        "Return a proven bound, or None.",
    )
    return None


def _declared_convexity_holds(case: _Case) -> str | None:
    R = case.R
    if not R.convex:
        return "it does not declare itself convex"
    for scale in (0.1, 1.0, 5.0):
        for a in case.states(100, scale):
            b = scale * torch.randn_like(a)
            above = R.value((a + b) / 2) - (R.value(a) + R.value(b)) / 2
            slope = ((R.gradient(a) - R.gradient(b)) * (a - b)).flatten(1).sum(dim=1)
            require(
                above.max() <= 1e-10 * max(1, scale) and slope.sum() >= -1e-10,
                f"{case.name}.convex",
                "be True only for a convex function",
                f"a midpoint {float(above.max()):.2g} above the chord",
            )
    return None


def _prox_is_the_minimiser(case: _Case) -> str | None:
    R = case.R
    if not R.has_prox:
        for z in case.states():
            try:
                R.prox(z, 0.3)
            except ValueError:
                continue
            require(False, f"{case.name}.prox", "refuse, since has_prox is False", "a value")
        return "it declares none"
    for gamma in GAMMAS:
        for z in case.states():
            u = R.prox(z, gamma)
            reached = case.total(u, z, gamma)
            slope = u - z + gamma * R.gradient(u)
            trials = [z, torch.zeros_like(z)]
            trials += [u - size * slope for size in (1e-3, 1e-2, 0.1, 1.0)]
            trials += [
                u + size * torch.randn_like(u) for size in (1e-4, 1e-2, 0.1, 1.0) for _ in range(5)
            ]
            gain = max(float((reached - case.total(v, z, gamma)).max()) for v in trials)
            require(
                gain <= 1e-10 * max(1.0, float(reached.abs().max())),
                f"{case.name}.prox",
                f"minimise |u - z|^2/2 + gamma R(u) for gamma = {gamma}",
                f"a point that another one beats by {gain:.2g}",
            )
    for gamma in (0.0, -1.0, math.nan):
        try:
            R.prox(next(case.states()), gamma)
        except ValueError:
            continue
        require(False, f"{case.name}.prox", "refuse a gamma that is not positive", f"{gamma}")
    return None


def _prox_is_firmly_nonexpansive(case: _Case) -> str | None:
    R = case.R
    if not (R.has_prox and R.convex):
        return "it has no proximal map of a convex function"
    for gamma in GAMMAS:
        for a in case.states(100, 2.0):
            b = 2 * torch.randn_like(a)
            moved = R.prox(a, gamma) - R.prox(b, gamma)
            excess = (moved.square() - moved * (a - b)).flatten(1).sum(dim=1)
            require(
                excess.max() <= 1e-10,
                f"{case.name}.prox",
                "be firmly nonexpansive, as that of a convex function is",
                f"an excess of {float(excess.max()):.2g}",
            )
    return None


def _envelope_is_the_minimum(case: _Case) -> str | None:
    R = case.R
    if not R.has_prox:
        return "it has no proximal map"
    for gamma in GAMMAS:
        for state in case.states():
            z = state.requires_grad_()
            u, value = R.prox(z, gamma), R.envelope(z, gamma)
            require_close(
                value,
                case.total(u, z, gamma),
                1e-10,
                f"{case.name}.envelope",
                "be the value that the proximal map reaches",
            )
            (slope,) = torch.autograd.grad(value.sum(), z)
            require_close(
                slope, z - u, 1e-9, f"{case.name}.envelope", "have the gradient z - prox(z)"
            )
            _numerically(case, "prox", gradcheck, partial(R.prox, gamma=gamma), z)
            _numerically(case, "envelope", gradcheck, partial(R.envelope, gamma=gamma), z)
    return None


_CHECKS: tuple[Any, ...] = (
    _copies_equal_the_original,
    _settings_are_validated,
    _shapes_and_types_are_kept,
    _samples_are_independent,
    _gradient_is_that_of_the_value,
    _transforms_work,
    _zero_is_no_special_point,
    _nan_is_never_hidden,
    _declared_lipschitz_constant_holds,
    _declared_convexity_holds,
    _prox_is_the_minimiser,
    _prox_is_firmly_nonexpansive,
    _envelope_is_the_minimum,
)
