"""The networks of the OptEq paper, and small ones for small images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.core.validate import SettingError, require_count
from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.conv import OptEqConv2d, each_side
from equipoise.families.opteq.layer import (
    ActivationLike,
    OptEqLayer,
    RegularizerLike,
    each_activation,
)
from equipoise.families.opteq.norm_control import BOUND, Init, Norm
from equipoise.layers.options import SolveOptions
from equipoise.models.extractor import convolutional_extractor, residual_extractor
from equipoise.models.factory import register_model
from equipoise.models.head import ImageHead, PixelHead, PooledHead
from equipoise.models.image_network import ImageNetwork
from equipoise.operators import Composed, Operator, separable

__all__ = ["OptEqOptions"]


class OptEqOptions(SolveOptions, total=False):
    """The options that all these models hand to their layer; `OptEq` explains them.

    Attributes:
        alpha: Fraction of the new value in (0, 1], for all layers or one for each.
        learn_alpha: Whether `alpha` is trained.
        norm: How norms are controlled: `none`, `scale`, `project` or `orthogonal`.
        bound: Largest norm of a controlled weight, at most 1.
        init: Weights to begin with: `small`, `orthogonal`, or `auto`, which goes with the norm.
        activation: Its name (`equipoise list activations`) or a table, for all layers or one for
            each.
        regularizer: The name of a feature regulariser (`equipoise list regularizers`) or a table
            such as `{ name = "incay", epsilon = 0.1 }`.
        strength: Factor of the regulariser.
    """

    alpha: float | Sequence[float]
    learn_alpha: bool
    norm: Norm
    bound: float
    init: Init
    activation: ActivationLike | Sequence[ActivationLike]
    regularizer: RegularizerLike | None
    strength: float


SMALL: OptEqOptions = {"tolerance": 1e-3, "max_steps": 50}
"""What networks for small images solve to: tighter than training needs, and cheap."""

LARGE: OptEqOptions = {"tolerance": 1e-2, "max_steps": 30}
"""What networks for large images solve to, as in the paper's looser training (OptEq, Table 8)."""


KERNEL = 3
"""Side of the kernels of networks for small images."""

START_BOUND = 0.9
"""The quick bound of the norms that pairs of separable convolutions begin with."""


def _solved_to(accuracy: OptEqOptions, options: OptEqOptions) -> OptEqOptions:
    """The options with a model's own accuracy, unless the user gives the stopping rule in full."""
    return options if options.get("stop") is not None else accuracy | options


@register_model("opteq-digits")
def digits(*, num_classes: int = 10, **options: Unpack[OptEqOptions]) -> ImageNetwork:
    """Grey images of 8 x 8, such as scikit-learn's digits: one layer, a convex problem.

    The layer has 32 channels.

    Args:
        num_classes: Number of classes.
        **options: See `OptEqOptions`.
    """
    return _pooled((1, 8, 8), 16, (32,), 2, num_classes, options, stride=1)


@register_model("opteq-mnist")
def mnist(*, num_classes: int = 10, **options: Unpack[OptEqOptions]) -> ImageNetwork:
    """Grey images of 28 x 28, such as MNIST: three layers of 32, 64 and 64 channels.

    Args:
        num_classes: Number of classes.
        **options: See `OptEqOptions`.
    """
    return _pooled((1, 28, 28), 24, (32, 64, 64), 4, num_classes, options)


@register_model("opteq-cifar10-199k")
def cifar10_199k(
    *,
    num_classes: int = 10,
    stride: int = 2,
    pool: int | Sequence[int] = 1,
    **options: Unpack[OptEqOptions],
) -> ImageNetwork:
    """CIFAR-10, five layers of 16 to 128 channels with 199 k parameters (OptEq, Tables 3, 5, 8).

    The state has 29 channels, with which there are 198,013 parameters in all; the paper does not
    give their number.

    Args:
        num_classes: Number of classes.
        stride: How much the extractor shrinks the images; 1 keeps their size, for four times the
            time.
        pool: Side of the fields of pixels that layers see as one, for all or one for each:
            `[1, 1, 2, 2, 4]` lets the wide layers see far, for less than half of the time.
        **options: See `OptEqOptions`.
    """
    return _pooled(
        (3, 32, 32), 29, (16, 32, 64, 128, 128), 4, num_classes, options, stride=stride, pool=pool
    )


