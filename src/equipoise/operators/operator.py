"""Linear maps with their exact adjoints and proven bounds of their norms."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import require_count
from equipoise.operators.norms import convolution_bound, dense_norm

__all__ = [
    "Composed",
    "Convolution",
    "Dense",
    "Operator",
    "OperatorWeights",
    "Padding",
    "is_recorded",
    "plus",
    "separable",
]

Padding = Literal["zeros", "circular"]

OperatorWeights = tuple[Tensor, ...]
"""The weights of an operator, in its own order."""

START_NORM = 0.5
"""The operator norm that new weights have, about: small, as Algorithm 1 wants it."""


def is_recorded(value: Tensor) -> bool:
    """Whether autograd or a transform may still need a tensor, so that its memory must not be written to."""
    return torch.is_grad_enabled() or is_wrapped(value)


def plus(value: Tensor, other: Tensor, alpha: float = 1.0) -> Tensor:
    """Return `value + alpha other`, in the memory of `value` where nobody records it; `value` must be the caller's own."""
    return (
        torch.add(value, other, alpha=alpha)
        if is_recorded(value)
        else value.add_(other, alpha=alpha)
    )


class Operator(nn.Module, ABC):
    """A linear map `W` and its adjoint, as functions of explicit weights so that these are made once for each solve.

    `<W z, y> = <z, W^T y>` holds to machine precision.
    """

    @abstractmethod
    def weights(self) -> OperatorWeights:
        """Return the weights that are trained."""

    @abstractmethod
    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        """Return the weights of the adjoint."""

    @abstractmethod
    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        """Return `W z` for `W` with these weights."""

    @abstractmethod
    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        """Return `W^T y`, given what `transposed` returned."""

    @abstractmethod
    def bound(self, weights: OperatorWeights) -> Tensor:
        """Return a proven upper bound of the operator norm, differentiable."""

    @abstractmethod
    def zeros(self, c: Tensor) -> Tensor:
        """Return a state of zeros, given a tensor of the shape of `W z`."""

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        """Return `W z + c`."""
        return plus(self.apply_with(weights, z), c)

    @staticmethod
    def scaled(weights: OperatorWeights, factor: Tensor | float) -> OperatorWeights:
        """Return the weights of `factor W`."""
        return (*weights[:-1], weights[-1] * factor)

    @torch.no_grad()
    def scale_(self, factor: Tensor | float) -> None:
        """Multiply the operator by a number, in place."""
        self.weights()[-1].mul_(factor)

    def forward(self, z: Tensor) -> Tensor:
        """Return `W z`."""
        return self.apply_with(self.weights(), z)

    def adjoint(self, y: Tensor) -> Tensor:
        """Return `W^T y`."""
        return self.adjoint_with(self.transposed(self.weights()), y)

    def check(self, x: Tensor) -> None:
        """Raise if inputs like `x` cannot go with states that the operator acts on."""
        dtype = self.weights()[0].dtype
        if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"The input must be {dtype}, as the weights are; got {x.dtype}. Convert one "
                "of them."
            )


class Dense(Operator):
    """A matrix: `z -> z W^T` on rows.

    Args:
        in_features: Length of `z`.
        out_features: Length of `W z`.

    Shape:
        (batch, in_features) to (batch, out_features).
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Gaussian weights of norm about one half."""
        out, into = self.weight.shape
        nn.init.normal_(self.weight, std=START_NORM / (math.sqrt(out) + math.sqrt(into)))

    def weights(self) -> OperatorWeights:
        return (self.weight,)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return weights

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return z @ weights[0].T

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return y @ transposed[0]

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        return torch.addmm(c, z, weights[0].T)

    def zeros(self, c: Tensor) -> Tensor:
        return c.new_zeros(c.shape[0], self.weight.shape[1])

    def bound(self, weights: OperatorWeights) -> Tensor:
        return dense_norm(weights[0])

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 2:
            raise ValueError(f"The input must have shape (batch, features); got {tuple(x.shape)}.")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class Convolution(Operator):
    """A two-dimensional convolution of stride 1 that keeps the image size; its adjoint is a convolution too.

    The adjoint has the kernel turned by half a turn, with its channel axes exchanged, which runs
    faster than a transposed convolution.

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
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
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
        out, into, height, width = kernel.shape
        grouped = kernel.reshape(self.groups, out // self.groups, into, height, width).transpose(
            1, 2
        )
        return (grouped.reshape(self.groups * into, out // self.groups, height, width).flip(2, 3),)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._convolve(weights[0], z, self.margin)

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        left, right, top, bottom = self.margin
        return self._convolve(transposed[0], y, (right, left, bottom, top))

    def _convolve(self, kernel: Tensor, z: Tensor, margin: tuple[int, int, int, int]) -> Tensor:
        left, right, top, bottom = margin
        if self.padding == "zeros" and left == right and top == bottom:
            return F.conv2d(z, kernel, padding=(top, left), groups=self.groups)
        z = (
            F.pad(z, margin, mode="constant" if self.padding == "zeros" else "circular")
            if any(margin)
            else z
        )
        return F.conv2d(z, kernel, groups=self.groups)

    def zeros(self, c: Tensor) -> Tensor:
        zeros = c.new_zeros(c.shape[0], self.kernel.shape[1] * self.groups, *c.shape[2:])
        return zeros if is_wrapped(zeros) else zeros.contiguous(memory_format=torch.channels_last)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return convolution_bound(weights[0], groups=self.groups)

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


class Composed(Operator):
    """Several operators one after the other; the adjoint runs through their adjoints backwards.

    Its norm is bounded by the product of the parts' bounds.

    Args:
        parts: The operators, the one that acts first first.
    """

    def __init__(self, parts: Sequence[Operator]) -> None:
        super().__init__()
        if not parts:
            raise ValueError("Composed.parts must hold at least one operator; got none.")
        self.parts = nn.ModuleList(parts)

    def weights(self) -> OperatorWeights:
        return tuple(weight for part in self._parts for weight in part.weights())

    @property
    def _parts(self) -> list[Operator]:
        return list(self.parts)  # type: ignore[arg-type]

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return tuple(
            turned for part, own in self._split(weights) for turned in part.transposed(own)
        )

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        for part, own in self._split(weights):
            z = part.apply_with(own, z)
        return z

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        for part, own in reversed(self._split(transposed)):
            y = part.adjoint_with(own, y)
        return y

    def zeros(self, c: Tensor) -> Tensor:
        return self._parts[0].zeros(c)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return torch.stack([part.bound(own) for part, own in self._split(weights)]).prod()

    def check(self, x: Tensor) -> None:
        for part in self._parts:
            part.check(x)

    def _split(self, weights: OperatorWeights) -> list[tuple[Operator, OperatorWeights]]:
        split, place = [], 0
        for part in self._parts:
            count = len(part.weights())
            split.append((part, weights[place : place + count]))
            place += count
        return split


def separable(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    multiplier: int = 1,
    padding: Padding = "zeros",
) -> Composed:
    """Return a depthwise-separable convolution: each channel for itself, then a mix of channels at each pixel (OptEq, 7.3.2).

    Args:
        in_channels: Channels of the state.
        out_channels: Channels of the result.
        kernel_size: Side of the depthwise kernel, or its height and width.
        multiplier: Channels that the depthwise convolution makes of each one.
        padding: `zeros` or `circular`.
    """
    middle = multiplier * in_channels
    depthwise = Convolution(in_channels, middle, kernel_size, padding=padding, groups=in_channels)
    return Composed([depthwise, Convolution(middle, out_channels, 1)])
