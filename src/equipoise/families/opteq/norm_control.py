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
    "require_norm_control",
]

Norm = Literal["none", "scale", "project", "orthogonal"]
Init = Literal["auto", "small", "orthogonal"]

ROOM = 0.01
"""How far below its limit a projected norm lies, relative to it."""
LASTING = 4
"""Steps for which a bound must suffice for the next one to pay."""
PATIENCE = 50
"""Steps after which the next bound is computed in any case."""

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
    """Keeps the norms of layers within limits, and knows how far weights may move until then.

    For each layer the weights at which a bound was last computed are kept with it. The bound plus
    `Operator.drift` bounds the norm of weights near those; it is computed afresh only if the sum is
    above the limit. So all that is kept saves time, and never changes a result: a resumed run
    begins without it and computes the same.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._over: set[int] = set()  # layers whose norm was above its limit at the last question

    def __reduce__(self) -> tuple[type[NormControl], tuple[()]]:
        return NormControl, ()  # copies of a layer begin anew

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
        if self._is_within(layer, operator, weights, limit):
            # Weights within the limit stay what they are: the common case needs no new tensors.
            return weights
        known = self._known.get(layer)
        if known is not None and not torch.is_grad_enabled() and known.holds(weights):
            bound = known.bound
        else:
            bound = operator.bound(weights)
            self._keep(layer, weights, bound.detach(), over=bool(bound > limit))
        return weights if bool(bound <= limit) else operator.scaled(weights, limit / bound)

    @torch.no_grad()
    def project_(self, layer: int, operator: Operator, limit: float) -> None:
        """Divide an operator's weights in place if their norm is larger than `limit`.

        They come to lie a hundredth below the limit, so that the next steps of an optimiser do not
        cross it again at once.

        Args:
            layer: The number of the layer.
            operator: The operator.
            limit: The largest norm.
        """
        weights = operator.weights()
        if limit < math.inf and self._is_within(layer, operator, weights, limit):
            return
        _require_finite(layer, operator)
        if limit == math.inf:
            return
        bound = operator.bound(weights)
        over = float(bound) > limit
        if over:
            factor = (1 - ROOM) * limit / float(bound)
            operator.scale_(factor)
            # Each entry of the product is rounded, and so is the bound.
            count = sum(weight.numel() for weight in weights)
            rounding = 1 + (8 + math.sqrt(count)) * torch.finfo(bound.dtype).eps
            bound = (bound.double() * factor * rounding).to(bound.dtype)
        self._keep(layer, weights, bound, over=over)

    def _keep(self, layer: int, weights: OperatorWeights, bound: Tensor, *, over: bool) -> None:
        self._known[layer] = _Known(weights, bound)
        (self._over.add if over else self._over.discard)(layer)

    def _is_within(
        self, layer: int, operator: Operator, weights: OperatorWeights, limit: float
    ) -> bool:
        """Whether `operator.bound(weights) <= limit`; False may also mean that it is not known."""
        known = self._known.get(layer)
        if known is None or not known.fits(weights):
            return self._is_quickly_within(layer, operator, weights, limit)
        if not bool(known.bound <= limit):
            return False
        if known.cleared == limit and _equal(weights, known.last):
            return True
        moved = operator.drift(weights, known.weights)
        rounding = 1 + 8 * torch.finfo(known.bound.dtype).eps
        if moved == 0 or (float(known.bound) + moved) * rounding <= limit:
            known.sufficed += 1
            return True
        # A new bound pays if the last one sufficed for some steps. Where steps are too long for
        # that, the cheaper question is asked at each of them, and a bound tried now and then.
        known.asked += 1
        if known.sufficed >= LASTING or known.asked >= PATIENCE or not math.isfinite(moved):
            return self._is_quickly_within(layer, operator, weights, limit)
        # A norm that was too large is likely to be so again, and then its bound is needed anyway.
        if layer in self._over or not operator.within(weights, limit):
            return False
        known.cleared, known.last = limit, _copied(weights)
        return True

    def _is_quickly_within(
        self, layer: int, operator: Operator, weights: OperatorWeights, limit: float
    ) -> bool:
        """The same by a bound that costs little, which is then kept."""
        quick = operator.quick_bound(weights)
        if quick <= limit:
            self._known[layer] = _Known(weights, torch.tensor(quick, dtype=torch.float64))
        return quick <= limit


class _Known:
    """What is known of the norm of a layer.

    Attributes:
        weights: Weights.
        bound: The bound of their norm.
        sufficed: Steps for which that was enough.
        asked: Steps for which it was not.
        last: The last weights that were asked for.
        cleared: The limit that they are within.
    """

    def __init__(self, weights: OperatorWeights, bound: Tensor) -> None:
        self.weights = self.last = _copied(weights)
        self.bound = bound
        self.sufficed = self.asked = 0
        self.cleared = math.nan

    def fits(self, weights: OperatorWeights) -> bool:
        """Whether other weights are of the same kind."""
        return len(weights) == len(self.weights) and all(
            (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
            for one, other in zip(weights, self.weights, strict=True)
        )

    def holds(self, weights: OperatorWeights) -> bool:
        """Whether these are the weights."""
        return self.fits(weights) and _equal(weights, self.weights)


def _copied(weights: OperatorWeights) -> OperatorWeights:
    return tuple(weight.detach().clone() for weight in weights)


def _equal(weights: OperatorWeights, others: OperatorWeights) -> bool:
    return all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


def _project_norm_(layer: int, operator: Operator, limit: float) -> None:
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
    _project_norm_(layer, operator, size)


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
