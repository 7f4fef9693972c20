"""The networks of the paper on multiscale DEQs, and smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

from torch import nn

from equipoise.core.validate import SettingError
from equipoise.families.multiscale.head import ScaleClassHead, ScalePixelHead
from equipoise.families.multiscale.layer import Multiscale
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ImageNetwork

__all__ = ["MultiscaleOptions"]


class MultiscaleOptions(SolveOptions, total=False):
    """The options of the cell and of its solve.

    Attributes:
        groups: Groups of the normalisations.
        weight_norm: Whether kernels are normalised, once for each solve.
        dropout: Probability of dropping a channel of a block in training, with one mask for a
            solve.
        deviation: Standard deviation of the first kernels.
        gain: First weights of the normalisations through which the state comes back; see
            `MultiscaleCell`.
    """

    groups: int
    weight_norm: bool
    dropout: float
    deviation: float
    gain: float


class _Size(NamedTuple):
    """The numbers of one network.

    Attributes:
        channels: Channels of each resolution.
        expansion: That of the residual blocks.
        halvings: How often the image is halved before the equilibrium.
        inner: Channels inside the bottlenecks of the classification head.
        features: Numbers that the classifier sees.
    """

    channels: tuple[int, ...]
    expansion: int
    halvings: int
    inner: tuple[int, ...] = ()
    features: int = 0


DIGITS = _Size((8, 16), 3, 0, (4, 8), 64)
TINY = _Size((8, 16, 32), 5, 0, (4, 8, 16), 128)
LARGE = _Size((32, 64, 128, 256), 5, 0, (14, 28, 56, 112), 1680)
IMAGENET_SMALL = _Size((32, 64, 128, 256), 4, 2, (28, 56, 112, 224), 2048)
IMAGENET_XL = _Size((88, 176, 352, 704), 6, 2, (32, 64, 128, 256), 2048)
CAMVID = _Size((16, 32, 64), 3, 2)
CITYSCAPES_SMALL = _Size((32, 64, 128, 256), 4, 2)
CITYSCAPES_LARGE = _Size((80, 160, 320, 640), 5, 2)
CITYSCAPES_XL = _Size((88, 176, 352, 704), 6, 2)


def _extractor(in_channels: int, channels: int, halvings: int) -> nn.Sequential:
    """Two convolutions of side 3 and one of side 1, with batch normalisation and ReLU."""
    parts: list[nn.Module] = []
    for place, side in enumerate((3, 3, 1)):
        stride = 2 if place < halvings else 1
        into = in_channels if place == 0 else channels
        conv = nn.Conv2d(into, channels, side, stride, padding=side // 2, bias=False)
        # Before batch statistics are known, too, what is injected should outweigh the state.
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        parts += [conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


def _network(
    name: str,
    size: _Size,
    input_shape: Sequence[int],
    num_classes: int,
    options: MultiscaleOptions,
    **defaults: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """A classifier if the size has a classification head, else a class for each pixel."""
    multiple = 2 ** (size.halvings + len(size.channels) - 1)
    if len(input_shape) == 3 and any(side % multiple for side in input_shape[1:]):
        raise SettingError(
            f"{name}.input_shape",
            f"have sides that are multiples of {multiple}, for {len(size.channels)} resolutions",
            tuple(input_shape),
            "Set data.size.",
        )
    head: nn.Module
    if size.inner:
        head = ScaleClassHead(size.channels, size.inner, size.features, num_classes)
    else:
        head = ScalePixelHead(size.channels, num_classes, 2**size.halvings)
    return ImageNetwork(
        _extractor(input_shape[0], size.channels[0], size.halvings),
        Multiscale(size.channels, size.expansion, **(defaults | options)),
        head,
        input_shape,
        size_multiple=multiple,
    )


@register_model("multiscale-digits")
def digits(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (1, 8, 8),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """Grey images of 8 x 8, such as scikit-learn's digits, by a multiscale DEQ of two resolutions.

    There are 29,530 parameters: 8 channels at 8 x 8 and 16 at 4 x 4.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network("multiscale-digits", DIGITS, input_shape, num_classes, options, groups=4)


