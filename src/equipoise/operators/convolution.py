"""Convolutions of images."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import require_count
from equipoise.operators.convolution_norm import (
    convolution_bound,
    convolution_within,
    slack_of,
)
from equipoise.operators.operator import START_NORM, Operator, OperatorWeights, distance
from equipoise.operators.orthogonal import (
    descend_to_frame,
    nearest_frame,
    swap_channels,
    symbol_floor,
)

__all__ = ["Convolution", "Padding", "convolve"]

Padding = Literal["zeros", "circular"]


class Convolution(Operator):
    """A two-dimensional convolution of stride 1 that keeps the image size.

    The adjoint is a convolution too, with the kernel turned by half a turn and its channel axes
    exchanged, which runs faster than a transposed convolution.

    Args:
        in_channels: Channels of `z`.
        out_channels: Channels of `W z`.
        kernel_size: Side of the kernel, or its height and width.
        padding: `zeros` or `circular`.
        groups: Channel groups that do not mix; `in_channels` makes it depthwise.

    Shape:
        (batch, in_channels, height, width) to (batch, out_channels, height, width).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int] = 3,
        *,
        padding: Padding = "zeros",
        groups: int = 1,
    ) -> None:
        super().__init__()
        choose("Convolution.padding", padding, get_args(Padding))
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"Convolution.groups must divide both channel counts; got {groups} for "
                f"{in_channels} and {out_channels}."
            )
        height, width = (
            kernel_size if isinstance(kernel_size, tuple | list) else (kernel_size, kernel_size)
        )
        for side in (height, width):
            require_count("Convolution.kernel_size", side)
        self.padding = padding
        self.groups = groups
        self.kernel = nn.Parameter(torch.empty(out_channels, in_channels // groups, height, width))
        top, left = (height - 1) // 2, (width - 1) // 2
        self.margin = (left, width - 1 - left, top, height - 1 - top)  # as torch's pad wants them
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Gaussian weights of operator norm about one half."""
        out, into, height, width = self.kernel.shape
        spread = math.sqrt(height * width) * (math.sqrt(out // self.groups) + math.sqrt(into))
        nn.init.normal_(self.kernel, std=START_NORM / spread)

    def weights(self) -> OperatorWeights:
        return (self.kernel,)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        (kernel,) = weights
        return (swap_channels(kernel, self.groups).flip(2, 3),)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._convolve(weights[0], z, self.margin)

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        left, right, top, bottom = self.margin
        return self._convolve(transposed[0], y, (right, left, bottom, top))

    def _convolve(self, kernel: Tensor, z: Tensor, margin: tuple[int, int, int, int]) -> Tensor:
        return convolve(kernel, z, margin, self.padding, self.groups)

    def zeros(self, c: Tensor) -> Tensor:
        zeros = c.new_zeros(c.shape[0], self.kernel.shape[1] * self.groups, *c.shape[2:])
        return zeros if is_wrapped(zeros) else zeros.contiguous(memory_format=torch.channels_last)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return convolution_bound(weights[0], groups=self.groups)

    def within(self, weights: OperatorWeights, limit: float) -> bool:
        return convolution_within(weights[0], limit, groups=self.groups)

    def drift(self, weights: OperatorWeights, other: OperatorWeights) -> float:
        # |K(w)| <= sum_t |K_t| <= sqrt(h w) |K|_F at every frequency.
        taps = self.kernel.shape[2] * self.kernel.shape[3]
        return slack_of(weights[0]) * math.sqrt(taps) * distance(weights[0], other[0])

    @torch.no_grad()
    def draw_frame_(self) -> None:
        """Draw a frame at the kernel's centre, and zeros elsewhere (Xiao et al., 2018)."""
        left, _, top, _ = self.margin
        self.kernel.zero_()
        for group in self.kernel.chunk(self.groups):
            group[:, :, top, left] = nn.init.orthogonal_(group.new_empty(group.shape[:2]))

    @torch.no_grad()
    def orthogonalize_(self, size: float) -> None:
        """Bring all singular values close to `size`.

        Those of a depthwise kernel with one output for each channel are only scaled: all of them
        are equal for shifts of the image alone.
        """
        if self.kernel.shape[1] == 1 and len(self.kernel) == self.groups:
            self.scale_(size / self.bound(self.weights()).clamp_min(torch.finfo(torch.half).tiny))
        elif self.kernel.shape[2:] == (1, 1):
            for group in self.kernel.chunk(self.groups):
                group[:, :, 0, 0] = size * nearest_frame(group[:, :, 0, 0] / size)
        else:
            self.kernel.copy_(size * descend_to_frame(self.kernel / size, self.groups))

    def lower_bound(self, weights: OperatorWeights) -> float:
        return symbol_floor(weights[0], self.groups)

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 4:
            raise ValueError(
                f"The input must have shape (batch, channels, height, width); got {tuple(x.shape)}."
            )
        height, width = self.kernel.shape[2:]
        if x.shape[2] < height or x.shape[3] < width:
            raise ValueError(
                f"Convolution.kernel_size must not exceed the image; got a kernel of {height} "
                f"x {width} for an image of "
                f"{x.shape[2]} x {x.shape[3]}."
            )

    def extra_repr(self) -> str:
        out, into, height, width = self.kernel.shape
        return (
            f"{into * self.groups}, {out}, kernel_size=({height}, {width}), "
            f"padding={self.padding}, groups={self.groups}"
        )


def convolve(
    kernel: Tensor,
    z: Tensor,
    margin: tuple[int, int, int, int],
    padding: Padding,
    groups: int = 1,
) -> Tensor:
    """Return images convolved with a kernel, after a margin was added to them.

    Args:
        kernel: Shape (out, in / groups, h, w).
        z: The images.
        margin: Pixels added on the left, on the right, above and below.
        padding: What is added.
        groups: As of `torch.nn.Conv2d`.
    """
    left, right, top, bottom = margin
    if padding == "zeros" and left == right and top == bottom:
        return F.conv2d(z, kernel, padding=(top, left), groups=groups)
    z = (
        F.pad(z, margin, mode="constant" if padding == "zeros" else "circular")
        if any(margin)
        else z
    )
    return F.conv2d(z, kernel, groups=groups)
