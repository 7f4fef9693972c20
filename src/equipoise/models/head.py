"""Heads: maps from equilibria to classes. The last map of each is its `classifier`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.validate import require_count
from equipoise.layers.lipschitz import Bound, Chain, Part

__all__ = ["ImageHead", "PixelHead", "PooledHead"]


class PooledHead(nn.Module):
    """Batch normalisation, averages over a grid of equal fields, and a linear map.

    Args:
        channels: Channels of the equilibrium.
        grid: Fields along each side.
        num_classes: Number of classes.

    Shape:
        (batch, channels, height, width) to (batch, num_classes).
    """

    def __init__(self, channels: int, grid: int, num_classes: int) -> None:
        super().__init__()
        require_count("PooledHead.num_classes", num_classes)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Linear(channels * grid**2, num_classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits."""
        y: Tensor = self.classifier(self.pool(self.norm(z)).flatten(1))
        return y

    def output_lipschitz(self) -> Part:
        """Return how far the logits move with the equilibrium."""
        return Chain((self.norm, self.pool, self.classifier))


class ImageHead(nn.Module):
    """1 x 1 convolutions with ReLU and 2 x 2 max pooling, an average and a linear map.

    As in OptEq, Table 6.

    Args:
        widths: Channels of the equilibrium, and those that each convolution makes.
        num_classes: Number of classes.

    Shape:
        (batch, widths[0], height, width) to (batch, num_classes).
    """

    def __init__(self, widths: Sequence[int], num_classes: int) -> None:
        super().__init__()
        require_count("ImageHead.num_classes", num_classes)
        parts: list[nn.Module] = []
        for into, out in pairwise(widths):
            # Rounding up keeps the margin of odd images, and the one pixel of the smallest.
            parts += [nn.Conv2d(into, out, 1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
        self.features = nn.Sequential(*parts)
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits."""
        y: Tensor = self.classifier(self.features(z).mean(dim=(2, 3)))
        return y

    def output_lipschitz(self) -> Part:
        """Return how far the logits move with the equilibrium."""
        mean = Bound("mean", 1.0, "the mean of n pixels has the norm 1/sqrt(n)")
        return Chain((self.features, mean, self.classifier))


class PixelHead(nn.Module):
    """The head of a fully convolutional network: a class for each pixel (Long et al., 2015).

    A convolution of side 3 to a quarter of the channels, batch normalisation, ReLU, dropout, a
    convolution of side 1, and bilinear interpolation.

    Args:
        channels: Channels of the equilibrium.
        num_classes: Number of classes.
        scale: How much smaller than the image the equilibrium is.
        dropout: Probability of dropping a channel in training.

    Shape:
        (batch, channels, height, width) to (batch, num_classes, scale * height, scale * width).
    """

    def __init__(self, channels: int, num_classes: int, scale: int, dropout: float = 0.1) -> None:
        super().__init__()
        require_count("PixelHead.num_classes", num_classes)
        width = channels // 4
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout2d(dropout),
        )
        self.classifier = nn.Conv2d(width, num_classes, 1)
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        return F.interpolate(
            self.classifier(self.features(z)),
            scale_factor=self.scale,
            mode="bilinear",
            align_corners=False,
        )

    def output_lipschitz(self) -> Part:
        """Return how far the logits move with the equilibrium."""
        # Weights of a pixel add up to 1, and those that each pixel has in others to scale^2.
        larger = Bound("interpolation", float(self.scale), "|M|^2 <= |M|_1 |M|_inf")
        return Chain((self.features, self.classifier, larger))
