"""What a gradient strategy promises that declares itself exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp

from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.testing.contract import require, require_close
from equipoise.testing.gradient_case import (
    GradientCase,
    WideCell,
    as_function,
    draw_input,
    unroll,
)

__all__ = ["EXACT_CHECKS"]

NUMERICAL = {"eps": 3e-5, "atol": 1e-7, "rtol": 1e-7}
INEXACT = "it does not declare itself exact"
ITERATE = "Give the derivative of what attach returns, or set exact = False on the strategy."


def _derivatives_pass_finite_differences(case: GradientCase) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        for forward in (False, True):
            _numerically(
                gradcheck,
                layer,
                case.name,
                f"{where} in {'forward' if forward else 'reverse'} mode",
                check_forward_ad=forward,
                check_backward_ad=not forward,
            )
    return None


def _second_derivatives_pass_finite_differences(case: GradientCase) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        _numerically(gradgradcheck, layer, case.name, f"{where}, second derivatives")
    return None


def _numerically(
    check: Callable[..., bool], layer: Equilibrium, name: str, where: str, **options: Any
) -> None:
    inputs = (draw_input(2), *layer.parameters())
    try:
        check(as_function(layer), inputs, **NUMERICAL, **options)
    except RuntimeError as error:
        sentence = " ".join(str(error).split())
        require(False, name, f"agree with finite differences on {where}", sentence[:300], ITERATE)


def _derivatives_are_those_of_a_long_unroll(case: GradientCase) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    reached = 0
    for where, layer in [*case.layers(), ("an easy cell", case.layer(WideCell(norm=0.4)))]:
        x = draw_input()
        wanted = [x, *layer.parameters()]
        z, long = layer(x), unroll(layer.cell, x)
        if not layer.last.converged.all():
            continue
        reached += 1
        g = torch.randn_like(z)
        require_close(
            torch.autograd.grad(z, wanted, g),
            torch.autograd.grad(long, wanted, g),
            1e-9,
            case.name,
            f"give the derivative of a long iteration on {where}",
            ITERATE,
        )
        if layer.last.adjoint is not None:
            require(
                layer.last.adjoint.converged,
                case.name,
                f"solve the adjoint equation of {where}",
                f"{layer.last.adjoint!r}",
            )
    return None if reached else "it reached no equilibrium to compare at"


def _transforms_are_those_of_a_long_unroll(case: GradientCase) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        x, t = torch.randn(2, 2, 2, dtype=torch.float64)
        layer(x)
        if not layer.last.converged.all():
            continue

        def slow(x: Tensor, cell: Cell = layer.cell) -> Any:
            return unroll(cell, x, 200)

        for found, expected in (
            (jvp(layer, (x,), (t,)), jvp(slow, (x,), (t,))),
            (jacrev(layer)(x), jacrev(slow)(x)),
            (jacfwd(layer)(x), jacrev(slow)(x)),
        ):
            require_close(found, expected, 1e-9, case.name, f"serve torch.func on {where}", ITERATE)
        fast, wanted = (hessian(lambda x, f=f: f(x).square().sum())(x[:1]) for f in (layer, slow))
        require_close(
            fast, wanted, 1e-8, case.name, f"give the second derivatives of {where}", ITERATE
        )
    return None


EXACT_CHECKS = (
    _derivatives_pass_finite_differences,
    _second_derivatives_pass_finite_differences,
    _derivatives_are_those_of_a_long_unroll,
    _transforms_are_those_of_a_long_unroll,
)
