"""Residual DEQs and weight-tied networks of the same cell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from equipoise.families.residual.cell import ResidualCell, WeightTied
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.head import PooledHead
from equipoise.models.image_network import (
    ExplicitNetwork,
    ImageNetwork,
    require_image_shape,
)
from equipoise.models.normalized_convolution import Normalization

__all__ = ["ResidualOptions"]

ACCURACY: SolveOptions = {"solver": "anderson", "tolerance": 1e-2, "max_steps": 25}
"""As in the thesis's experiments: Anderson, at most 25 steps."""


class ResidualOptions(SolveOptions, total=False):
    """The options of the cell and of its solve.

    Attributes:
        inner: Channels between the two convolutions of the cell.
        groups: Groups of the normalisations.
        deviation: Standard deviation of the convolutions' first weights.
        normalization: How kernels are normalised: `none`, `weight` or `spectral`.
        spectral_norm: What the norms of the convolutions are at most under `spectral`.
        dropout: Probability of dropping a channel in training, with one mask for a whole solve.
    """

    inner: int
    groups: int
    deviation: float
    normalization: Normalization
    spectral_norm: float
    dropout: float


def _cell(channels: int, options: ResidualOptions) -> ResidualCell:
    return ResidualCell(
        channels,
        options.pop("inner", 64),
        groups=options.pop("groups", 8),
        deviation=options.pop("deviation", 0.01),
        normalization=options.pop("normalization", "none"),
        spectral_norm=options.pop("spectral_norm", 0.5),
        dropout=options.pop("dropout", 0.0),
    )


def _extractor(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, stride, padding=1), nn.BatchNorm2d(channels)
    )


def _network(
    input_shape: Sequence[int], stride: int, num_classes: int, options: ResidualOptions
) -> ImageNetwork:
    shape = require_image_shape("residual-deq", input_shape)
    cell = _cell(48, options)
    solve = options if options.get("stop") is not None else ACCURACY | options
    return ImageNetwork(
        _extractor(shape[0], 48, stride),
        Equilibrium(cell, **solve),
        PooledHead(48, 4, num_classes),
        shape,
    )


@register_model("residual-deq-mnist")
def residual_deq_mnist(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (1, 28, 28),
    **options: Unpack[ResidualOptions],
) -> ImageNetwork:
    """Residual DEQ for grey images of 28 x 28 (mon-NTK thesis, eq. 4.1), solved at 14 x 14.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images.
        **options: See `ResidualOptions`.
    """
    return _network(input_shape, 2, num_classes, options)


@register_model("residual-deq-cifar10")
def residual_deq_cifar10(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    **options: Unpack[ResidualOptions],
) -> ImageNetwork:
    """Residual DEQ for CIFAR-10 (mon-NTK thesis, eq. 4.1), 48 channels at 32 x 32.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images.
        **options: See `ResidualOptions`.
    """
    return _network(input_shape, 1, num_classes, options)


@register_model("weight-tied-cifar10")
def weight_tied_cifar10(
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
    steps: int = 6,
    checkpoint: bool = False,
    inner: int = 64,
    groups: int = 8,
    deviation: float = 0.01,
    normalization: Normalization = "none",
    spectral_norm: float = 0.5,
    dropout: float = 0.0,
) -> ExplicitNetwork:
    """The residual DEQ's cell applied a fixed number of times (thesis, Figure 4.4: 6, 11, 18).

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images.
        steps: How often the cell is applied.
        checkpoint: Whether steps are computed again in backward, for memory.
        inner: Channels between the two convolutions of the cell.
        groups: Groups of the normalisations.
        deviation: Standard deviation of the convolutions' first weights.
        normalization: How kernels are normalised: `none`, `weight` or `spectral`.
        spectral_norm: What the norms of the convolutions are at most under `spectral`.
        dropout: Probability of dropping a channel in training, with one mask for all steps.
    """
    shape = require_image_shape("weight-tied-cifar10", input_shape)
    cell = ResidualCell(
        48,
        inner,
        groups=groups,
        deviation=deviation,
        normalization=normalization,
        spectral_norm=spectral_norm,
        dropout=dropout,
    )
    body = nn.Sequential(
        _extractor(shape[0], 48, 1), WeightTied(cell, steps, checkpoint=checkpoint)
    )
    return ExplicitNetwork(body, PooledHead(48, 4, num_classes), shape)
