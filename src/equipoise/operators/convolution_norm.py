"""Proven bounds of the norms of convolutions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from equipoise.core.transforms import full_precision, outside_graphs
from equipoise.core.validate import require_size
from equipoise.operators.norms import MARGIN, dense_norm
from equipoise.operators.symbol import KernelSymbol, SeparableSymbol, Symbol, wave
from equipoise.operators.symbol_search import find_worst, is_below

__all__ = [
    "convolution_bound",
    "convolution_within",
    "separable_bound",
    "separable_density",
    "separable_quick_bound",
    "separable_within",
    "slack_of",
]

# Grid frequencies for each step of a kernel's length: at most cos(pi / 24)**-2 - 1 = 1.73 % of
# slack.
DENSITY = 12
MANY = 128  # channels above which a separable convolution has half as many in each direction


@outside_graphs
def convolution_bound(
    kernel: Tensor, *, groups: int = 1, circular_size: tuple[int, int] | None = None
) -> Tensor:
    """Return an upper bound of a two-dimensional convolution's norm, at any image size.

    It holds for zero and for circular padding.

    On images without borders the norm is `sup_w |K(w)|` over all frequencies, with the matrices
    `K(w) = sum_t K_t exp(-i w t)` on channels. Zero padding restricts that convolution to a part of
    the plane, circular padding to some of the frequencies, a stride to some of the outputs, so all
    of them have at most this norm. `u^H K(w) v` is a trigonometric polynomial of degree
    `(h - 1) / 2` and `(w - 1) / 2` about its centre, so on a grid of `N x M` frequencies (Riesz,
    1914; Ehlich & Zeller, 1964)

        sup_w |K(w)| <= max_grid |K(w)| / (cos(pi (h - 1) / 2N) cos(pi (w - 1) / 2M)).

    With `N = 12 (h - 1)` this is at most 1.8 % above the supremum, and for kernels of height and
    width 1 it is the norm. The norm of the kernel reshaped to (out, in h w) bounds nothing.

    The largest matrix of the grid is found without recording gradients, and Cholesky factorisations
    prove of the others that they are not larger. The gradient is that of the largest one's norm.
    The result is NaN if an entry is not finite.

    Args:
        kernel: Shape (out, in / groups, h, w).
        groups: As of `torch.nn.Conv2d`. The bound is the largest of the groups' bounds.
        circular_size: Height and width of the images, if padding is circular and the stride is 1.
            The norm is then the maximum over `height x width` frequencies (Sedghi et al., 2019),
            which is returned without any slack but for rounding.
    """
    _check(kernel, groups)
    height, width = kernel.shape[2:]
    if groups == height == width == 1:
        return dense_norm(kernel.flatten(1))
    slack, grid = slack_of(kernel), _grid(kernel)
    if circular_size is not None:
        require_size("convolution_bound.circular_size", circular_size)
        slack *= math.cos(math.pi / (2 * DENSITY)) ** ((height > 1) + (width > 1))
        grid = (circular_size[0] if height > 1 else 1, circular_size[1] if width > 1 else 1)
    taps = torch.stack(kernel.double().chunk(groups))
    waves: Tensor = _WorstWave.apply(taps, None, grid)  # type: ignore[no-untyped-call]
    matrix = torch.complex(
        *(torch.einsum("goihw,ghw->oi", taps, part) for part in (waves.real, waves.imag))
    )
    return (slack * dense_norm(matrix)).to(kernel.dtype)


@outside_graphs
def separable_bound(depthwise: Tensor, pointwise: Tensor, channels: int) -> Tensor:
    """Return an upper bound of the norm of a depthwise convolution followed by a pointwise one.

    The pair is one convolution, with the symbol `K(w) = sum_j P_j diag(d_j(w))`, which is bounded
    as in `convolution_bound`: the product of the two norms is larger, often several times. Nothing
    is cut off between the two, because a pointwise convolution sees single pixels. (Between two
    convolutions with borders something is, so that their symbols' product bounds nothing.)

    With more than 128 channels the grid is coarser, and the bound at most 7.2 % above the supremum,
    or 17.2 % with several kernels for each channel.

    Args:
        depthwise: Shape (channels times kernels for each, 1, h, w).
        pointwise: Shape (out, channels times kernels for each, 1, 1).
        channels: Channels of the input.
    """
    taps, mix = _separate(depthwise, pointwise, channels)
    density = separable_density(depthwise, channels)
    waves: Tensor = _WorstWave.apply(taps, mix, _grid(depthwise, density))  # type: ignore[no-untyped-call]
    d = torch.complex(
        *(torch.einsum("cjhw,hw->cj", taps, part) for part in (waves.real, waves.imag))
    )
    norm = dense_norm(torch.einsum("ocj,cj->oc", mix.to(d.dtype), d))
    return (slack_of(depthwise, density) * norm).to(depthwise.dtype)


@torch.no_grad()
def separable_quick_bound(depthwise: Tensor, pointwise: Tensor, channels: int) -> float:
    """Return a bound above `separable_bound`, for the norm of one real matrix.

    `K(w) K(w)^H <= P diag(a) P^T` for `a >= sum_j |d_j(w)|^2`, here the largest over the grid.

    Args:
        depthwise: As for `separable_bound`.
        pointwise: As for `separable_bound`.
        channels: As for `separable_bound`.
    """
    taps, mix = _separate(depthwise, pointwise, channels)
    density = separable_density(depthwise, channels)
    grid = _grid(depthwise, density)
    symbols = torch.fft.fft2(taps, s=[max(n, k) for n, k in zip(grid, taps.shape[2:], strict=True)])
    lengths = symbols.abs().square().sum(dim=1).amax(dim=(1, 2)).sqrt()  # (channels,)
    norm = float(dense_norm((mix * lengths[:, None]).flatten(1)))
    return slack_of(depthwise, density) * norm * (1 + 4 * torch.finfo(depthwise.dtype).eps)


@outside_graphs
@torch.no_grad()
def convolution_within(kernel: Tensor, limit: float, *, groups: int = 1) -> bool:
    """Return whether `convolution_bound` is at most a limit, for less than the bound costs.

    Args:
        kernel: As for `convolution_bound`.
        limit: What the bound is compared with.
        groups: As for `convolution_bound`.
    """
    _check(kernel, groups)
    if kernel.shape[2] == kernel.shape[3] == groups == 1:
        return bool(dense_norm(kernel.flatten(1)) <= limit)
    taps = torch.stack(kernel.double().chunk(groups))
    return _within(KernelSymbol(taps, _grid(kernel)), kernel, limit)


@outside_graphs
@torch.no_grad()
def separable_within(depthwise: Tensor, pointwise: Tensor, channels: int, limit: float) -> bool:
    """Return whether `separable_bound` is at most a limit, for less than the bound costs.

    Args:
        depthwise: As for `separable_bound`.
        pointwise: As for `separable_bound`.
        channels: As for `separable_bound`.
        limit: What the bound is compared with.
    """
    taps, mix = _separate(depthwise, pointwise, channels)
    density = separable_density(depthwise, channels)
    symbol = SeparableSymbol(taps, mix, _grid(depthwise, density))
    return _within(symbol, depthwise, limit, density)


def separable_density(depthwise: Tensor, channels: int) -> int:
    """Return the grid's density for separable convolutions: each frequency costs `channels^3`.

    Complex matrices, of several kernels for each channel, cost four times as much as real ones.
    """
    if channels <= MANY:
        return DENSITY
    return DENSITY // 2 if len(depthwise) == channels else DENSITY // 3


def slack_of(kernel: Tensor, density: int = DENSITY) -> float:
    """Return what the largest norm on a kernel's grid is multiplied by."""
    axes = (kernel.shape[2] > 1) + (kernel.shape[3] > 1)
    rounding = 1 + MARGIN + 2 * torch.finfo(kernel.dtype).eps
    return rounding / math.cos(math.pi / (2 * density)) ** axes


def _separate(depthwise: Tensor, pointwise: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Kernels as (channels, kernels for each, h, w) and a matrix as (out, channels, ...)."""
    taps = depthwise.double().reshape(channels, -1, *depthwise.shape[2:])
    return taps, pointwise.double().reshape(len(pointwise), channels, -1)


def _within(symbol: Symbol, kernel: Tensor, limit: float, density: int = DENSITY) -> bool:
    with full_precision(kernel.device.type):
        # The bound itself is rounded once more, to the precision of the weights.
        rounding = 1 + torch.finfo(kernel.dtype).eps + 1e-11
        return is_below(symbol, limit / (slack_of(kernel, density) * rounding))


def _grid(kernel: Tensor, density: int = DENSITY) -> tuple[int, int]:
    height, width = kernel.shape[2:]
    # A kernel of height or width 1 is the same at all frequencies of that axis.
    return density * (height - 1) or 1, density * (width - 1) or 1


def _check(kernel: Tensor, groups: int) -> None:
    if kernel.dim() != 4 or not kernel.numel():
        raise ValueError(
            f"convolution_bound.kernel must have shape (out, in, h, w); got {tuple(kernel.shape)}."
        )
    if groups < 1 or len(kernel) % groups:
        raise ValueError(
            f"convolution_bound.groups must divide the {len(kernel)} output channels; got {groups}."
        )


class _WorstWave(torch.autograd.Function):
    """The waves `exp(-i w t)` at the frequency `w` of a grid where `|K(w)|` is largest.

    Of a kernel with groups they are zero in all groups but the worst, shape (groups, h, w); of a
    separable convolution they have shape (h, w).
    """

    @staticmethod
    def forward(taps: Tensor, mix: Tensor | None, grid: tuple[int, int]) -> Tensor:
        height, width = taps.shape[-2:]
        with full_precision(taps.device.type):
            if mix is not None:
                frequency = find_worst(SeparableSymbol(taps, mix, grid))[1]
                return torch.from_numpy(wave(frequency, height, width)).to(taps.device)
            group, frequency = find_worst(KernelSymbol(taps, grid))
        waves = torch.zeros(len(taps), height, width, dtype=torch.complex128, device=taps.device)
        waves[group] = torch.from_numpy(wave(frequency, height, width))
        return waves

    @staticmethod
    def setup_context(ctx: Any, _inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(_ctx: Any, _g: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def jvp(_ctx: Any, *_tangents: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        def member(number: int) -> Tensor:
            chosen = (
                value.select(dim, number)
                if isinstance(value, Tensor) and dim is not None
                else value
                for value, dim in zip(inputs, in_dims, strict=True)
            )
            waves: Tensor = _WorstWave.apply(*chosen)  # type: ignore[no-untyped-call]
            return waves

        return torch.stack([member(number) for number in range(info.batch_size)]), 0
