"""Activations as proximal maps with a step size."""

from __future__ import annotations

from functools import lru_cache

from equipoise.core.validate import SettingError
from equipoise.prox.activation import (
    Activation,
    HardTanh,
    Identity,
    LeakyReLU,
    ReLU,
    SoftShrink,
)

__all__ = ["require_proximal", "scaled_prox"]


@lru_cache(maxsize=64)
def scaled_prox(activation: Activation, a: float) -> Activation:
    """Return `prox_{a phi}`, given the activation `s = prox_phi`.

    Indicators of sets, whose proximal maps are projections (ReLU, hard tanh), do not depend on `a`.

    Args:
        activation: `s`.
        a: The step size.
    """
    if a == 1 or isinstance(activation, ReLU | HardTanh | Identity):
        return activation
    if isinstance(activation, LeakyReLU):
        slope = activation.negative_slope  # phi(z) = (1/slope - 1) z^2/2 for negative z
        return LeakyReLU(slope / (slope + a * (1 - slope)))
    if isinstance(activation, SoftShrink):
        return SoftShrink(a * activation.threshold)
    raise SettingError(
        "activation",
        "be relu, leaky_relu, hard_tanh, soft_shrink or identity for a splitting with a step size",
        activation,
        "Use splitting='none', which takes any.",
        got=type(activation).__name__,
    )


def require_proximal(owner: str, activation: Activation) -> None:
    """Raise unless an activation is the proximal map of a convex function of each entry."""
    if not activation.elementwise:
        raise SettingError(
            f"{owner}.activation", "be elementwise", activation, got=type(activation).__name__
        )
    if not activation.admissible or activation.slopes[1] > 1:
        raise SettingError(
            f"{owner}.activation",
            "have slopes in [0, 1], as proximal maps do",
            activation,
            got=f"{type(activation).__name__} with slopes in {activation.slopes}",
        )
