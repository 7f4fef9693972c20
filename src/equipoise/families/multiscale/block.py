"""The parts of a multiscale cell: residual blocks, and the maps between resolutions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.models.group_norm import GroupNorm
from equipoise.models.normalized_convolution import Normalization, NormalizedConvolution

__all__ = ["Kernels", "ResidualBlock", "fusion_map"]


class Kernels(NamedTuple):
    """The normalised kernels of one resolution, made once for each solve.

    `MultiscaleCell.inject` wraps them in `Shared`; the step sees tensors.
    """

    widen: Any
    narrow: Any
    mix: Any


class ResidualBlock(nn.Module):
    """`n3(relu(z + n2(x + m W2 * relu(n1(W1 * z)))))`: the block of one resolution.

    As in Bai et al. (2020), Figure 2. `n1`, `n2` and `n3` are group normalisations, `m` is the mask
    of variational dropout.

    Args:
        channels: Channels of the resolution.
        expansion: How many times as many there are between the two convolutions.
        groups: Groups of the normalisations.
        normalization: How the kernels are normalised.
    """

    def __init__(
        self, channels: int, expansion: int, groups: int, *, normalization: Normalization
    ) -> None:
        super().__init__()
        inner = expansion * channels
        self.widen = NormalizedConvolution(channels, inner, 3, normalization=normalization)
        self.narrow = NormalizedConvolution(inner, channels, 3, normalization=normalization)
        self.norm1 = GroupNorm(groups, inner)
        self.norm2 = GroupNorm(groups, channels)
        self.norm3 = GroupNorm(groups, channels)

    def forward(
        self, z: Tensor, x: Tensor | None, mask: Tensor | None, kernels: Kernels | None
    ) -> Tensor:
        """Return the block's value.

        Args:
            z: The state at this resolution.
            x: What is injected here, if anything.
            mask: The mask of dropout, (batch, channels, 1, 1), if there is dropout.
            kernels: The kernels, if they are normalised.
        """
        widen, narrow = (None, None) if kernels is None else kernels[:2]
        y = self.narrow(torch.relu_(self.norm1(self.widen(z, widen))), narrow)
        if mask is not None:
            y = y * mask
        if x is not None:
            y = y + x
        value: Tensor = self.norm3(torch.relu_(self.norm2(y).add_(z)))
        return value


def fusion_map(channels: tuple[int, ...], source: int, target: int, groups: int) -> nn.Sequential:
    """Return the map from one resolution to another, as in Bai et al. (2020), Section 3.2.

    To a coarser one by a convolution of side 3 and stride 2 for each halving, of which the last has
    the target's channels; to a finer one by a convolution of side 1 and copies of pixels. Each
    convolution is followed by group normalisation, and by ReLU between two of them.

    Args:
        channels: Channels of each resolution, the finest first.
        source: From which.
        target: To which.
        groups: Groups of the normalisations.
    """
    into, out = channels[source], channels[target]
    if source > target:
        return nn.Sequential(
            nn.Conv2d(into, out, 1, bias=False),
            GroupNorm(groups, out),
            nn.Upsample(scale_factor=2 ** (source - target), mode="nearest"),
        )
    parts: list[nn.Module] = []
    for scale in range(source + 1, target + 1):
        wide = out if scale == target else into
        parts += [nn.Conv2d(into, wide, 3, 2, padding=1, bias=False), GroupNorm(groups, wide)]
        if scale < target:
            parts.append(nn.ReLU(inplace=True))
    return nn.Sequential(*parts)
