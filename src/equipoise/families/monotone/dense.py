"""Matrices `W` with `I - W` strongly monotone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.validate import require_count
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.resolvent import invert
from equipoise.operators import dense_norm
from equipoise.operators.operator import OperatorWeights

__all__ = ["MonotoneMatrix"]


class MonotoneMatrix(MonotoneOperator):
    """`W = (1 - m) I - A^T A + B - B^T`, a matrix (Winston & Kolter, 2020, eq. 6).

    Args:
        features: Length of the state.
        margin: `m`.

    Shape:
        (batch, features) to (batch, features).
    """

    def __init__(self, features: int, margin: float = 1.0) -> None:
        super().__init__(margin)
        require_count("MonotoneMatrix.features", features)
        self.A = nn.Parameter(torch.empty(features, features))
        self.B = nn.Parameter(torch.empty(features, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniform weights, as the authors' code does by torch's default for linear maps."""
        for weight in (self.A, self.B):
            edge = 1 / math.sqrt(len(weight))
            nn.init.uniform_(weight, -edge, edge)

    def weights(self) -> OperatorWeights:
        whole: Tensor = _Gram.apply(self.A, self.B)  # type: ignore[no-untyped-call]
        return (_shifted(whole, 1 - self.margin),)

    def combined(self, weights: OperatorWeights, p: float, q: float) -> OperatorWeights:
        return (_shifted(q * weights[0], p),)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return (weights[0].T,)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return z @ weights[0].T

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, z, weights[0].T)

    def pull(self, weights: OperatorWeights, z: Tensor, v: Tensor) -> OperatorWeights:
        return (v.T @ z,)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return dense_norm(weights[0])

    def blocks(self, weights: OperatorWeights) -> Sequence[Tensor]:
        return [weights[0][:, :, None, None]]

    def factor(self, weights: OperatorWeights, a: float, c: Tensor) -> OperatorWeights:
        (matrix,) = self.combined(weights, 1 + a, -a)
        return (invert(matrix),)

    def resolve_with(self, factors: OperatorWeights, b: Tensor, *, transpose: bool) -> Tensor:
        (inverse,) = factors
        return b @ (inverse if transpose else inverse.T)

    def reflect_with(self, factors: OperatorWeights, b: Tensor, r: Tensor) -> Tensor:
        return torch.addmm(r, b, factors[0].T, beta=-1, alpha=2)

    @torch.no_grad()
    def gap_matrix(self) -> Tensor:
        (W,) = self.weights()
        return torch.eye(len(W), dtype=torch.float64, device=W.device) - W.double()

    def state_shape(self, x: Tensor, *, enlarged: bool) -> tuple[int, ...]:
        return (len(self.A),)

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 2:
            raise ValueError(f"The input must have shape (batch, features); got {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{len(self.A)}, margin={self.margin:g}"


class _Gram(torch.autograd.Function):
    """`B - B^T - A^T A`, whose gradient in `A` is one product, not two."""

    generate_vmap_rule = True

    @staticmethod
    def forward(A: Tensor, B: Tensor) -> Tensor:
        return torch.addmm(B - B.T, A.T, A, alpha=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], _output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (A,) = ctx.saved_tensors
        return -A @ (g + g.T), g - g.T

    @staticmethod
    def jvp(ctx: Any, dA: Tensor, dB: Tensor) -> Tensor:
        (A,) = ctx.saved_tensors
        half: Tensor = dA.T @ A
        return dB - dB.T - half - half.T


def _shifted(matrix: Tensor, p: float) -> Tensor:
    """A matrix of the caller's own plus `p I`."""
    if p == 0:
        return matrix
    matrix.diagonal().add_(p)
    return matrix
