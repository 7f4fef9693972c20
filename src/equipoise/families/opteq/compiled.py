"""Where solves of one layer may run in compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from equipoise.core.kernels import as_rows, find_compiled, suits_kernels
from equipoise.families.opteq.linearization import LinearLayer
from equipoise.operators.dense import Dense
from equipoise.prox.activation import Activation, ReLU
from equipoise.solvers.ahead import CompiledRuns

__all__ = ["run_products", "run_values"]

MAX_SAMPLES = 4
"""For more samples than these, matrix products are faster than loops."""
KERNELS = "equipoise.families.opteq.layer_kernels"


def _kernels(layer: LinearLayer, activation: Activation, rows: Tensor) -> Any:
    """Return the kernels of `W^T relu(W z + c)`, if a layer is that."""
    weight, turned = layer.weights[0], layer.turned[0]
    plain = type(layer.operator) is Dense and isinstance(activation, ReLU)
    if not plain or not isinstance(layer.rest, float | None) or layer.rest:
        return None
    same = turned.data_ptr() == weight.data_ptr() and turned.stride() == weight.stride()
    if len(rows) > MAX_SAMPLES or not same or not weight.is_contiguous():
        return None
    return find_compiled(weight, KERNELS) if suits_kernels(rows) else None


def run_values(layer: LinearLayer, activation: Activation, c: Tensor) -> CompiledRuns | None:
    """Return compiled runs of forward solves.

    Args:
        layer: The layer, without history.
        activation: Its activation.
        c: Its injection.
    """
    kernels = _kernels(layer, activation, c)
    if kernels is None:
        return None
    return CompiledRuns(
        anderson=partial(kernels.run_anderson, as_rows(layer.weights[0]), as_rows(c))
    )


def run_products(
    layers: Sequence[LinearLayer], activation: Activation, slope: Tensor
) -> CompiledRuns | None:
    """Return compiled runs of linear solves.

    Args:
        layers: The layers, without history; there is something for one only.
        activation: Its activation.
        slope: Its slopes.
    """
    if len(layers) > 1:
        return None
    layer = layers[0]
    kernels = _kernels(layer, activation, slope)
    if kernels is None:
        return None
    return CompiledRuns(
        conjugate=partial(kernels.run_conjugate, as_rows(layer.weights[0]), as_rows(slope))
    )
