"""A cell under test."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from equipoise.core.tree import Layout, Shared
from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.solvers import Solver, Stop
from equipoise.testing.contract import ContractError
from equipoise.testing.trees import bare, convert, in_precision, is_inexact, leaves, rows

__all__ = ["CellCase", "cast"]


class CellCase:
    """A cell to check: copies of it, its input, context and start, all in float64."""

    def __init__(
        self, cell: Cell, x: Any, solver: str | Solver, stop: Stop, unrolled_steps: int
    ) -> None:
        self.given = cell
        self.name = type(cell).__name__
        self.cell = self.copied(torch.float64)
        self.x = cast(x, torch.float64)
        self.solver = solver
        self.stop = stop
        self.unrolled_steps = unrolled_steps
        with torch.no_grad():
            self.context = self.cell.inject(self.x)
            self.bare = bare(self.context)
            self.start = self.cell.initial(self.x, self.bare)
        self.layout = Layout(self.start, coupled=cell.coupled)

    def copied(self, dtype: torch.dtype) -> Cell:
        """Return a copy of the cell as it was given."""
        try:
            copied = copy.deepcopy(self.given)
            copied._apply(lambda tensor: in_precision(tensor, dtype))  # type: ignore[no-untyped-call]
            return copied
        except Exception as error:  # a cell may hold anything
            raise ContractError(
                self.name,
                "be copyable by copy.deepcopy",
                f"{type(error).__name__}: {error}".rstrip("."),
            ) from error

    def flat_step(self, z: Tensor) -> Tensor:
        """Return the step on matrices, one row for each sample or for a coupled batch."""
        return self.layout.pack(self.cell.step(self.layout.unpack(z), self.bare))

    def points(self) -> list[Tensor]:
        """Return some states as matrices: the start, one near it and one far away."""
        start = self.layout.pack(self.start)
        return [start + scale * torch.randn_like(start) for scale in (0.0, 0.3, 1.0)]

    def layer(self, cell: Cell, stop: Stop | None = None) -> Equilibrium:
        """Return a layer around a copy of the cell."""
        return Equilibrium(cell, self.solver, on_failure="ignore", stop=stop or self.stop)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The input's tensors that can be differentiated, and the parameters."""
        inputs = [leaf for leaf in leaves(self.x) if is_inexact(leaf)]
        return [*inputs, *self.cell.parameters()]

    def run(self, layer: Equilibrium, tensors: Sequence[Tensor], samples: int | None = None) -> Any:
        """Return the output for the first samples of the input, as a function of `tensors`."""
        count = sum(map(is_inexact, leaves(self.x)))
        inputs = iter(tensors[:count])
        x = convert(
            self.x,
            lambda leaf: next(inputs) if is_inexact(leaf) else leaf[:samples],
            lambda leaf: leaf,
        )
        names = [name for name, _ in layer.named_parameters()]
        values = dict(zip(names, tensors[count:], strict=True))
        return rows(functional_call(layer, values, (x,)))

    def leaves_for(self, samples: int | None = None) -> list[Tensor]:
        """Return fresh leaves to differentiate at."""
        count = len(self.tensors) - len(list(self.cell.parameters()))
        cut = [tensor[:samples] for tensor in self.tensors[:count]] + self.tensors[count:]
        return [tensor.detach().clone().requires_grad_() for tensor in cut]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree with its floating-point tensors in another precision, detached copies."""
    return convert(
        tree,
        lambda leaf: in_precision(leaf, dtype).detach().clone(),
        lambda leaf: Shared(in_precision(leaf.tensor, dtype).detach()),
    )
