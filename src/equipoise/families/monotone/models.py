"""The networks of the paper on monotone operators, and small ones for small images and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.core.validate import require_count
from equipoise.families.monotone.cell import Splitting, StepSize
from equipoise.families.monotone.layer import ActivationLike, MonotoneDense
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ImageNetwork
from equipoise.models.table_network import TableNetwork

__all__ = ["MonotoneOptions"]

ACCURACY: SolveOptions = {"tolerance": 1e-2, "max_steps": 100}
"""What the authors train to."""


class MonotoneOptions(SolveOptions, total=False):
    """The options that all these models hand to their layer; `MonotoneDense` explains them.

    Attributes:
        margin: The margin `m` of `I - W >= m I`, positive.
        activation: Its name (`equipoise list activations`).
        splitting: `peaceman-rachford`, `douglas-rachford`, `forward-backward` or `none`.
        step_size: That of the splitting, or `auto`.
    """

    margin: float
    activation: ActivationLike
    splitting: Splitting
    step_size: StepSize


def solved_to(accuracy: SolveOptions, options: MonotoneOptions) -> MonotoneOptions:
    """Return options with a model's own accuracy, unless the stopping rule is given in full."""
    if options.get("stop") is not None:
        return options
    chosen: MonotoneOptions = {**accuracy, **options}
    return chosen


def _flat(
    shape: tuple[int, int, int], features: int, num_classes: int, options: MonotoneOptions
) -> ImageNetwork:
    """Images as vectors, a dense layer and a linear map."""
    require_count("monotone.num_classes", num_classes)
    channels, height, width = shape
    layer = MonotoneDense(channels * height * width, features, **solved_to(ACCURACY, options))
    return ImageNetwork(nn.Flatten(), layer, nn.Linear(features, num_classes), shape)


@register_model("monotone-digits")
def digits(*, num_classes: int = 10, **options: Unpack[MonotoneOptions]) -> ImageNetwork:
    """Grey images of 8 x 8, such as scikit-learn's digits, by a monotone network of 32 units.

    Args:
        num_classes: Number of classes.
        **options: See `MonotoneOptions`.
    """
    return _flat((1, 8, 8), 32, num_classes, options)


@register_model("monotone-mnist")
def mnist(*, num_classes: int = 10, **options: Unpack[MonotoneOptions]) -> ImageNetwork:
    """MNIST, a dense monotone network of 87 units (Winston & Kolter, 2020, Table 1).

    There are 84,313 parameters, as published.

    Args:
        num_classes: Number of classes.
        **options: See `MonotoneOptions`.
    """
    return _flat((1, 28, 28), 87, num_classes, options)


@register_model("monotone-table")
def table(
    *,
    input_shape: Sequence[int] = (4,),
    num_classes: int = 3,
    width: int = 32,
    **options: Unpack[MonotoneOptions],
) -> TableNetwork:
    """Rows of numbers, by a dense monotone network.

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        width: Length of the state.
        **options: See `MonotoneOptions`.
    """
    require_count("monotone-table.num_classes", num_classes)
    layer = MonotoneDense(input_shape[0], width, **solved_to({"tolerance": 1e-3}, options))
    return TableNetwork(layer, nn.Linear(width, num_classes), input_shape)
