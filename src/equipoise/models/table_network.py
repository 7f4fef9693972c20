"""Networks for tables: what they all take, and those around one equilibrium."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_type
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.lipschitz import Chain, Part
from equipoise.models.model import Model

__all__ = ["TableModel", "TableNetwork"]


class TableModel(Model):
    """A network that takes rows of numbers.

    Args:
        input_shape: How many numbers a row has, as a shape.

    Shape:
        (batch, numbers).
    """

    def __init__(self, input_shape: Sequence[int]) -> None:
        super().__init__()
        owner = type(self).__name__
        if len(input_shape) != 1:
            raise SettingError(
                f"{owner}.input_shape", "be the length of a row, as (n,)", tuple(input_shape)
            )
        require_count(f"{owner}.input_shape", input_shape[0])
        self.input_shape = (int(input_shape[0]),)

    def prepare(self, x: Tensor) -> Tensor:
        """Return rows that the network can take; raises `ValueError` for anything else."""
        (numbers,) = self.input_shape
        if not x.is_floating_point():
            raise SettingError(
                f"The input of {self.name}", "be floating-point numbers", x, got=str(x.dtype)
            )
        if x.dim() != 2 or x.shape[1] != numbers:
            raise SettingError(
                f"The input of {self.name}", f"have shape (batch, {numbers})", tuple(x.shape)
            )
        return x


class TableNetwork(TableModel):
    """An equilibrium of a row, and a linear map: `y = head(z)`, `z = f(z, x)`.

    Args:
        equilibrium: The equilibrium layer.
        head: Maps equilibria to predictions.
        input_shape: How many numbers a row has, as a shape.

    Shape:
        (batch, numbers) to what the head returns.
    """

    def __init__(
        self, equilibrium: Equilibrium, head: nn.Module, input_shape: Sequence[int]
    ) -> None:
        super().__init__(input_shape)
        require_type("TableNetwork.equilibrium", equilibrium, Equilibrium, "an Equilibrium")
        self.equilibrium = equilibrium
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for a batch of rows."""
        y: Tensor = self.head(self.equilibrium(x))
        return y

    def output_lipschitz(self) -> Part:
        """Return how far predictions move with the rows."""
        return Chain((self.equilibrium, self.head))
