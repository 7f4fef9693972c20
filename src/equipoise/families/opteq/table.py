"""OptEq on tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.core.validate import require_count
from equipoise.families.opteq.layer import OptEq
from equipoise.families.opteq.models import OptEqOptions
from equipoise.models.factory import register_model
from equipoise.models.table_network import TableNetwork

__all__: list[str] = []


@register_model("opteq-table")
def table(
    *,
    input_shape: Sequence[int] = (16,),
    num_classes: int = 2,
    width: int = 128,
    hidden: int | Sequence[int] = 128,
    **options: Unpack[OptEqOptions],
) -> TableNetwork:
    """Tables: one dense OptEq, whose state minimises a convex function, and a linear map.

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        width: Length of the state.
        hidden: Rows of `W`, one number for each layer of the composition.
        **options: See `OptEqOptions`.
    """
    require_count("opteq-table.num_classes", num_classes)
    equilibrium = OptEq(input_shape[0], width, hidden, **options)
    return TableNetwork(equilibrium, nn.Linear(width, num_classes), input_shape)