@register_model("opteq-cifar10-162k")
def cifar10_162k(
    *,
    num_classes: int = 10,
    stride: int = 2,
    pool: int | Sequence[int] = 1,
    **options: Unpack[OptEqOptions],
) -> ImageNetwork:
    """CIFAR-10, five layers of 16 to 128 channels with at most 162 k parameters (OptEq, Table 4).

    Input and state have 28 channels, so that a solve starts at the input as in Algorithm 1, and
    there are 158,878 parameters in all; with 29 there would be 164,541.

    Args:
        num_classes: Number of classes.
        stride: How much the extractor shrinks the images; 1 keeps their size, for four times the
            time.
        pool: Side of the fields of pixels that layers see as one, for all or one for each:
            `[1, 1, 2, 2, 4]` lets the wide layers see far, for less than half of the time.
        **options: See `OptEqOptions`.
    """
    return _pooled(
        (3, 32, 32), 28, (16, 32, 64, 64, 128), 4, num_classes, options, stride=stride, pool=pool
    )


@register_model("opteq-cifar10-1.4m")
def cifar10_1400k(
    *,
    num_classes: int = 10,
    stride: int = 2,
    pool: int | Sequence[int] = 1,
    **options: Unpack[OptEqOptions],
) -> ImageNetwork:
    """CIFAR-10, five layers of 64 to 512 channels with 1.4 M parameters (OptEq, Table 4).

    The paper trains it with `regularizer='decorrelation'`.

    Args:
        num_classes: Number of classes.
        stride: How much the extractor shrinks the images; 1 keeps their size, for four times the
            time.
        pool: Side of the fields of pixels that layers see as one, for all or one for each:
            `[1, 1, 2, 2, 4]` lets the wide layers see far, for less than half of the time.
        **options: See `OptEqOptions`.
    """
    return _pooled(
        (3, 32, 32),
        64,
        (64, 128, 256, 256, 512),
        4,
        num_classes,
        options,
        stride=stride,
        pool=pool,
    )


