"""The resolvent `(I + a (I - W))^-1` as a differentiable function of `W` and of its argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.operators.operator import OperatorWeights

__all__ = ["invert", "resolve"]

SMALLEST = 64
"""Matrices up to this size are inverted by torch."""


def invert(matrix: Tensor) -> Tensor:
    """Return the inverse of matrices whose symmetric part is positive definite.

    So are their leading blocks `P` and the Schur complements of these (Golub & Van Loan, 2013,
    section 4.2), so that blocks need no pivoting:

        [P Q]^-1   [P^-1 + P^-1 Q T R P^-1   -P^-1 Q T]
        [R S]    = [-T R P^-1                 T       ],   T = (S - R P^-1 Q)^-1.

    Products of matrices are several times faster than a factorisation and its substitutions.

    Args:
        matrix: Shape (..., n, n), real or complex.
    """
    size = matrix.shape[-1]
    if size <= SMALLEST:
        inverse: Tensor = torch.linalg.inv(matrix)
        return inverse
    half = size // 2
    first, second = slice(0, half), slice(half, size)
    corner = invert(matrix[..., first, first])
    right = corner @ matrix[..., first, second]
    below = matrix[..., second, first] @ corner
    last = invert(matrix[..., second, second] - matrix[..., second, first] @ right)
    lower, upper = last @ below, right @ last
    return torch.cat(
        [
            torch.cat([corner + right @ lower, -upper], dim=-1),
            torch.cat([-lower, last], dim=-1),
        ],
        dim=-2,
    )


class _Spec(NamedTuple):
    """What a product with a resolvent is, besides tensors."""

    operator: MonotoneOperator
    a: float
    weight_count: int
    transpose: bool


def resolve(
    operator: MonotoneOperator,
    weights: OperatorWeights,
    factors: OperatorWeights,
    a: float,
    b: Tensor,
    *,
    transpose: bool = False,
) -> Tensor:
    """Return `y` with `(I + a (I - W)) y = b`, differentiable in `b` and `weights`.

    `dy = R (db + a dW y)` with the resolvent `R`, so that a derivative costs one more product with
    `R` or its transpose. Differentiating the factors would cost as much as making them.

    Args:
        operator: What `W` is.
        weights: Its weights.
        factors: What `operator.factor` made of them, without history.
        a: The step size.
        b: An enlarged state.
        transpose: Whether to solve with the transposed matrix.
    """
    spec = _Spec(operator, a, len(weights), transpose)
    found: Tensor = _Resolve.apply(spec, b, *weights, *factors)  # type: ignore[no-untyped-call]
    return found


class _Resolve(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(spec: _Spec, b: Tensor, *tensors: Tensor) -> Tensor:
        return spec.operator.resolve_with(tensors[spec.weight_count :], b, transpose=spec.transpose)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec, _, *tensors = inputs
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        spec: _Spec = ctx.spec
        y, *tensors = ctx.saved_tensors
        weights, factors = tuple(tensors[: spec.weight_count]), tuple(tensors[spec.weight_count :])
        v = resolve(spec.operator, weights, factors, spec.a, g, transpose=not spec.transpose)
        pulled: Sequence[Tensor | None] = [None] * spec.weight_count
        if any(ctx.needs_input_grad[2 : 2 + spec.weight_count]):
            # <v, W y>, or <v, W^T y> = <y, W v>, as a function of the weights.
            point, other = (v, y) if spec.transpose else (y, v)
            pulled = spec.operator.pull(weights, point, spec.a * other)
        return (None, v, *pulled, *[None] * len(factors))

    @staticmethod
    def jvp(ctx: Any, _spec: None, tangent: Tensor | None, *tangents: Tensor | None) -> Tensor:
        spec: _Spec = ctx.spec
        y, *tensors = ctx.saved_tensors
        weights, factors = tuple(tensors[: spec.weight_count]), tuple(tensors[spec.weight_count :])
        total = torch.zeros_like(y) if tangent is None else tangent
        if any(own is not None for own in tangents[: spec.weight_count]):
            moved = tuple(
                torch.zeros_like(weight) if own is None else own
                for weight, own in zip(weights, tangents[: spec.weight_count], strict=True)
            )
            for one in spec.operator.directions(weights, moved):
                product = (
                    spec.operator.adjoint_enlarged(spec.operator.transposed(one), y)
                    if spec.transpose
                    else spec.operator.apply_enlarged(one, y)
                )
                total = total + spec.a * product
        return resolve(spec.operator, weights, factors, spec.a, total, transpose=spec.transpose)
