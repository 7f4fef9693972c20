"""The networks of the paper on monotone operators, and small ones for small images and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.core.validate import SettingError, require_count
from equipoise.families.monotone.cell import Splitting, StepSize
from equipoise.families.monotone.layer import (
    ActivationLike,
    MonotoneConv2d,
    MonotoneDense,
    MonotoneMultiTier,
)
from equipoise.families.monotone.released import read_released
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ImageNetwork, require_image_shape
from equipoise.models.table_network import TableNetwork

__all__ = ["MonotoneOptions"]

ACCURACY: SolveOptions = {"tolerance": 1e-2, "max_steps": 100}
"""What the authors train to."""


class MonotoneOptions(SolveOptions, total=False):
    """The options that all these models hand to their layer; `MonotoneDense` explains them.

    Attributes:
        margin: The margin `m` of `I - W >= m I`, positive.
        activation: Its name (`equipoise list activations`).
        splitting: `peaceman-rachford`, `douglas-rachford`, `forward-backward` or `none`.
        step_size: That of the splitting, or `auto`.
    """

    margin: float
    activation: ActivationLike
    splitting: Splitting
    step_size: StepSize


def solved_to(accuracy: SolveOptions, options: MonotoneOptions) -> MonotoneOptions:
    """Return options with a model's own accuracy, unless the stopping rule is given in full."""
    if options.get("stop") is not None:
        return options
    chosen: MonotoneOptions = {**accuracy, **options}
    return chosen


def _flat(
    shape: tuple[int, int, int], features: int, num_classes: int, options: MonotoneOptions
) -> ImageNetwork:
    """Images as vectors, a dense layer and a linear map."""
    require_count("monotone.num_classes", num_classes)
    channels, height, width = shape
    layer = MonotoneDense(channels * height * width, features, **solved_to(ACCURACY, options))
    return ImageNetwork(nn.Flatten(), layer, nn.Linear(features, num_classes), shape)


@register_model("monotone-digits")
def digits(*, num_classes: int = 10, **options: Unpack[MonotoneOptions]) -> ImageNetwork:
    """Grey images of 8 x 8, such as scikit-learn's digits, by a monotone network of 32 units.

    Args:
        num_classes: Number of classes.
        **options: See `MonotoneOptions`.
    """
    return _flat((1, 8, 8), 32, num_classes, options)


@register_model("monotone-mnist")
def mnist(
    *, num_classes: int = 10, weights: str = "", **options: Unpack[MonotoneOptions]
) -> ImageNetwork:
    """MNIST, a dense monotone network of 87 units (Winston & Kolter, 2020, Table 1).

    There are 84,313 parameters, as published.

    Args:
        num_classes: Number of classes.
        weights: A file with the tensors of a released model, such as `mnist_fc_model_trained.pt`;
            give the margin that it was trained with. Empty draws new ones.
        **options: See `MonotoneOptions`.
    """
    if not weights:
        return _flat((1, 28, 28), 87, num_classes, options)
    model = read_released(weights, **solved_to(ACCURACY, options))
    classes = len(model.head.weight)  # type: ignore[arg-type]
    if classes != num_classes:
        rule = f"hold a head for {num_classes} classes"
        raise SettingError("monotone.weights", rule, weights, got=f"one for {classes}")
    return model


@register_model("monotone-table")
def table(
    *,
    input_shape: Sequence[int] = (4,),
    num_classes: int = 3,
    width: int = 32,
    **options: Unpack[MonotoneOptions],
) -> TableNetwork:
    """Rows of numbers, by a dense monotone network.

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        width: Length of the state.
        **options: See `MonotoneOptions`.
    """
    require_count("monotone-table.num_classes", num_classes)
    layer = MonotoneDense(input_shape[0], width, **solved_to({"tolerance": 1e-3}, options))
    return TableNetwork(layer, nn.Linear(width, num_classes), input_shape)


@register_model("monotone-cifar10-172k")
def cifar10_172k(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[MonotoneOptions],
) -> ImageNetwork:
    """CIFAR-10, one convolution of 81 channels (Winston & Kolter, 2020, Table 1).

    There are 172,218 parameters, as published: 3 x 3 kernels at 32 x 32, averages of 4 x 4 pixels
    of the framed image, a linear map.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `MonotoneOptions`.
    """
    require_count("monotone.num_classes", num_classes)
    shape = require_image_shape("monotone-cifar10-172k", input_shape)
    # The authors' averages are those of the image with its frame.
    fields = ((shape[1] + 2) // 4) * ((shape[2] + 2) // 4)
    head = nn.Sequential(
        nn.ZeroPad2d(1), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(81 * fields, num_classes)
    )
    layer = MonotoneConv2d(shape[0], 81, **solved_to(ACCURACY, options))
    return ImageNetwork(nn.Identity(), layer, head, shape)


def _tiers(
    channels: tuple[int, int, int],
    num_classes: int,
    input_shape: Sequence[int],
    options: MonotoneOptions,
) -> ImageNetwork:
    """Three tiers, each of half the sides of the one before, and a linear map of the last, framed.

    At 32 x 32 these are the authors'.
    """
    require_count("monotone.num_classes", num_classes)
    shape = require_image_shape("monotone", input_shape)
    framed = (shape[1] // 4 + 2) * (shape[2] // 4 + 2)
    head = nn.Sequential(
        nn.ZeroPad2d(1), nn.Flatten(), nn.Linear(channels[-1] * framed, num_classes)
    )
    layer = MonotoneMultiTier(shape[0], channels, shape[1:], **solved_to(ACCURACY, options))
    return ImageNetwork(nn.Identity(), layer, head, shape)


@register_model("monotone-cifar10-170k")
def cifar10_170k(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[MonotoneOptions],
) -> ImageNetwork:
    """CIFAR-10, three resolutions of 16, 32 and 60 channels (Winston & Kolter, 2020, Table 1).

    There are 170,194 parameters, as published.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `MonotoneOptions`.
    """
    return _tiers((16, 32, 60), num_classes, input_shape, options)


@register_model("monotone-cifar10-1m")
def cifar10_1m(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[MonotoneOptions],
) -> ImageNetwork:
    """CIFAR-10, three resolutions of 64, 128 and 128 channels (Winston & Kolter, 2020, Table 1).

    There are 1,014,546 parameters, as published.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images; the last map's size follows them.
        **options: See `MonotoneOptions`.
    """
    return _tiers((64, 128, 128), num_classes, input_shape, options)
