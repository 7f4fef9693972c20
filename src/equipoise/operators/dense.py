"""Matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.operators.norms import dense_norm
from equipoise.operators.operator import START_NORM, Operator, OperatorWeights, distance
from equipoise.operators.orthogonal import nearest_frame, symbol_floor

__all__ = ["Dense"]


class Dense(Operator):
    """A matrix: `z -> z W^T` on rows.

    Args:
        in_features: Length of `z`.
        out_features: Length of `W z`.

    Shape:
        (batch, in_features) to (batch, out_features).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Gaussian weights of norm about one half."""
        out, into = self.weight.shape
        nn.init.normal_(self.weight, std=START_NORM / (math.sqrt(out) + math.sqrt(into)))

    def weights(self) -> OperatorWeights:
        return (self.weight,)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return weights

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return z @ weights[0].T

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return y @ transposed[0]

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, z, weights[0].T)

    def gram(self, weights: OperatorWeights) -> Tensor:
        return weights[0] @ weights[0].T

    def zeros(self, c: Tensor) -> Tensor:
        return c.new_zeros(c.shape[0], self.weight.shape[1])

    def bound(self, weights: OperatorWeights) -> Tensor:
        return dense_norm(weights[0])

    def drift(self, weights: OperatorWeights, other: OperatorWeights) -> float:
        # A bound is rounded up by a few units itself.
        eps = torch.finfo(weights[0].dtype).eps
        return distance(weights[0], other[0]) * (1 + 8 * eps)

    @torch.no_grad()
    def draw_frame_(self) -> None:
        nn.init.orthogonal_(self.weight)

    @torch.no_grad()
    def orthogonalize_(self, size: float) -> None:
        self.weight.copy_(size * nearest_frame(self.weight / size))

    def lower_bound(self, weights: OperatorWeights) -> float:
        return symbol_floor(weights[0][:, :, None, None])

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 2:
            raise ValueError(f"The input must have shape (batch, features); got {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"
