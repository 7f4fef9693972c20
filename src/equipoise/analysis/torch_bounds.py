"""Lipschitz constants of torch's own modules, in Euclidean norms and evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equipoise.layers.lipschitz import Bound, round_up, unknown
from equipoise.operators import convolution_bound, dense_norm

__all__ = ["bound_torch_module", "channel_scales", "is_isometry", "torch_kind"]

ISOMETRIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
"""Modules that change no distance between two samples in evaluation mode."""

Shape = tuple[int, ...]
FindShape = Callable[[], Shape | None]
"""Returns the shape of a module's input, batch first, or None if nobody can tell."""


def is_isometry(module: nn.Module) -> bool:
    """Return whether a module changes no distance between two samples in evaluation mode."""
    if torch_kind(module) not in ISOMETRIES:
        return False
    if isinstance(module, nn.Flatten):
        return module.start_dim > 0  # samples stay apart
    return not isinstance(module, nn.Unflatten) or (isinstance(module.dim, int) and module.dim > 0)


def torch_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, as torch calls it if one of its weights is parametrised."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


@torch.no_grad()
def bound_torch_module(
    module: nn.Module, name: str, find_shape: FindShape, scales: Tensor | None = None
) -> Bound:
    """Return a proven bound of one of torch's modules, or say that none is known.

    Args:
        module: The module.
        name: What to call it.
        find_shape: Tells the shape of its input, if the bound depends on it.
        scales: What each channel of its output is multiplied by afterwards, for linear maps.
    """
    kind = torch_kind(module)
    find = _LINEAR.get(kind)
    if find is not None:
        return Bound(name, *find(module, scales))
    if kind in _POOLS:
        found = _POOLS[kind](module, find_shape())
        if found is None:
            return unknown(name, f"{kind.__name__} with such settings, or without a sample to try")
        return Bound(name, *found)
    if kind in _NORMS:
        own = channel_scales(module)
        if own is None:
            return unknown(name, "it normalises by the batch, having no running statistics")
        return Bound(name, float(own.abs().max()), "largest factor of a channel, in eval mode")
    slope = _SLOPES.get(kind)
    if slope is not None:
        value = slope(module)
        if value == math.inf:
            return unknown(name, f"{kind.__name__} jumps with such settings")
        return Bound(name, value, "largest slope")
    return unknown(name, f"nothing is known of {kind.__name__}")


def channel_scales(module: nn.Module) -> Tensor | None:
    """Return what batch normalisation multiplies each channel by in evaluation mode, in float64."""
    norm: Any = module
    if torch_kind(module) not in _NORMS or norm.running_var is None:
        return None
    scale: Tensor = (norm.running_var.double() + norm.eps).rsqrt() * (1 + 1e-14)
    return scale if norm.weight is None else scale * norm.weight.detach().double()


Found = tuple[float, str]


def _linear(module: Any, scales: Tensor | None) -> Found:
    weight = module.weight.double()
    weight = weight if scales is None else weight * scales[:, None]
    return round_up(float(dense_norm(weight))), "spectral norm" + _folded(scales)


def _convolution(module: Any, scales: Tensor | None) -> Found:
    kernel = module.weight.double()
    kernel = kernel[:, :, None] if kernel.dim() == 3 else kernel
    if module.padding_mode not in ("zeros", "circular"):
        return math.inf, f"padding {module.padding_mode!r} repeats pixels"
    if module.padding_mode == "circular" and not isinstance(module.padding, str):
        reach = [size - 1 for size in module.kernel_size]
        sides = zip(module.padding, module.dilation, reach, strict=True)
        if any(2 * padding > step * own for padding, step, own in sides):
            return math.inf, "circular padding beyond the kernel's reach repeats outputs"
    if scales is not None:
        kernel = kernel * scales[:, None, None, None]
    # At any dilation the frequencies are the same, and a stride leaves outputs out.
    value = float(convolution_bound(kernel, groups=module.groups))
    stride = (1, *module.stride) if len(module.stride) == 1 else module.stride
    plain = module.padding_mode == "zeros" and set(module.dilation) == {1} and module.groups == 1
    if plain and max(stride) > 1:
        value = min(value, float(convolution_bound(_polyphase(kernel, stride))))
    return round_up(value), "supremum of the symbol (Ehlich & Zeller, 1964)" + _folded(scales)