@register_model("multiscale-cifar10-tiny")
def cifar10_tiny(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """CIFAR-10, three resolutions of 8, 16 and 32 channels (Bai et al., 2020, Table 1).

    There are 175,194 parameters; the paper says 170K (MDEQ-small without augmentation, 87.1 %
    reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network(
        "multiscale-cifar10-tiny",
        TINY,
        input_shape,
        num_classes,
        options,
        groups=4,
        dropout=0.15,
    )


@register_model("multiscale-cifar10-large")
def cifar10_large(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """CIFAR-10, four resolutions of 32 to 256 channels (Bai et al., 2020, Table 1).

    There are 11,095,934 parameters; the paper says 10M (93.8 % reported with augmentation).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network(
        "multiscale-cifar10-large", LARGE, input_shape, num_classes, options, dropout=0.3
    )


@register_model("multiscale-imagenet-small")
def imagenet_small(
    *,
    num_classes: int = 1000,
    input_shape: Sequence[int] = (3, 224, 224),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """ImageNet, four resolutions of 32 to 256 channels (Bai et al., 2020, Table 2, MDEQ-small).

    There are 17,042,680 parameters; the paper says 18M (75.5 % reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network("multiscale-imagenet-small", IMAGENET_SMALL, input_shape, num_classes, options)


@register_model("multiscale-imagenet-xl")
def imagenet_xl(
    *,
    num_classes: int = 1000,
    input_shape: Sequence[int] = (3, 224, 224),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """ImageNet, four resolutions of 88 to 704 channels (Bai et al., 2020, Table 2, MDEQ-XL).

    There are 90,459,440 parameters with the authors' released settings; the paper says 81M (79.2 %
    reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network("multiscale-imagenet-xl", IMAGENET_XL, input_shape, num_classes, options)


@register_model("multiscale-camvid")
def camvid(
    *,
    num_classes: int = 11,
    input_shape: Sequence[int] = (3, 176, 240),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """Street scenes, a class for each pixel, by three resolutions of 16, 32 and 64 channels.

    There are 353,307 parameters: a size for one CPU, and none of the paper's. The finest resolution
    is a quarter of the image's.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network("multiscale-camvid", CAMVID, input_shape, num_classes, options)


@register_model("multiscale-cityscapes-small")
def cityscapes_small(
    *,
    num_classes: int = 19,
    input_shape: Sequence[int] = (3, 512, 1024),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """Cityscapes, a class for each pixel (Bai et al., 2020, Table 3, MDEQ-small).

    There are 7,399,827 parameters; the paper says 7.8M (75.1 % mIoU reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network(
        "multiscale-cityscapes-small",
        CITYSCAPES_SMALL,
        input_shape,
        num_classes,
        options,
        dropout=0.02,
    )


@register_model("multiscale-cityscapes-large")
def cityscapes_large(
    *,
    num_classes: int = 19,
    input_shape: Sequence[int] = (3, 512, 1024),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """Cityscapes, a class for each pixel (Bai et al., 2020, Table 3, MDEQ-large).

    There are 55,954,659 parameters; the paper says 53.0M (77.8 % mIoU reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network(
        "multiscale-cityscapes-large",
        CITYSCAPES_LARGE,
        input_shape,
        num_classes,
        options,
        dropout=0.03,
    )


@register_model("multiscale-cityscapes-xl")
def cityscapes_xl(
    *,
    num_classes: int = 19,
    input_shape: Sequence[int] = (3, 512, 1024),
    **options: Unpack[MultiscaleOptions],
) -> ImageNetwork:
    """Cityscapes, a class for each pixel (Bai et al., 2020, Table 3, MDEQ-XL).

    There are 79,550,435 parameters with the authors' released settings; the paper says 70.9M
    (80.3 % mIoU reported).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images for which it is made; it takes images
            of all sizes that its resolutions divide.
        **options: See `MultiscaleOptions`.
    """
    return _network(
        "multiscale-cityscapes-xl", CITYSCAPES_XL, input_shape, num_classes, options, dropout=0.04
    )
