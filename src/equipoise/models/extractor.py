"""Extractors: convolutions that turn images into the input of an equilibrium."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.layers.lipschitz import Part, Sum

__all__ = [
    "BasicBlock",
    "Bottleneck",
    "basic_stage",
    "convolutional_extractor",
    "residual_extractor",
    "residual_stage",
    "residual_stem",
]


def convolutional_extractor(
    in_channels: int, widths: Sequence[int], *, stride: int = 2
) -> nn.Sequential:
    """Return 3 x 3 convolutions with batch normalisation and ReLU.

    Images come out smaller by `stride ** len(widths)`.

    Args:
        in_channels: Channels of the images.
        widths: Channels that each convolution makes.
        stride: How much each convolution shrinks the image.
    """
    parts: list[nn.Module] = []
    for width in widths:
        parts += _convolution(in_channels, width, 3, stride=stride)
        in_channels = width
    return nn.Sequential(*parts)


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 and -34: `relu(x + B(x))` (He et al., 2016).

    `B` is two convolutions of side 3, the first with the stride. Where the shape changes, `x` goes
    through a convolution of side 1.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: How much the image shrinks.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(in_channels, out_channels, 3, stride=stride),
            *_convolution(out_channels, out_channels, 3, activate=False),
        )
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return `relu(x + B(x))`."""
        return torch.relu(self.shortcut(x) + self.branch(x))

    def output_lipschitz(self) -> Part:
        """Return how far the output moves with the input."""
        return Sum((self.shortcut, self.branch), type(self).__name__)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: `relu(x + B(x))` (He et al., 2016).

    `B` is a sequence of convolutions of sides 1, 3 and 1, the middle one with the stride. Where the
    shape changes, `x` goes through a convolution of side 1.

    Args:
        in_channels: Channels of the input.
        width: Channels in the middle.
        out_channels: Channels of the output.
        stride: How much the image shrinks.
    """

    def __init__(self, in_channels: int, width: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(in_channels, width, 1),
            *_convolution(width, width, 3, stride=stride),
            *_convolution(width, out_channels, 1, activate=False),
        )
        self.shortcut = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return `relu(x + B(x))`."""
        return torch.relu(self.shortcut(x) + self.branch(x))

    def output_lipschitz(self) -> Part:
        """Return how far the output moves with the input."""
        return Sum((self.shortcut, self.branch), type(self).__name__)


def basic_stage(in_channels: int, out_channels: int, blocks: int, stride: int = 1) -> nn.Sequential:
    """Return a stage of ResNet-18 or -34: basic blocks, of which the first changes the shape.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        blocks: Number of blocks.
        stride: How much the image shrinks.
    """
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(
        first, *(BasicBlock(out_channels, out_channels) for _ in range(blocks - 1))
    )


def residual_stem(in_channels: int = 3, width: int = 64) -> nn.Sequential:
    """Return a ResNet's stem: a 7 x 7 convolution and max pooling, both with stride 2.

    Args:
        in_channels: Channels of the images.
        width: Channels that the convolution makes.
    """
    return nn.Sequential(
        *_convolution(in_channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)
    )


def residual_stage(
    in_channels: int, width: int, out_channels: int, blocks: int, stride: int = 1
) -> nn.Sequential:
    """Return a stage of a ResNet: bottlenecks, of which the first changes the shape.

    Args:
        in_channels: Channels of the input.
        width: Channels within the bottlenecks.
        out_channels: Channels of the output.
        blocks: Number of bottlenecks.
        stride: How much the image shrinks.
    """
    first = Bottleneck(in_channels, width, out_channels, stride)
    return nn.Sequential(
        first, *(Bottleneck(out_channels, width, out_channels) for _ in range(blocks - 1))
    )


def residual_extractor(widening: int, width: int, blocks: int) -> nn.Sequential:
    """Return the stem and two stages of ResNet-50, and further bottlenecks at their last shape.

    Features have 512 channels, at an eighth of the image's size. The stages themselves have 1.4 M
    parameters (4.1 M if wide); the further blocks make up the published size of the extractor
    (OptEq, Table 6).

    Args:
        widening: Factor of the stages' widths 64 and 128: 1 for ResNet-50, 2 for Wide-ResNet-50.
        width: Channels within the further bottlenecks.
        blocks: Number of further bottlenecks.
    """
    return nn.Sequential(
        residual_stem(),
        residual_stage(64, 64 * widening, 256, blocks=3),
        residual_stage(256, 128 * widening, 512, blocks=4, stride=2),
        residual_stage(512, width, 512, blocks=blocks),
    )


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if in_channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(*_convolution(in_channels, out_channels, 1, stride=stride, activate=False))


def _convolution(
    in_channels: int, out_channels: int, size: int, *, stride: int = 1, activate: bool = True
) -> list[nn.Module]:
    """A convolution with batch normalisation and perhaps ReLU, drawn as He et al. (2015) do."""
    convolution = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    parts: list[nn.Module] = [convolution, nn.BatchNorm2d(out_channels)]
    return [*parts, nn.ReLU()] if activate else parts
