"""The Jacobian of an OptEq's step, from the slopes of its activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.operators.operator import Operator, OperatorWeights, is_recorded, plus
from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.coordinates import ReducedSystem
from equipoise.solvers.problem import Linearization

__all__ = ["LinearLayer", "add_skip", "linearize_layers"]


class LinearLayer(NamedTuple):
    """What the Jacobian `turned D weights + rest` of a layer is made of, without its slopes `D`.

    Attributes:
        operator: What `W` is.
        weights: Those of `W`.
        turned: Those of `alpha W^T/mu`.
        rest: `1 - alpha`; None means 0.
    """

    operator: Operator
    weights: OperatorWeights
    turned: OperatorWeights
    rest: Tensor | float | None

    def detach(self) -> LinearLayer:
        """Return the same without its autograd history."""
        return LinearLayer(
            self.operator,
            tuple(weight.detach() for weight in self.weights),
            tuple(weight.detach() for weight in self.turned),
            self.rest.detach() if isinstance(self.rest, Tensor) else self.rest,
        )


def add_skip(value: Tensor, z: Tensor, rest: Tensor | float | None) -> Tensor:
    """Return `value + rest z`; `value` must be the caller's own.

    Under autocast the sum keeps the precision of the state.
    """
    if isinstance(rest, Tensor):
        return torch.addcmul(value.to(z.dtype), z, rest)
    if not rest:
        return value
    # Sums of two precisions take twice as long as a conversion and a sum.
    return plus(value.to(torch.promote_types(value.dtype, z.dtype)), z, rest)


def linearize_layers(
    value: Tensor,
    slopes: Sequence[Tensor],
    layers: Sequence[LinearLayer],
    reduce: Callable[[Tensor], ReducedSystem] | None = None,
    compiled: Callable[[], CompiledRuns | None] | None = None,
) -> Linearization:
    """Return the linearised composition of layers.

    Args:
        value: The step's value, perhaps with its history.
        slopes: `D` of each layer.
        layers: The layers, without history.
        reduce: As of `Linearization`.
        compiled: Likewise.
    """

    def product(v: Tensor, order: Sequence[int]) -> Tensor:
        for layer in order:
            operator, weights, turned, rest = layers[layer]
            w = operator.apply_with(weights, v)
            w = w * slopes[layer] if is_recorded(w) else w.mul_(slopes[layer])
            v = add_skip(operator.adjoint_with(turned, w), v, rest)
        return v

    forwards = range(len(slopes))
    # Each factor alpha W^T D W / mu + 1 - alpha is symmetric, so that the transposed product runs
    # through them backwards.
    return Linearization(
        value.detach(),
        jvp=lambda v: product(v, forwards),
        vjp=lambda v: product(v, forwards[::-1]),
        select_rows=lambda rows: linearize_layers(
            value.detach().index_select(0, rows),
            [slope.index_select(0, rows) for slope in slopes],
            layers,
        ),
        graph=value if value.requires_grad else None,
        reduce=reduce,
        compiled=compiled,
    )
