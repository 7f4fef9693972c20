"""Compiled cells: each stays compiled, so do its copies, and derivatives are right."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cells import TanhCell, unroll
from torch import Tensor, nn

from equipoise import Equilibrium, Skip

FLOAT = torch.float64

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=FLOAT, requires_grad=True)


class WatchedCell(TanhCell):
    """Refuses to solve outside of compiled code; derivatives are taken of the step as it is."""

    number = 0

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        if not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            raise AssertionError
        return super().step(z, context) + 0 * self.number


class ChildCell(TanhCell):
    """Has a child to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4, dtype=FLOAT), nn.Tanh())

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.inner(z) + 0.5 * z @ self.W.T + context)


def compile_cell(cell: ChildCell, backend: Any) -> None:
    cell.compile(backend=backend)


def compile_step(cell: ChildCell, backend: Any) -> None:
    cell.step = torch.compile(cell.step, backend=backend)


def compile_child(cell: ChildCell, backend: Any) -> None:
    cell.inner = torch.compile(cell.inner, backend=backend)


def compile_child_in_place(cell: ChildCell, backend: Any) -> None:
    cell.inner.compile(backend=backend)


WAYS = [compile_cell, compile_step, compile_child, compile_child_in_place]


def test_many_compiled_cells_all_stay_compiled(x: Tensor) -> None:
    """The compiler allows 8 graphs for one piece of code, which cells used to share."""
    for number in range(12):
        cell = WatchedCell() if number % 2 else WatchedCell(width=4 + number)
        cell.number = number  # something to recompile for
        layer = Equilibrium(cell, tolerance=1e-10)
        layer.cell.compile(backend="eager")
        found = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
        wanted = torch.autograd.grad(unroll(layer.cell, x).sum(), [x, *layer.parameters()])
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def test_compiled_cell_stays_compiled_through_modes_and_batch_sizes() -> None:
    layer = Equilibrium(WatchedCell(), tolerance=1e-10)
    layer.cell.compile(backend="eager")
    for mode in (True, False, True):
        layer.train(mode)
        for size in (5, 1, 3, 8, 2):
            layer(torch.randn(size, 3, dtype=FLOAT)).sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_derivatives_of_compiled_cells_are_right(
    way: Callable[[ChildCell, Any], None], solver: str, x: Tensor
) -> None:
    layer = Equilibrium(ChildCell(), solver, tolerance=1e-12)
    inputs = [x, *layer.parameters()]
    exact = unroll(layer.cell, x)
    first = torch.autograd.grad(exact.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    way(layer.cell, "aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = layer(x)
        found = torch.autograd.grad(z.square().sum(), inputs, retain_graph=True)
        again = torch.autograd.grad(z.square().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(sum(g.square().sum() for g in again), inputs)
    torch.testing.assert_close(z, exact, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found, first, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(again, first, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(twice, second, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_cells_use_the_weights_that_they_are_given(
    way: Callable[[ChildCell, Any], None], x: Tensor
) -> None:
    """A copy of a compiled cell must not call the weights of the original."""
    layer, other = (Equilibrium(ChildCell(), tolerance=1e-12) for _ in range(2))
    wanted = other(x)
    names = [name for name, _ in layer.named_parameters()]
    way(layer.cell, "eager")
    compiled = [name for name, _ in layer.named_parameters()]
    given = dict(other.named_parameters())
    weights = {new: given[old].detach() for new, old in zip(compiled, names, strict=True)}
    found = torch.func.functional_call(layer, weights, (x,))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def test_compiled_cell_is_copied_and_pickled_uncompiled(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    layer.cell.compile(backend="eager")
    z = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.cell.compiled_step is None
        torch.testing.assert_close(twin(x), z)


def test_wrapped_cell_is_compiled_with_its_wrapper(x: Tensor) -> None:
    wanted = Equilibrium(Skip(cell := WatchedCell(), 0.5), "fixed_point", tolerance=1e-10)
    wanted.cell.compile(backend="eager")
    z = wanted(x)
    torch.testing.assert_close(cell.step(z, cell.inject(x)), z, rtol=1e-8, atol=1e-9)


def test_hooks_of_a_compiled_cell_run(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), "fixed_point", tolerance=1e-10)
    layer.cell.register_forward_hook(lambda *args: 0.5 * args[2])
    wanted = layer(x)
    layer.cell.compile(backend="eager")
    torch.testing.assert_close(layer(x), wanted)
