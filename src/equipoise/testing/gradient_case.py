"""A gradient strategy under test, and independent ways to derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from equipoise.gradients.base import Gradient
from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.solvers import Solver, Stop
from equipoise.testing.problems import contraction
from equipoise.testing.trees import bare, convert, leaves

__all__ = ["GradientCase", "WideCell", "as_function", "draw_input", "unroll"]

STOP = Stop(tolerance=1e-13, max_steps=500)


@dataclass(frozen=True)
class GradientCase:
    """A gradient strategy to check, the cells to try it on, and the forward solver."""

    gradient: Gradient
    cells: Mapping[str, Callable[[], Cell]]
    solver: str | Solver

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.gradient).__name__

    def layer(self, cell: Cell, stop: Stop = STOP, solver: str | Solver | None = None) -> Any:
        """Return a layer around a cell."""
        chosen = self.solver if solver is None else solver
        return Equilibrium(cell, chosen, self.gradient, on_failure="ignore", stop=stop)

    def layers(self) -> Iterable[tuple[str, Any]]:
        """Return a layer around each cell, and what messages call that."""
        for name, make in self.cells.items():
            yield f"the {name!r} cell", self.layer(make())


def draw_input(samples: int = 3) -> Tensor:
    """Return a random input, a leaf to differentiate at."""
    return torch.randn(samples, 2, dtype=torch.float64, requires_grad=True)


def unroll(cell: Cell, x: Any, steps: int = 1000, damping: float = 1.0) -> Any:
    """Return the equilibrium by plain iteration, recorded from the start.

    Args:
        cell: The cell.
        x: Its input.
        steps: Steps.
        damping: Fraction of the new value in each of them.
    """
    context = bare(cell.inject(x))
    z = cell.initial(x, context)
    for _ in range(steps):
        new = cell.step(z, context)
        z = new if damping == 1 else _mix(z, new, damping)
    return cell.readout(z, context)


def _mix(old: Any, new: Any, damping: float) -> Any:
    fresh = iter(leaves(new))
    return convert(old, lambda leaf: leaf + damping * (next(fresh) - leaf), lambda leaf: leaf)


def as_function(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a module as a function of its input and its parameters, in their order."""
    names = [name for name, _ in module.named_parameters()]

    def function(x: Any, *tensors: Tensor) -> Any:
        return functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

    return function


class WideCell(Cell):
    """A contraction of width 8, whose adjoint no solver finishes in one step."""

    symmetric = True

    def __init__(self, norm: float = 0.7) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(contraction(12, 8, norm=norm))
        self.U = torch.nn.Parameter(torch.randn(12, 2, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return context.new_zeros(len(context), 8)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.nn.functional.softplus(z @ self.W.T + context) @ self.W

    def equilibrium(self, x: Tensor) -> Tensor:
        """Return the equilibrium, by plain iteration."""
        found: Tensor = unroll(self, x.detach())
        return found.detach()
