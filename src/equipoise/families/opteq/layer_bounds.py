"""What is proved of the layers of an OptEq: Lipschitz constants, and smallest singular values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from equipoise.layers.certificate import Factor, Statement, averaged
from equipoise.layers.lipschitz import Bound, Chain, Part, Sum, round_up
from equipoise.operators.operator import Operator, OperatorWeights
from equipoise.operators.pooled import Pooled
from equipoise.prox.activation import Activation

__all__ = ["frame_statements", "input_part", "layer_factors"]


def layer_factors(
    operators: Sequence[Operator],
    weights: Sequence[OperatorWeights],
    activations: Sequence[Activation],
    alphas: Sequence[Tensor | float],
    mu: float,
) -> tuple[Factor, ...]:
    """Return `alpha L_s |W|^2/mu + 1 - alpha` of each layer, with the norm that it comes from.

    Args:
        operators: The operators.
        weights: Their weights after norm control.
        activations: The activations.
        alphas: The fractions of the new value.
        mu: The scale.
    """
    factors = []
    parts = zip(operators, weights, activations, alphas, strict=True)
    for number, (operator, own, activation, alpha) in enumerate(parts, start=1):
        norm = float(operator.bound(tuple(weight.double() for weight in own)))
        smoothness = activation.slopes[1] * norm * norm / mu  # may be infinite
        value = round_up(averaged(smoothness, float(alpha)))
        factors.append(Factor(f"layer {number}", value, norm))
    return tuple(factors)


def input_part(
    factors: Sequence[Factor],
    activations: Sequence[Activation],
    alphas: Sequence[Tensor | float],
    inputs: Sequence[nn.Module],
    mu: float,
) -> Part:
    """Return `sum_l (alpha_l L_s |W_l|/mu) |U_l| prod_(k > l) q_k`, `q_k` layer `k`'s factor.

    The input moves layer `l` by `(alpha_l/mu) |W_l| L_s |U_l|`, and what it moved the layers after
    it multiply by their Lipschitz constants.

    Args:
        factors: What `layer_factors` returned.
        activations: The activations.
        alphas: The fractions of the new value.
        inputs: The injections `x -> U_l x + b_l`.
        mu: The scale.
    """
    later, parts = 1.0, list[Part]()
    layers = zip(factors, activations, alphas, inputs, strict=True)
    for factor, activation, alpha, inject in reversed(list(layers)):
        own = float(alpha) * activation.slopes[1] * factor.norm / mu
        moved = Bound(
            f"{factor.name}: alpha L_s |W|/mu, and layers after it",
            round_up(own * later) if own and later else 0.0,
            "proven norms",
        )
        parts.insert(0, Chain((inject, moved)))
        later = later * factor.value if later else 0.0
    return parts[0] if len(parts) == 1 else Sum(tuple(parts), "layers")


def frame_statements(operators: Sequence[Operator]) -> tuple[Statement, ...]:
    """Return what is proved of the smallest singular values of operators that are kept up."""
    lowest = min(operator.lower_bound(operator.weights()) for operator in operators)
    images = any(weight.dim() > 2 for each in operators for weight in each.weights())
    pooled = any(isinstance(each, Pooled) for each in operators)
    return (
        Statement(
            "the singular values of all W_l are bounded from below"
            + (" on images without borders" if images else "")
            + (" that are constant on the fields that are pooled" if pooled else ""),
            holds=True if lowest > 0 else None,
            number=math.floor(1e4 * lowest) / 1e4 if lowest > 0 else None,
            theorem="eigenvalues of W^T W"
            + (" on a grid of frequencies; Ehlich & Zeller, 1964" if images else ""),
        ),
    )