def _pooled(
    input_shape: tuple[int, int, int],
    channels: int,
    hidden: Sequence[int],
    grid: int,
    num_classes: int,
    options: OptEqOptions,
    *,
    stride: int = 2,
    pool: int | Sequence[int] = 1,
) -> ImageNetwork:
    """An extractor of one convolution, convolutional layers, and averages over a grid.

    Input and state have the same channels, so that a solve starts at the input (Algorithm 1).
    """
    require_count("OptEq.stride", stride)
    sides = each_side("OptEq", pool, len(hidden))
    smallest = min(-(-side // stride) for side in input_shape[1:])
    if smallest // max(sides) < KERNEL <= smallest:
        rule = f"be at most {smallest // KERNEL}, so that kernels of {KERNEL} x {KERNEL} fit"
        raise SettingError("OptEq.pool", rule, max(sides))
    if any(input_shape[1] % (stride * side) for side in sides if side > 1):
        rule = f"divide {smallest}, the side of the state, and the stride that of the images"
        raise SettingError("OptEq.pool", rule, pool)
    if smallest < KERNEL:
        largest = (min(input_shape[1:]) - 1) // (KERNEL - 1)
        raise SettingError(
            "OptEq.stride",
            f"be at most {largest}, so that kernels of {KERNEL} x {KERNEL} fit into the state",
            stride,
        )
    return ImageNetwork(
        convolutional_extractor(input_shape[0], [channels], stride=stride),
        OptEqConv2d(channels, channels, hidden, pool=sides, **_solved_to(SMALL, options)),
        PooledHead(channels, grid, num_classes),
        input_shape,
        size_multiple=1 if max(sides) == 1 else stride * math.lcm(*sides),
    )


@register_model("opteq-imagenet-small")
def imagenet_small(
    *, num_classes: int = 1000, layers: int = 5, **options: Unpack[OptEqOptions]
) -> ImageNetwork:
    """ImageNet, separable layers after two stages of ResNet-50 (OptEq-Small, Table 6).

    The number of layers is the paper's, which also speaks of five learned alphas. They have 2.7 M
    parameters, 0.53 M each, and the network without its classifier 13.6 M; the table gives 7 M and
    18 M, which contradict its kernels and channels. 13 layers have the published size.

    Args:
        num_classes: Number of classes.
        layers: Number of layers.
        **options: See `OptEqOptions`.
    """
    require_count("opteq-imagenet-small.layers", layers)
    equilibrium = OptEqConv2d(
        512, 512, [512] * layers, separable=True, **_solved_to(LARGE, options)
    )
    _keep_scale(equilibrium)
    return ImageNetwork(
        residual_extractor(1, 256, 8),
        equilibrium,
        ImageHead((512, 1024, 2048), num_classes),
        (3, 224, 224),
        size_multiple=1,
    )


@register_model("opteq-imagenet-mid")
def imagenet_mid(
    *, num_classes: int = 1000, layers: int = 3, **options: Unpack[OptEqOptions]
) -> ImageNetwork:
    """ImageNet, pairs of separable layers after two Wide-ResNet-50 stages (OptEq-Middle, Table 6).

    `W_l` is a depthwise 5 x 5 convolution from 512 to 1024 channels, a mix to 512, a depthwise 3 x
    3 convolution and a mix. The number of layers is the table's. They have 4.9 M parameters, 1.6 M
    each, and the network without its classifier 31.9 M; the table gives 13 M and 40 M, which
    contradict its kernels and channels. 8 layers have the published size.

    Args:
        num_classes: Number of classes.
        layers: Number of layers.
        **options: See `OptEqOptions`.
    """
    require_count("opteq-imagenet-mid.layers", layers)
    return ImageNetwork(
        residual_extractor(2, 512, 7),
        _paired(512, layers, **_solved_to(LARGE, options)),
        ImageHead((512, 1024, 2048), num_classes),
        (3, 224, 224),
        size_multiple=1,
    )


def _paired(
    channels: int,
    layers: int,
    *,
    activation: ActivationLike | Sequence[ActivationLike] = "relu",
    alpha: float | Sequence[float] = 0.8,
    learn_alpha: bool = False,
    norm: Norm = "scale",
    bound: float = BOUND,
    init: Init = "auto",
    regularizer: RegularizerLike | None = None,
    strength: float = 0.1,
    **solve: Unpack[SolveOptions],
) -> OptEqLayer:
    """Layers whose weights are two separable convolutions, the first with twice the channels."""

    def weight() -> Operator:
        pair = Composed(
            [separable(channels, channels, 5, multiplier=2), separable(channels, channels, 3)]
        )
        # As large as a quick bound proves to be allowed; proven norms are then about one half.
        if not any(weight.is_meta for weight in pair.weights()):
            pair.scale_(START_BOUND / pair.quick_bound(pair.weights()))
        return pair

    def injection() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 5, padding=2, groups=channels, bias=False),
            nn.Conv2d(2 * channels, channels, 1, bias=False),
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1),
        )

    cell = OptEqCell(
        [weight() for _ in range(layers)],
        [injection() for _ in range(layers)],
        each_activation(activation, layers),
        alpha=alpha,
        learn_alpha=learn_alpha,
        norm=norm,
        bound=bound,
        start=True,
    )
    cell.draw_(init)
    equilibrium = OptEqLayer(cell, regularizer, strength, **solve)
    _keep_scale(equilibrium)
    return equilibrium


def _keep_scale(equilibrium: OptEqLayer) -> None:
    """Draw injections that keep the scale of the input.

    Torch's own would lose a factor of 1.7 with each convolution.
    """
    for part in equilibrium.layers.inputs.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, nonlinearity="linear")


@register_model("opteq-cityscapes")
def cityscapes(*, num_classes: int = 19, **options: Unpack[OptEqOptions]) -> ImageNetwork:
    """Cityscapes, a class for each pixel, at an eighth of the size (OptEq, Table 10).

    Three layers of 256, 512 and 512 channels.

    Args:
        num_classes: Number of classes.
        **options: See `OptEqOptions`.
    """
    return ImageNetwork(
        convolutional_extractor(3, [64, 128, 256]),
        OptEqConv2d(256, 256, (256, 512, 512), **_solved_to(LARGE, options)),
        PixelHead(256, num_classes, scale=8),
        (3, 512, 1024),
        size_multiple=8,
    )
