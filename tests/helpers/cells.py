"""Small cells and independent ways to their equilibria and derivatives, for the tests of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise import Cell


def bounded(rows: int, columns: int, norm: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random matrix of the given spectral norm."""
    matrix = torch.randn(rows, columns, dtype=dtype)
    return norm * matrix / torch.linalg.matrix_norm(matrix, 2)


class TanhCell(Cell):
    """`z = tanh(W z + U x + b)`, a contraction with constant `norm`."""

    def __init__(
        self, width: int = 4, inputs: int = 3, norm: float = 0.5, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.W = nn.Parameter(bounded(width, width, norm, dtype))
        self.U = nn.Linear(inputs, width, dtype=dtype)

    def inject(self, x: Tensor) -> Tensor:
        return self.U(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + context)


class AffineCell(Cell):
    """`z = A z + x`, whose equilibrium is `(I - A)^-1 x`."""

    def __init__(self, A: Tensor, *, symmetric: bool = False) -> None:
        super().__init__()
        self.A = nn.Parameter(A)
        self.symmetric = symmetric

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z @ self.A.T + context

    def exact(self, x: Tensor) -> Tensor:
        eye = torch.eye(len(self.A), dtype=self.A.dtype)
        return torch.linalg.solve(eye - self.A, x.mT).mT


class ScaledCell(Cell):
    """`z = rate z + x`, the rate in the input's last column; counts the rows that it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def inject(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :-1], x[:, -1:]

    def initial(self, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        self.rows += len(z)
        return context[1] * z + context[0]


class GrowingCell(Cell):
    """`z = x z^2 + 1/10`: a small equilibrium for small inputs, overflow for large ones."""

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return context * z * z + 0.1


class CoupledCell(TanhCell):
    """A cell whose samples see the mean of the batch."""

    coupled = True

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + context + 0.3 * z.mean(dim=0, keepdim=True))


def unroll(cell: Cell, x: Tensor, steps: int = 200) -> Tensor:
    """The equilibrium by many plain steps that autograd records, to differentiate through them."""
    context = cell.inject(x)
    z = cell.initial(x, context)
    for _ in range(steps):
        z = cell.step(z, context)
    return z
