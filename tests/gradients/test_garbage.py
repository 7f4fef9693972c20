"""Solves leave no tensors behind for the garbage collector."""

import gc
from collections.abc import Callable

import pytest
import torch
from cells import TanhCell
from torch import Tensor

from equipoise import Equilibrium


def first(layer: Equilibrium, x: Tensor) -> None:
    torch.autograd.grad(layer(x).sum(), x)


def second(layer: Equilibrium, x: Tensor) -> None:
    (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    torch.autograd.grad(g.square().sum(), x)


def forward_mode(layer: Equilibrium, x: Tensor) -> None:
    torch.func.jvp(layer, (x.detach(),), (torch.ones_like(x),))


@pytest.mark.parametrize("differentiate", [first, second, forward_mode])
def test_derivatives_leave_no_tensors_in_reference_cycles(
    differentiate: Callable[[Equilibrium, Tensor], None],
) -> None:
    """Such tensors hold their memory until the collector runs."""
    layer = Equilibrium(TanhCell())
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    differentiate(layer, x)
    while gc.collect():  # what other tests left may take several rounds
        pass
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        differentiate(layer, x)
        gc.collect()
        left = [type(thing).__name__ for thing in gc.garbage if isinstance(thing, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
