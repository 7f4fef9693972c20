"""Well-posed implicit networks for tables and small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.core.validate import require_count
from equipoise.families.well_posed.cell import Condition, Norm
from equipoise.families.well_posed.layer import ActivationLike, WellPosed
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ImageNetwork
from equipoise.models.table_network import TableNetwork

__all__ = ["WellPosedOptions"]


class WellPosedOptions(SolveOptions, total=False):
    """The options that these models hand to their layer; `WellPosed` explains them.

    Attributes:
        kappa: The prescribed bound, in (0, 1).
        condition: `infinity` or `perron-frobenius`.
        norm: `scale`, `project` or `none`.
        activation: Its name (`equipoise list activations`).
    """

    kappa: float
    condition: Condition
    norm: Norm
    activation: ActivationLike


@register_model("well-posed-table")
def table(
    *,
    input_shape: Sequence[int] = (4,),
    num_classes: int = 3,
    width: int = 32,
    **options: Unpack[WellPosedOptions],
) -> TableNetwork:
    """Rows of numbers, by a well-posed implicit network (El Ghaoui et al., 2021).

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        width: Length of the state.
        **options: See `WellPosedOptions`.
    """
    require_count("well-posed-table.num_classes", num_classes)
    layer = WellPosed(input_shape[0], width, **options)
    return TableNetwork(layer, nn.Linear(width, num_classes), input_shape)


@register_model("well-posed-mnist")
def mnist(
    *, num_classes: int = 10, width: int = 100, **options: Unpack[WellPosedOptions]
) -> ImageNetwork:
    """Grey images of 28 x 28 as vectors, by a well-posed implicit network (El Ghaoui et al., 2021).

    Args:
        num_classes: Number of classes.
        width: Length of the state.
        **options: See `WellPosedOptions`.
    """
    require_count("well-posed-mnist.num_classes", num_classes)
    layer = WellPosed(28 * 28, width, **options)
    return ImageNetwork(nn.Flatten(), layer, nn.Linear(width, num_classes), (1, 28, 28))
