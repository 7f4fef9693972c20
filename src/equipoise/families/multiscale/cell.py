"""The cell whose state is an image at several resolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core.transforms import require_dtype
from equipoise.core.tree import Shared
from equipoise.core.validate import (
    SettingError,
    require_count,
    require_flag,
    require_fraction,
    require_positive,
)
from equipoise.families.multiscale.block import Kernels, ResidualBlock, fusion_map
from equipoise.layers.cell import Cell
from equipoise.layers.dropout import VariationalDropout
from equipoise.models.group_norm import GroupNorm, mark_overflow
from equipoise.models.normalized_convolution import Normalization, NormalizedConvolution

__all__ = ["Injected", "MultiscaleCell"]

State = tuple[Tensor, ...]


class Injected(NamedTuple):
    """What does not change in a solve.

    Attributes:
        image: What is injected at the finest resolution.
        kernels: Normalised kernels of each resolution, or None without weight normalisation.
        masks: Masks of dropout of each resolution, or None without dropout or in evaluation mode.
    """

    image: Tensor
    kernels: tuple[Kernels, ...] | None
    masks: tuple[Tensor, ...] | None


class MultiscaleCell(Cell):
    """`z_i <- n(V_i * relu(sum_j F_ij(B_j(z_j, x_j))))` (Bai, Koltun & Kolter, 2020, Section 3).

    The state is a tuple of images `z_1, ..., z_n`, each of half the sides of the one before. `B_j`
    is a residual block at one resolution; `F_ij` is the identity for `i = j`, strided convolutions
    to a coarser and a 1 x 1 convolution with copied pixels to a finer resolution; `V_i` is a 1 x 1
    convolution and `n` group normalisation. The input enters the finest resolution alone. As in the
    authors' code, the kernels of the blocks and of `V_i` are normalised, those of `F_ij` are not.

    Samples are independent, and normalisation keeps states bounded. Nothing is proved of the
    equilibria.

    Args:
        channels: Channels of each resolution, the finest first; at least two resolutions.
        expansion: How many times as many channels the blocks have between their convolutions.
        groups: Groups of the normalisations, 1 or even, which must divide all `channels`; `n` has
            half as many.
        weight_norm: Whether kernels are normalised, once for each solve.
        dropout: Probability of dropping a channel of a block in training; the mask of a solve is
            drawn once, as variational dropout needs it (Gal & Ghahramani, 2016).
        deviation: Standard deviation of the first kernels.
        gain: First weights of the normalisations through which the state comes back, in (0, 1]:
            those of the coarser blocks, of what leaves them, and `n`. Normalisation takes the size
            of kernels away, so that small kernels alone do not make a map that contracts; small
            gains do, since then most of a step comes from the input. 1 is the authors' start, with
            which first solves do not converge.

    Shape:
        Input (batch, channels[0], height, width), with sides that are multiples of
        `2^(resolutions - 1)`; state a tuple of (batch, channels[i], height/2^i, width/2^i).
    """

    def __init__(
        self,
        channels: Sequence[int],
        expansion: int = 5,
        groups: int = 8,
        *,
        weight_norm: bool = True,
        dropout: float = 0.0,
        deviation: float = 0.01,
        gain: float = 0.2,
    ) -> None:
        super().__init__()
        _require_channels(channels, groups)
        require_count("MultiscaleCell.expansion", expansion)
        require_flag("MultiscaleCell.weight_norm", weight_norm)
        require_positive("MultiscaleCell.deviation", deviation)
        require_fraction("MultiscaleCell.gain", gain)
        self.channels = tuple(channels)
        self.weight_norm = weight_norm
        self.dropout = VariationalDropout(dropout, owner="MultiscaleCell.dropout")
        normalization: Normalization = "weight" if weight_norm else "none"
        self.blocks = nn.ModuleList(
            ResidualBlock(own, expansion, groups, normalization=normalization) for own in channels
        )
        scales = range(len(channels))
        self.fusion = nn.ModuleDict(
            {
                f"{source}_to_{target}": fusion_map(self.channels, source, target, groups)
                for source in scales
                for target in scales
                if source != target
            }
        )
        self.mix = nn.ModuleList(
            NormalizedConvolution(own, own, 1, normalization=normalization) for own in channels
        )
        self.norms_out = nn.ModuleList(GroupNorm(max(1, groups // 2), own) for own in channels)
        self._draw_(deviation, gain)

    def _draw_(self, deviation: float, gain: float) -> None:
        for part in self.modules():
            if isinstance(part, NormalizedConvolution):
                part.draw_(deviation)
            elif isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=deviation)
        last = [
            [part for part in fusion.modules() if isinstance(part, GroupNorm)][-1]
            for name, fusion in self.fusion.items()
            if not name.startswith("0_")  # the input comes through the finest resolution
        ]
        blocks = [block.norm3 for block in self.blocks[1:]]
        for norm in (*self.norms_out, *blocks, *last):
            nn.init.constant_(norm.weight, gain)

    @property
    def size_multiple(self) -> int:
        """What the sides of images must be multiples of."""
        return int(2 ** (len(self.channels) - 1))

    def inject(self, x: Tensor) -> Injected:
        require_dtype(x, next(self.parameters()), "The input of MultiscaleCell")
        if x.dim() != 4 or x.shape[1] != self.channels[0]:
            raise SettingError(
                "The input of MultiscaleCell",
                f"have shape (batch, {self.channels[0]}, height, width)",
                tuple(x.shape),
            )
        if any(side == 0 or side % self.size_multiple for side in x.shape[2:]):
            raise SettingError(
                "The input of MultiscaleCell",
                f"have sides that are multiples of {self.size_multiple}, for "
                f"{len(self.channels)} resolutions",
                tuple(x.shape[2:]),
            )
        return Injected(mark_overflow(x.contiguous()), self._kernels(), self._masks(x))

    def _kernels(self) -> tuple[Kernels, ...] | None:
        if not self.weight_norm:
            return None
        found = []
        for block, mix in zip(self.blocks, self.mix, strict=True):
            assert isinstance(block, ResidualBlock)
            assert isinstance(mix, NormalizedConvolution)
            parts = (block.widen, block.narrow, mix)
            found.append(Kernels(*(Shared(part.kernel()) for part in parts)))
        return tuple(found)

    def _masks(self, x: Tensor) -> tuple[Tensor, ...] | None:
        masks = [self.dropout.draw(x, own, 1, 1) for own in self.channels]
        drawn = tuple(mask for mask in masks if mask is not None)
        return drawn or None

    def initial(self, x: Tensor, context: Injected) -> State:
        height, width = context.image.shape[2:]
        return tuple(
            context.image.new_zeros(len(x), own, height >> scale, width >> scale)
            for scale, own in enumerate(self.channels)
        )

    def step(self, z: State, context: Injected) -> State:
        kernels = context.kernels or (None,) * len(z)
        masks = context.masks or (None,) * len(z)
        values = [
            block(own, context.image if scale == 0 else None, masks[scale], kernels[scale])
            for scale, (block, own) in enumerate(zip(self.blocks, z, strict=True))
        ]
        return tuple(self._fuse(values, scale, kernels[scale]) for scale in range(len(z)))

    def _fuse(self, values: Sequence[Tensor], target: int, kernels: Kernels | None) -> Tensor:
        """The next state at one resolution, from the blocks' values at all of them."""
        total = values[target]
        for source, value in enumerate(values):
            if source != target:
                total = total + self.fusion[f"{source}_to_{target}"](value)
        mixed = self.mix[target](torch.relu(total), None if kernels is None else kernels.mix)
        y: Tensor = self.norms_out[target](mixed)
        return y

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, weight_norm={self.weight_norm}, dropout={self.dropout.probability:g}"
        )


def _require_channels(channels: Sequence[int], groups: int) -> None:
    if len(channels) < 2:
        raise SettingError(
            "MultiscaleCell.channels",
            "name at least two resolutions",
            tuple(channels),
            "Use ResidualCell for one.",
        )
    require_count("MultiscaleCell.groups", groups)
    if groups > 1 and groups % 2:
        raise SettingError("MultiscaleCell.groups", "be 1 or even", groups)
    for own in channels:
        require_count("MultiscaleCell.channels", own)
        if own % groups:
            raise SettingError(
                "MultiscaleCell.channels", f"be multiples of groups, {groups}", tuple(channels)
            )
