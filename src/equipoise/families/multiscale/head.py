"""Heads that read an equilibrium of several resolutions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count

__all__ = ["ScaleClassHead", "ScalePixelHead"]

WIDER = 4
"""How many times as many channels a bottleneck gives as it has inside."""


class _Bottleneck(nn.Module):
    """Convolutions of sides 1, 3 and 1 around few channels, and a skip by one of side 1."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        out = WIDER * inner
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner, affine=False),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner, affine=False),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, out, 1, bias=False),
            nn.BatchNorm2d(out, affine=False),
        )
        # Where the sizes agree already the authors leave the input as it is.
        same = channels == out
        skip = (nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
        self.skip = nn.Identity() if same else nn.Sequential(*skip)

    def forward(self, z: Tensor) -> Tensor:
        """Return the block's value."""
        return torch.relu(self.body(z) + self.skip(z))


class ScaleClassHead(nn.Module):
    """The classification head of Bai et al. (2020): from the finest resolution to the coarsest.

    A bottleneck widens each resolution; strided convolutions carry the sum to the next coarser one,
    where a convolution of side 1, an average and a linear map follow. As in the authors' code but
    for the biases that batch normalisation would take away again.

    Args:
        channels: Channels of each resolution, the finest first.
        inner: Channels inside the bottlenecks, which give four times as many.
        features: Numbers that the classifier sees.
        num_classes: Number of classes.

    Shape:
        Tuple of (batch, channels[i], height/2^i, width/2^i) to (batch, num_classes).
    """

    def __init__(
        self, channels: Sequence[int], inner: Sequence[int], features: int, num_classes: int
    ) -> None:
        super().__init__()
        if len(channels) != len(inner):
            raise SettingError(
                "ScaleClassHead.inner", f"have {len(channels)} numbers", tuple(inner)
            )
        require_count("ScaleClassHead.num_classes", num_classes)
        self.widen = nn.ModuleList(map(_Bottleneck, channels, inner))
        self.down = nn.ModuleList(
            _normalized(nn.Conv2d(WIDER * fine, WIDER * coarse, 3, 2, padding=1, bias=False))
            for fine, coarse in pairwise(inner)
        )
        self.last = _normalized(nn.Conv2d(WIDER * inner[-1], features, 1, bias=False))
        self.classifier = nn.Linear(features, num_classes)

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """Return the logits."""
        y: Tensor = self.widen[0](z[0])
        for down, widen, coarser in zip(self.down, self.widen[1:], z[1:], strict=True):
            y = widen(coarser) + down(y)
        logits: Tensor = self.classifier(self.last(y).mean(dim=(2, 3)))
        return logits


class ScalePixelHead(nn.Module):
    """The segmentation head of Bai et al. (2020): all resolutions at the size of the finest.

    They are interpolated and concatenated; a convolution of side 1 with batch normalisation and
    ReLU and one to the classes follow, and bilinear interpolation to the size of the image.

    Args:
        channels: Channels of each resolution, the finest first.
        num_classes: Number of classes.
        scale: How many times smaller than the image the finest resolution is.

    Shape:
        Tuple of (batch, channels[i], height/2^i, width/2^i) to (batch, num_classes, scale * height,
        scale * width).
    """

    def __init__(self, channels: Sequence[int], num_classes: int, scale: int) -> None:
        super().__init__()
        require_count("ScalePixelHead.num_classes", num_classes)
        total = sum(channels)
        self.features = _normalized(nn.Conv2d(total, total, 1, bias=False))
        self.classifier = nn.Conv2d(total, num_classes, 1)
        self.scale = scale

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        """Return the logits of each pixel."""
        size = z[0].shape[2:]
        rest = [F.interpolate(one, size, mode="bilinear", align_corners=True) for one in z[1:]]
        y: Tensor = self.classifier(self.features(torch.cat([z[0], *rest], dim=1)))
        if self.scale == 1:
            return y
        return F.interpolate(y, scale_factor=self.scale, mode="bilinear", align_corners=False)


def _normalized(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(
        convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU(inplace=True)
    )