def _polyphase(kernel: Tensor, stride: tuple[int, int]) -> Tensor:
    """The kernel with which a convolution of a stride acts on blocks of pixels as channels."""
    (out, into, height, width), (down, across) = kernel.shape, stride
    padded = torch.nn.functional.pad(kernel, (0, -width % across, 0, -height % down))
    rows, columns = padded.shape[2] // down, padded.shape[3] // across
    blocks = padded.reshape(out, into, rows, down, columns, across)
    return blocks.permute(0, 1, 3, 5, 2, 4).reshape(out, into * down * across, rows, columns)


def _folded(scales: Tensor | None) -> str:
    return "" if scales is None else ", batch normalisation folded in"


_LINEAR: dict[type[nn.Module], Callable[[Any, Tensor | None], Found]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _windows(size: int, count: int) -> Tensor:
    """The matrix of averages over `count` windows of a line, as adaptive pooling takes them."""
    rows = torch.zeros(count, size, dtype=torch.float64)
    for number in range(count):
        start, end = number * size // count, -(-(number + 1) * size // count)
        rows[number, start:end] = 1 / (end - start)
    return rows


def _adaptive(module: Any, shape: Shape | None) -> Found | None:
    if shape is None:
        return None
    sizes = zip(shape[-2:], _pair(module.output_size), strict=True)
    norms = [float(dense_norm(_windows(side, count or side))) for side, count in sizes]
    return round_up(math.prod(norms)), f"norms of the averages of {shape[-2]} x {shape[-1]} pixels"


def _average(module: Any, _: Shape | None) -> Found:
    size, stride = _pair(module.kernel_size), _pair(module.stride)
    overlaps = _overlaps(size, stride)
    # Averages at a border that are over fewer pixels have larger weights, up to 1.
    whole = not module.ceil_mode and (module.count_include_pad or not any(_pair(module.padding)))
    divisor = module.divisor_override or math.prod(size)
    rows = math.prod(size) / divisor
    weight = 1 / divisor if whole or module.divisor_override else 1.0
    return round_up(math.sqrt(rows * overlaps * weight)), "|M|^2 <= |M|_1 |M|_inf"


def _maximum(module: Any, _: Shape | None) -> Found | None:
    if _pair(module.dilation) != (1, 1) or module.return_indices:
        return None
    overlaps = _overlaps(_pair(module.kernel_size), _pair(module.stride))
    return round_up(math.sqrt(overlaps)), "each pixel is in so many windows, squared"


def _overlaps(size: tuple[int, int], stride: tuple[int, int]) -> int:
    """In how many windows a pixel is at most."""
    return math.prod(-(-own // step) for own, step in zip(size, stride, strict=True))


_POOLS: dict[type[nn.Module], Callable[[Any, Shape | None], Found | None]] = {
    nn.AdaptiveAvgPool2d: _adaptive,
    nn.AvgPool2d: _average,
    nn.MaxPool2d: _maximum,
}


def _softplus(module: Any) -> float:
    """1, if what is left out beyond the threshold is lost in rounding."""
    return 1.0 if module.threshold >= nn.Softplus().threshold else math.inf


def _one(_: Any) -> float:
    return 1.0


_SLOPES: dict[type[nn.Module], Callable[[Any], float]] = {
    nn.ZeroPad2d: _one,
    nn.ReLU: _one,
    nn.ReLU6: _one,
    nn.Tanh: _one,
    nn.Softplus: _softplus,
    nn.Softsign: _one,
    nn.Softshrink: _one,
    nn.Hardtanh: _one,
    nn.LogSigmoid: _one,
    nn.Sigmoid: lambda _: 0.25,
    nn.LeakyReLU: lambda module: max(1.0, abs(module.negative_slope)),
    nn.PReLU: lambda module: max(1.0, float(module.weight.abs().max())),
    nn.ELU: lambda module: max(1.0, abs(module.alpha)),
    nn.SiLU: lambda _: 1.0999,  # 1.09984 at 2.3994
    nn.GELU: lambda _: 1.1291,  # 1.12890 at sqrt(2), 1.12899 with tanh
    nn.Mish: lambda _: 1.0886,  # 1.08850 at 1.4906
}
