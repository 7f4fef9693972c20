"""Small cells of every kind, on which gradient strategies are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.tree import Shared
from equipoise.layers.cell import Cell
from equipoise.solvers.problem import Linearization
from equipoise.testing.problems import contraction

__all__ = [
    "CELLS",
    "EasyCell",
    "MaskCell",
    "SmoothCell",
    "SymmetricCell",
    "SymmetricMaskCell",
    "TreeCell",
]


class SmoothCell(Cell):
    """`z = tanh(W z + U x + b)`."""

    def __init__(self, inputs: int = 2, width: int = 3, norm: float = 0.7) -> None:
        super().__init__()
        self.W = nn.Parameter(contraction(width, width, norm=norm))
        self.U = nn.Parameter(torch.randn(width, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T + self.b

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return (z @ self.W.T + context).tanh()


class EasyCell(SmoothCell):
    """A cell that declares a small Lipschitz bound: `auto` takes plain iteration and Neumann."""

    def __init__(self) -> None:
        super().__init__(norm=0.25)

    def lipschitz(self) -> Tensor:
        norm: Tensor = torch.linalg.matrix_norm(self.W, 2)
        return norm


class MaskCell(SmoothCell):
    """`z = relu(W z + U x + b)` with its own linearisation, which keeps the mask."""

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return (z @ self.W.T + context).relu()

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        u = z @ self.W.T + context
        return self._masked(u.relu(), (u > 0).to(u.dtype))

    def _masked(self, value: Tensor, mask: Tensor) -> Linearization:
        return Linearization(
            value=value,
            jvp=lambda v: mask * (v @ self.W.T),
            vjp=lambda v: (mask * v) @ self.W,
            select_rows=lambda index: self._masked(value[index], mask[index]),
        )


class SymmetricCell(Cell):
    """`z = W^T softplus(W z + U x + b)`, whose Jacobian is symmetric positive semidefinite."""

    symmetric = True

    def __init__(self, inputs: int = 2, width: int = 3, hidden: int = 4) -> None:
        super().__init__()
        self.W = nn.Parameter(contraction(hidden, width, norm=0.7))
        self.U = nn.Parameter(torch.randn(hidden, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(hidden, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T + self.b

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return context.new_zeros(context.shape[0], self.W.shape[1])

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return nn.functional.softplus(z @ self.W.T + context) @ self.W


class SymmetricMaskCell(SymmetricCell):
    """The same with its own linearisation."""

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        u = z @ self.W.T + context
        return self._sloped(nn.functional.softplus(u) @ self.W, u.sigmoid())

    def _sloped(self, value: Tensor, slope: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            return (slope * (v @ self.W.T)) @ self.W

        return Linearization(
            value,
            product,
            product,
            select_rows=lambda index: self._sloped(value[index], slope[index]),
        )


class TreeCell(Cell):
    """A state of shapes (batch, 2) and (batch, 1, 2), and a shared context tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(contraction(2, 2, norm=0.8))
        self.B = nn.Parameter(contraction(2, 2, norm=0.8))
        self.U = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def inject(self, x: Tensor) -> tuple[Tensor, Shared]:
        return x @ self.U.T, Shared(0.9 * self.A)

    def initial(self, x: Tensor, context: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(context[0]), torch.zeros_like(context[0])[:, None]

    def step(
        self, z: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        first, second = z
        u, A = context
        return (second[:, 0] @ A.T + u).tanh(), (first @ self.B.T - u).sigmoid()[:, None]

    def readout(self, z: tuple[Tensor, Tensor], context: Any) -> Tensor:
        return torch.cat([z[0], z[1][:, 0]], dim=1)


CELLS: dict[str, Callable[[], Cell]] = {
    "easy": EasyCell,
    "mask": MaskCell,
    "smooth": SmoothCell,
    "symmetric": SymmetricCell,
    "symmetric_mask": SymmetricMaskCell,
    "tree": TreeCell,
}
"""The cells by name, each in float64 with random weights and inputs of two numbers."""
