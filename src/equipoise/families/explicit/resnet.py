"""Residual networks (He et al., 2016) and wide ones (Zagoruyko & Komodakis, 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import nn

from equipoise.core.registry import choose
from equipoise.core.validate import require_count
from equipoise.models.extractor import (
    basic_stage,
    convolutional_extractor,
    residual_stage,
    residual_stem,
)
from equipoise.models.factory import register_model
from equipoise.models.image_network import ExplicitNetwork, require_image_shape

__all__ = ["Stem"]

Stem = Literal["large", "small"]
"""How a network begins: a 7 x 7 convolution and pooling, or one 3 x 3 convolution."""

WIDTH = 64
"""Channels of the first stage as published; each stage has twice those of the one before."""

SHAPES = {"large": (3, 224, 224), "small": (3, 32, 32)}


def _resnet(
    stages: Sequence[nn.Module],
    features: int,
    num_classes: int,
    stem: Stem,
    input_shape: Sequence[int] | None,
    width: int = WIDTH,
) -> ExplicitNetwork:
    require_count("resnet.num_classes", num_classes)
    choose("resnet.stem", stem, get_args(Stem))
    shape = require_image_shape("resnet", SHAPES[stem] if input_shape is None else input_shape)
    begin = (
        residual_stem(shape[0], width)
        if stem == "large"
        else convolutional_extractor(shape[0], [width], stride=1)
    )
    body = nn.Sequential(begin, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return ExplicitNetwork(body, nn.Linear(features, num_classes), shape, size_multiple=1)


def _basic(
    blocks: Sequence[int],
    num_classes: int,
    stem: Stem,
    input_shape: Sequence[int] | None,
    width: int,
) -> ExplicitNetwork:
    require_count("resnet.width", width)
    stages, into = [], width
    for index, count in enumerate(blocks):
        out = width * 2**index
        stages.append(basic_stage(into, out, count, stride=1 if index == 0 else 2))
        into = out
    return _resnet(stages, into, num_classes, stem, input_shape, width)


def _bottleneck(
    widening: int, num_classes: int, stem: Stem, input_shape: Sequence[int] | None
) -> ExplicitNetwork:
    stages, into = [], WIDTH
    for index, count in enumerate((3, 4, 6, 3)):
        width = WIDTH * 2**index
        out = 4 * width
        stride = 1 if index == 0 else 2
        stages.append(residual_stage(into, width * widening, out, count, stride))
        into = out
    return _resnet(stages, into, num_classes, stem, input_shape)


@register_model("resnet-18")
def resnet18(
    *,
    num_classes: int = 1000,
    stem: Stem = "large",
    input_shape: Sequence[int] | None = None,
    width: int = WIDTH,
) -> ExplicitNetwork:
    """ResNet-18 (He et al., 2016): 11.7 M parameters with 1000 classes.

    Args:
        num_classes: Number of classes.
        stem: `large` for images as in ImageNet, `small` for images such as CIFAR-10's.
        input_shape: Channels, height and width of the images, which may have other sizes as well;
            by default colour images of 224 x 224, or of 32 x 32 with the small stem.
        width: Channels of the first stage, which each stage after it doubles.
    """
    return _basic((2, 2, 2, 2), num_classes, stem, input_shape, width)


@register_model("resnet-34")
def resnet34(
    *,
    num_classes: int = 1000,
    stem: Stem = "large",
    input_shape: Sequence[int] | None = None,
    width: int = WIDTH,
) -> ExplicitNetwork:
    """ResNet-34 (He et al., 2016): 21.8 M parameters with 1000 classes.

    Args:
        num_classes: Number of classes.
        stem: `large` for images as in ImageNet, `small` for images such as CIFAR-10's.
        input_shape: Channels, height and width of the images, which may have other sizes as well;
            by default colour images of 224 x 224, or of 32 x 32 with the small stem.
        width: Channels of the first stage, which each stage after it doubles.
    """
    return _basic((3, 4, 6, 3), num_classes, stem, input_shape, width)


@register_model("resnet-50")
def resnet50(
    *,
    num_classes: int = 1000,
    stem: Stem = "large",
    input_shape: Sequence[int] | None = None,
) -> ExplicitNetwork:
    """ResNet-50 (He et al., 2016): 25.6 M parameters with 1000 classes.

    Args:
        num_classes: Number of classes.
        stem: `large` for images as in ImageNet, `small` for images such as CIFAR-10's.
        input_shape: Channels, height and width of the images, which may have other sizes as well;
            by default colour images of 224 x 224, or of 32 x 32 with the small stem.
    """
    return _bottleneck(1, num_classes, stem, input_shape)


@register_model("wide-resnet-50")
def wide_resnet50(
    *,
    num_classes: int = 1000,
    stem: Stem = "large",
    input_shape: Sequence[int] | None = None,
) -> ExplicitNetwork:
    """Wide-ResNet-50-2 (Zagoruyko & Komodakis, 2016): 68.9 M parameters with 1000 classes.

    Args:
        num_classes: Number of classes.
        stem: `large` for images as in ImageNet, `small` for images such as CIFAR-10's.
        input_shape: Channels, height and width of the images, which may have other sizes as well;
            by default colour images of 224 x 224, or of 32 x 32 with the small stem.
    """
    return _bottleneck(2, num_classes, stem, input_shape)
