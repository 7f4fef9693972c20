"""Pooling as affine functions, and the largest of a window through ReLUs."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from equipoise.core.validate import SettingError
from equipoise.families.opteq.affine_map import Affine, Convolve
from equipoise.families.opteq.network_graph import Graph
from equipoise.prox.activation import ReLU

__all__ = ["adaptive_average_pool", "average_pool", "max_pool"]


def average_pool(
    place: str,
    value: Affine,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Affine:
    """Return averages over windows, as `torch.nn.functional.avg_pool2d` takes them."""
    size, border = _pair(kernel_size), _pair(padding)
    if ceil_mode or (any(border) and not count_include_pad):
        rule = "average over whole windows"
        remedy = "Leave ceil_mode and count_include_pad as they are by default."
        raise SettingError(place, rule, None, remedy, got="windows cut off at the border")
    kernel = value.bias.new_full((1, 1, *size), 1 / (divisor_override or math.prod(size)))
    return value.through(_each_channel(kernel, value, _pair(stride or size), border))


def adaptive_average_pool(place: str, value: Affine, output_size: Any) -> Affine:
    """Return averages over as many windows as asked for, all of one size."""
    image = value.shape[1:]
    wanted = [own or side for own, side in zip(_pair(output_size), image, strict=True)]
    if any(side % own for own, side in zip(wanted, image, strict=True)):
        got = f"{tuple(wanted)} for an image of {tuple(image)}"
        raise SettingError(place, "divide the image into equal parts", None, got=got)
    return average_pool(
        place, value, tuple(side // own for own, side in zip(wanted, image, strict=True))
    )


def max_pool(
    graph: Graph,
    place: str,
    value: Affine,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Affine:
    """Return the largest of each window, in rounds of `max(a, b) = a + relu(b - a)`."""
    size, border = _pair(kernel_size), _pair(padding)
    if ceil_mode or return_indices or _pair(dilation) != (1, 1):
        rule = "be max pooling without ceil_mode, indices and dilation"
        raise SettingError(place, rule, None, got="one of them")
    if any(border) and not graph.is_positive_value(value):
        rule = "come after a ReLU if it pads, since zeros stand for its empty border"
        raise SettingError(f"{place}.padding", rule, padding, "Use padding=0.")
    left = []
    for position in range(math.prod(size)):
        kernel = value.bias.new_zeros(1, 1, *size)
        kernel.view(-1)[position] = 1
        left.append(value.through(_each_channel(kernel, value, _pair(stride or size), border)))
    while len(left) > 1:
        pairs = zip(left[::2], left[1::2], strict=False)
        rest = left[len(left) - len(left) % 2 :]
        left = [a + graph.activate(ReLU(), b - a) for a, b in pairs] + rest
    return left[0]


def _each_channel(
    kernel: Tensor, value: Affine, stride: tuple[int, int], padding: tuple[int, int]
) -> Convolve:
    """The convolution of each channel with the same kernel, which is not trained."""
    channels = value.shape[0]
    return Convolve.make(
        kernel.expand(channels, -1, -1, -1).clone(),
        value.shape,
        trained=False,
        stride=stride,
        padding=padding,
        groups=channels,
    )


def _pair(value: Any) -> tuple[int, int]:
    height, width = value if isinstance(value, tuple | list) else (value, value)
    return height, width
