"""The residual cell whose equilibria and loss surfaces the thesis looks at."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_flag, require_positive
from equipoise.layers.cell import Cell

__all__ = ["ResidualCell", "WeightTied"]


class ResidualCell(Cell):
    """`f(z, x) = n3(relu(z + n2(x + W2 * n1(relu(W1 * z)))))` (mon-NTK thesis, eq. 4.1).

    `n1`, `n2` and `n3` are group normalisations, which keep samples independent and states bounded.
    Nothing is proved of its equilibria.

    Args:
        channels: Channels of state and input.
        inner: Channels between the two convolutions.
        kernel_size: Side of the convolutions, odd.
        groups: Groups of the normalisations; must divide `channels` and `inner`.
        deviation: Standard deviation of the convolutions' first weights; small ones begin near an
            equilibrium.

    Shape:
        Input and state (batch, channels, height, width).
    """

    def __init__(
        self,
        channels: int,
        inner: int,
        kernel_size: int = 3,
        groups: int = 8,
        *,
        deviation: float = 0.01,
    ) -> None:
        super().__init__()
        for name, count in (("channels", channels), ("inner", inner), ("groups", groups)):
            require_count(f"ResidualCell.{name}", count)
        for name, count in (("channels", channels), ("inner", inner)):
            if count % groups:
                raise SettingError(
                    f"ResidualCell.{name}", f"be a multiple of groups, {groups}", count
                )
        require_count("ResidualCell.kernel_size", kernel_size)
        if kernel_size % 2 == 0:
            raise SettingError("ResidualCell.kernel_size", "be odd", kernel_size)
        require_positive("ResidualCell.deviation", deviation)
        padding = kernel_size // 2
        self.conv1 = nn.Conv2d(channels, inner, kernel_size, padding=padding, bias=False)
        self.conv2 = nn.Conv2d(inner, channels, kernel_size, padding=padding, bias=False)
        self.norm1 = nn.GroupNorm(groups, inner)
        self.norm2 = nn.GroupNorm(groups, channels)
        self.norm3 = nn.GroupNorm(groups, channels)
        for part in (self.conv1, self.conv2):
            nn.init.normal_(part.weight, std=deviation)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        inner = self.norm1(torch.relu(self.conv1(z)))
        y: Tensor = self.norm3(torch.relu(z + self.norm2(context + self.conv2(inner))))
        return y


class WeightTied(nn.Module):
    """A cell applied `steps` times from zero: the explicit network that an equilibrium extends.

    Args:
        cell: The cell.
        steps: How often.
        checkpoint: Whether to keep only the iterates, and to compute each step again in backward:
            about a third more time, and a fraction of the memory.
    """

    def __init__(self, cell: Cell, steps: int, *, checkpoint: bool = False) -> None:
        super().__init__()
        require_count("WeightTied.steps", steps)
        require_flag("WeightTied.checkpoint", checkpoint)
        self.cell = cell
        self.steps = steps
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """Return the last iterate."""
        context = self.cell.inject(x)
        z: Tensor = self.cell.initial(x, context)
        for _ in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                z = torch.utils.checkpoint.checkpoint(self.cell, z, context, use_reentrant=False)
            else:
                z = self.cell(z, context)
        return self.cell.readout(z, context)  # type: ignore[no-any-return]
