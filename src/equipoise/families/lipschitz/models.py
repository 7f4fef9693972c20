"""Lipschitz-bounded networks for tables and small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.families.lipschitz.layer import LipschitzBounded
from equipoise.families.monotone import MonotoneOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ImageNetwork
from equipoise.models.table_network import TableNetwork

__all__ = ["LipschitzOptions"]


class LipschitzOptions(MonotoneOptions, total=False):
    """The options that these models hand to their layer; `LipschitzBounded` explains them.

    Attributes:
        gamma: The Lipschitz constant of the whole network, positive.
        margin: How strongly monotone `I - W` is, positive.
        activation: Its name (`equipoise list activations`).
        splitting: `peaceman-rachford`, `douglas-rachford`, `forward-backward` or `none`.
        step_size: That of the splitting, or `auto`.
    """

    gamma: float


@register_model("lipschitz-table")
def table(
    *,
    input_shape: Sequence[int] = (4,),
    num_classes: int = 3,
    width: int = 32,
    **options: Unpack[LipschitzOptions],
) -> TableNetwork:
    """Rows of numbers, by a network of prescribed Lipschitz constant (Revay et al., 2020).

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        width: Length of the state.
        **options: See `LipschitzOptions`.
    """
    layer = LipschitzBounded(input_shape[0], width, num_classes, **_chosen(options))
    return TableNetwork(layer, nn.Identity(), input_shape)


@register_model("lipschitz-mnist")
def mnist(
    *, num_classes: int = 10, width: int = 80, **options: Unpack[LipschitzOptions]
) -> ImageNetwork:
    """Grey images of 28 x 28 as vectors, with a prescribed Lipschitz constant (Revay et al., 2020).

    Args:
        num_classes: Number of classes.
        width: Length of the state.
        **options: See `LipschitzOptions`.
    """
    layer = LipschitzBounded(28 * 28, width, num_classes, **_chosen(options))
    return ImageNetwork(nn.Flatten(), layer, nn.Identity(), (1, 28, 28))


def _chosen(options: LipschitzOptions) -> LipschitzOptions:
    defaults: LipschitzOptions = {"gamma": 5.0}
    if options.get("stop") is None:
        defaults["tolerance"] = 1e-3
    return {**defaults, **options}
