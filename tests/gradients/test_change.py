"""Backward raises if the step is not the one that was solved, and says what is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Linearization

FLOAT = torch.float64
CHANGED = "^The step must read in backward what it read in forward"


class TwoScales(Cell):
    """Two states of very different size, each with a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.full((3,), 0.5, dtype=FLOAT))
        self.register_buffer("large", torch.full((3,), 0.5, dtype=FLOAT))

    def inject(self, x: Tensor) -> Tensor:
        return x

    def initial(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, z: Any, context: Tensor) -> tuple[Tensor, Tensor]:
        large, small = z
        return self.large * large + 1e6 * context.cos(), self.small * small + 1e-6 * context.sin()


@pytest.mark.parametrize("name", ["small", "large"])
def test_change_of_a_small_leaf_is_seen_beside_a_large_one(name: str) -> None:
    layer = Equilibrium(TwoScales(), tolerance=1e-8)
    x = torch.randn(4, 3, dtype=FLOAT, requires_grad=True)
    _, small = layer(x)
    getattr(layer.cell, name).mul_(1.9)
    with pytest.raises(RuntimeError, match=f"{CHANGED}.*'{name}' changed in place in between"):
        (1e6 * small).sum().backward()


@pytest.mark.parametrize("norm", ["leaf", "state", "element"])
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_unchanged_steps_pass_in_each_norm(norm: str, scale: float) -> None:
    """Also those with an equilibrium at zero, which is reached to rounding only."""
    from equipoise import Stop

    layer = Equilibrium(TwoScales(), stop=Stop(1e-6, norm=norm, max_steps=1000))  # type: ignore[arg-type]
    x = scale * torch.randn(4, 3, dtype=FLOAT)
    z0 = tuple(torch.randn(4, 3, dtype=FLOAT) for _ in range(2))
    large, small = layer(x.requires_grad_(), z0)
    (large + small).sum().backward()


class Elsewhere(Cell):
    """Reads a buffer, and an attribute of an object that no copy reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("m", torch.full((3,), 0.5, dtype=FLOAT))
        self.other = SimpleNamespace(factor=1.0)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.other.factor * self.m * z + context)


def write_to_the_buffer(cell: Elsewhere) -> None:
    cell.m.mul_(0.1)


def set_the_attribute(cell: Elsewhere) -> None:
    cell.other.factor = 0.1


@pytest.mark.parametrize("change", [write_to_the_buffer, set_the_attribute])
@pytest.mark.parametrize("transform", ["vjp", "vjp of vjp"])
def test_changes_are_seen_by_the_transforms_of_torch(change: Any, transform: str) -> None:
    layer, x = Equilibrium(Elsewhere(), tolerance=1e-8), torch.randn(4, 3, dtype=FLOAT)
    ones = torch.ones_like(x)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.vjp(layer, x)[1](ones)[0]

    _, pull = torch.func.vjp(layer if transform == "vjp" else gradient, x)
    pull(ones)
    change(layer.cell)
    with pytest.raises(RuntimeError, match=CHANGED):
        pull(ones)


class Declared(Cell):
    """`z = W z + x` with a linearisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.eye(3, dtype=FLOAT))

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z @ self.W.T + context

    def linearize(self, z: Any, context: Any) -> Linearization:
        return Linearization(z @ self.W.T + context, lambda v: v @ self.W.T, lambda v: v @ self.W)


class Overriding(Declared):
    """Inherits a linearisation that is not its own."""

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(super().step(z, context))


def hooked() -> Declared:
    cell = Declared()
    cell.register_forward_hook(lambda *found: 0.5 * found[-1])
    return cell


@pytest.mark.parametrize("make", [Overriding, hooked])
def test_linearization_of_another_step_is_called_so(make: Any) -> None:
    layer = Equilibrium(make(), "anderson")
    z = layer(torch.randn(4, 3, dtype=FLOAT))
    with pytest.raises(
        RuntimeError, match=r"^The value of linearize must be that of the step; got"
    ):
        z.sum().backward()


def test_changed_step_with_a_linearization_is_called_changed() -> None:
    layer = Equilibrium(Declared(), "anderson")
    z = layer(torch.randn(4, 3, dtype=FLOAT))
    layer.cell.W.data.mul_(-1)
    with pytest.raises(RuntimeError, match=CHANGED):
        z.sum().backward()
