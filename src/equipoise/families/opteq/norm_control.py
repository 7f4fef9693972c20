"""Keep the norms of weights below what makes a layer nonexpansive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from equipoise.core.errors import ConvergenceError
from equipoise.core.registry import choose
from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import SettingError, require_positive
from equipoise.operators.operator import Operator, OperatorWeights

__all__ = [
    "BOUND",
    "Init",
    "Norm",
    "NormControl",
    "draw_frames_",
    "orthogonalize_",
    "project_norm_",
    "require_norm_control",
]

Norm = Literal["none", "scale", "project", "orthogonal"]
Init = Literal["auto", "small", "orthogonal"]

BOUND = 0.99
"""The default limit of controlled norms: a contraction with a margin that float32 can see."""


def require_norm_control(norm: Norm, bound: float) -> None:
    """Raise unless norms can be controlled in this way."""
    choose("OptEq.norm", norm, get_args(Norm))
    require_positive("OptEq.bound", bound)
    if norm != "none" and bound > 1:
        raise SettingError(
            "OptEq.bound",
            "be at most 1, since larger weights certify nothing",
            bound,
            "Use norm='none' for no control.",
        )


class NormControl:
    """Divides weights by their norm where that is too large, and remembers norms between solves."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[object, ...], Tensor]] = {}

    def scale(
        self, layer: int, operator: Operator, weights: OperatorWeights, limit: float
    ) -> OperatorWeights:
        """Return weights whose norm is at most `limit`, differentiable.

        Args:
            layer: The number of the layer, by which its norm is remembered.
            operator: What the weights belong to.
            weights: The weights.
            limit: The largest norm.
        """
        if limit == math.inf:
            return weights
        if any(is_wrapped(weight) for weight in weights):
            return operator.scaled(weights, limit / operator.bound(weights).clamp_min(limit))
        mark = _fingerprint(weights)
        known, bound = self._known.get(layer, ((), None))
        if known != mark:
            bound = None
        if bound is None or (torch.is_grad_enabled() and not bool(bound <= limit)):
            bound = operator.bound(weights)
            self._known[layer] = (mark, bound.detach())
        # Weights within the limit stay what they are: the common case needs no new tensors.
        return weights if bool(bound <= limit) else operator.scaled(weights, limit / bound)


def project_norm_(layer: int, operator: Operator, limit: float) -> None:
    """Divide an operator's weights in place if their norm is larger than `limit`.

    Args:
        layer: The number of the layer, for the error message.
        operator: The operator.
        limit: The largest norm.
    """
    _require_finite(layer, operator)
    excess = float(operator.bound(operator.weights())) / limit
    if excess > 1:
        operator.scale_(1 / excess)


def orthogonalize_(layer: int, operator: Operator, limit: float) -> None:
    """Bring all singular values of an operator's weights up or down to `limit`, in place.

    The proven bound of the norm is at most `limit` afterwards. Matrices reach it exactly, all
    singular values of convolutions come close.

    Args:
        layer: The number of the layer, for the error message.
        operator: The operator.
        limit: The largest norm; where every norm is allowed, the singular values become 1.
    """
    _require_finite(layer, operator)
    size = limit if limit < math.inf else 1.0
    operator.orthogonalize_(size)
    project_norm_(layer, operator, size)


@torch.no_grad()
def draw_frames_(operators: Sequence[Operator], limits: Sequence[float]) -> None:
    """Draw weights all of whose singular values are equal, and whose bounds are the limits.

    Args:
        operators: The operators.
        limits: Their largest norms; where every norm is allowed, the singular values become 1.
    """
    for operator, limit in zip(operators, limits, strict=True):
        operator.draw_frame_()
        weights = operator.weights()
        if not any(weight.is_meta for weight in weights):  # which have no values to measure
            size = limit if limit < math.inf else 1.0
            operator.scale_(size / operator.bound(weights))


def _require_finite(layer: int, operator: Operator) -> None:
    if not all(bool(weight.isfinite().all()) for weight in operator.weights()):
        raise ConvergenceError(
            "project_norms must find finite weights; got NaN or infinity in layer "
            f"{layer + 1}. Lower the learning rate."
        )


def _fingerprint(weights: OperatorWeights) -> tuple[object, ...]:
    """What changes whenever weights do.

    The sums are for changes through `.data`, which torch's version counter does not see.
    """
    return tuple(
        mark
        for weight in weights
        for mark in (weight.data_ptr(), weight._version, weight.dtype, *_sums(weight.detach()))
    )


def _sums(weight: Tensor) -> tuple[float, float]:
    return float(weight.sum()), float(torch.linalg.vector_norm(weight))
