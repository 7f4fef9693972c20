"""What a cell promises of its equilibria and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import gradcheck, gradgradcheck

from equipoise.gradients import Implicit, Unrolled
from equipoise.layers.cell import Cell
from equipoise.solvers import Stop
from equipoise.testing.cell_case import CellCase, cast
from equipoise.testing.contract import pickled, require, require_close
from equipoise.testing.trees import is_inexact, leaves

__all__ = ["EQUILIBRIUM_CHECKS"]

NUMERICAL = {"eps": 3e-5, "atol": 2e-6, "rtol": 1e-5, "fast_mode": True}


def _equilibrium_is_found(case: CellCase) -> None:
    layer = case.layer(case.cell)
    with torch.no_grad():
        layer(case.x)
    assert layer.last is not None
    require(
        layer.last.converged,
        case.name,
        f"have an equilibrium that solver {case.solver!r} finds within a relative residual of "
        f"{case.stop.tolerance:.0e}",
        f"{layer.last!r}",
        "Give another solver or stop, or weights that make the step contract.",
    )
    z = layer.last.value
    with torch.no_grad():
        again = layer.map(case.x)(z)
    require_close(again, z, 1e-9, case.name, "stay at its equilibrium")


def _gradient_is_that_of_a_long_unroll(case: CellCase) -> str | None:
    found = []
    for gradient in (Implicit(), Unrolled(case.unrolled_steps)):
        layer = case.layer(case.cell)
        layer.gradient = gradient
        tensors = case.leaves_for()
        value = case.run(layer, tensors)
        assert layer.last is not None
        if isinstance(gradient, Unrolled) and bool((layer.last.residual > 1e-9).any()):
            return f"{case.unrolled_steps} plain steps do not come to the equilibrium"
        total = value.abs().square().sum()
        found.append(torch.autograd.grad(total, tensors, allow_unused=True))
    names = [f"input {i}" for i in range(len(case.tensors))]
    parameters = [name for name, _ in case.cell.named_parameters()]
    names[len(names) - len(parameters) :] = parameters
    for name, implicit, unrolled in zip(names, *found, strict=True):
        if unrolled is None and implicit is None:
            continue
        zero = torch.zeros(())
        require_close(
            zero if implicit is None else implicit,
            zero if unrolled is None else unrolled,
            1e-6,
            case.name,
            f"have the same gradient at its equilibrium as along a long iteration, for {name}",
            "Use trainable tensors through attributes of the cell or through its context.",
        )
    return None


def _derivatives_pass_finite_differences(case: CellCase) -> None:
    for forward in (False, True):
        _numerically(
            gradcheck,
            case,
            None,
            f"{'forward' if forward else 'reverse'} mode",
            check_forward_ad=forward,
            check_backward_ad=not forward,
            **NUMERICAL,
        )


def _second_derivatives_pass_finite_differences(case: CellCase) -> None:
    samples = None if case.cell.coupled else 1
    tolerances = {**NUMERICAL, "atol": 2e-5, "rtol": 1e-3}
    _numerically(gradgradcheck, case, samples, "second derivatives", **tolerances)


def _numerically(
    check: Callable[..., bool], case: CellCase, samples: int | None, mode: str, **options: Any
) -> None:
    layer = case.layer(case.cell)
    try:
        check(
            lambda *tensors: case.run(layer, tensors, samples),
            tuple(case.leaves_for(samples)),
            **options,
        )
    except RuntimeError as error:
        sentence = " ".join(str(error).split())
        require(
            False,
            case.name,
            f"agree with finite differences at its equilibrium ({mode})",
            sentence[:300].rstrip("."),
            "Keep the step differentiable: no detach, no .data, no NumPy.",
        )


def _copies_are_the_same(case: CellCase) -> str | None:
    with torch.no_grad():
        expected = case.layer(case.cell)(case.x)
        other = pickled(case.cell, case.name)
        copies = {"its deep copy": copy.deepcopy(case.cell)}
        if isinstance(other, Cell):
            copies["its pickle"] = other
        loaded = copy.deepcopy(case.cell)
        for tensor in loaded.state_dict(keep_vars=True).values():
            if is_inexact(tensor):
                tensor.data = tensor * 0.5  # which sparse ones know too
        loaded.load_state_dict(case.cell.state_dict())
        copies["a cell with its state dict loaded"] = loaded
        for what, cell in copies.items():
            require_close(
                case.layer(cell)(case.x),
                expected,
                1e-12,
                case.name,
                f"have the same equilibria as {what}",
                "Register tensors as parameters or buffers.",
            )
    return other if isinstance(other, str) else None


def _float32_agrees(case: CellCase) -> None:
    with torch.no_grad():
        expected = case.layer(case.cell)(case.x)
    layer = case.layer(case.copied(torch.float32), Stop(tolerance=1e-5, max_steps=1000))
    found = layer(cast(case.x, torch.float32))
    require_close(
        found, expected, 1e-3, case.name, "have the same equilibria in float32 as in float64"
    )
    total = sum((leaf.abs().square().sum() for leaf in leaves(found)), start=torch.zeros(()))
    if total.requires_grad:
        torch.autograd.backward(total)
    for name, parameter in layer.cell.named_parameters():
        require(
            parameter.grad is None or parameter.grad.isfinite().all(),
            case.name,
            "have finite gradients in float32",
            f"NaN or infinity for {name}",
        )


EQUILIBRIUM_CHECKS = (
    _equilibrium_is_found,
    _gradient_is_that_of_a_long_unroll,
    _derivatives_pass_finite_differences,
    _second_derivatives_pass_finite_differences,
    _copies_are_the_same,
    _float32_agrees,
)
