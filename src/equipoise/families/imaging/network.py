"""The network inside: convolutions of controlled norm between learnt activations."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_positive
from equipoise.families.opteq.norm_control import NormControl
from equipoise.layers.certificate import Factor
from equipoise.operators.convolution import Convolution

__all__ = ["LearntSlopes", "ResidualNetwork"]

NOISE = 0.2
"""How much of a kernel that begins near the identity is drawn."""
THRESHOLD = 0.1
"""Where new activations bend, for images in [0, 1]."""


class LearntSlopes(nn.Module):
    """An activation of two slopes for each channel, both learnt: `q` near zero, `p` far from it.

    `s(t) = p t + (q - p) max(-theta, min(t, theta))`, Lipschitz continuous with `max(|p|, |q|)`.
    `p = 1, q = 0` is the soft threshold, `p = 0, q = 1` clips. Networks of bounded norm restore
    images better with learnt slopes than with ReLU, which keeps half of what it is given (Bohra et
    al., 2021).

    Args:
        channels: Channels of the images.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        shape = (channels, 1, 1)
        self.outer = nn.Parameter(torch.full(shape, 0.5))
        self.inner = nn.Parameter(torch.ones(shape))
        self.theta = nn.Parameter(torch.full(shape, THRESHOLD))

    def forward(self, t: Tensor) -> Tensor:
        """Return `s(t)`."""
        theta = self.theta.abs()
        return self.outer * t + (self.inner - self.outer) * t.clamp(-theta, theta)

    @torch.no_grad()
    def bound(self) -> float:
        """Return the largest slope."""
        return float(torch.maximum(self.outer.abs(), self.inner.abs()).amax())

    @torch.no_grad()
    def project_(self) -> None:
        """Bring all slopes into [-1, 1]."""
        self.outer.clamp_(-1, 1)
        self.inner.clamp_(-1, 1)


class ResidualNetwork(nn.Module):
    """`N(z) = W_d s(... s(W_1 z + b_1) ...)`, the network of `R(z) = z + N(z - c)`, `c` learnt.

    `R - I` is Lipschitz continuous with the product of all norms and slopes. Each norm is kept
    below `epsilon^(1/d)` and each slope below 1, so that the product is at most `epsilon`.

    Args:
        channels: Channels of the images.
        width: Channels between convolutions.
        depth: How many convolutions, at least 2.
        kernel_size: Side of the convolutions, odd.
        epsilon: The largest Lipschitz constant.

    Shape:
        (batch, channels, height, width) to the same.
    """

    def __init__(
        self, channels: int, width: int, depth: int, kernel_size: int, epsilon: float
    ) -> None:
        super().__init__()
        for name, count in (("channels", channels), ("width", width), ("depth", depth)):
            require_count(f"ResidualNetwork.{name}", count)
        require_count("ResidualNetwork.kernel_size", kernel_size)
        require_positive("ResidualNetwork.epsilon", epsilon)
        if depth < 2:
            raise SettingError("ResidualNetwork.depth", "be at least 2", depth)
        if kernel_size % 2 == 0:
            raise SettingError("ResidualNetwork.kernel_size", "be odd", kernel_size)
        self.epsilon = epsilon
        widths = [channels, *[width] * (depth - 1), channels]
        self.maps = nn.ModuleList(
            Convolution(into, out, kernel_size) for into, out in pairwise(widths)
        )
        self.biases = nn.ParameterList(torch.zeros(width, 1, 1) for _ in range(depth - 1))
        self.activations = nn.ModuleList(LearntSlopes(width) for _ in range(depth - 1))
        self.centre = nn.Parameter(torch.full((channels, 1, 1), 0.5))
        self.control = NormControl()
        self.reset_parameters()

    @property
    def limit(self) -> float:
        """The largest norm of a convolution."""
        return float(self.epsilon ** (1 / len(self.maps)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw kernels of the largest norm."""
        for each in self.maps:
            assert isinstance(each, Convolution)
            each.reset_parameters()
            if not each.kernel.is_meta:  # which has no values to measure
                each.scale_(self.limit / each.bound(each.weights()))

    @torch.no_grad()
    def begin_at_(self, sign: int) -> None:
        """Draw weights with which `N(z)` is about `sign epsilon z`.

        Args:
            sign: 1 or -1.
        """
        for number, each in enumerate(self.maps):
            assert isinstance(each, Convolution)
            if each.kernel.is_meta:
                continue
            each.reset_parameters()
            out, into, height, width = each.kernel.shape
            # Each channel of the image on the same channels inside, spread evenly.
            spread = torch.zeros(out, into)
            for i in range(max(out, into)):
                spread[i % out, i % into] = 1
            spread /= torch.linalg.matrix_norm(spread, 2)
            each.kernel.mul_(NOISE)
            each.kernel[:, :, height // 2, width // 2] += spread.to(each.kernel)
            each.scale_(self.limit / each.bound(each.weights()))
            if number == 0 and sign < 0:
                each.scale_(-1)
        for activation in self.activations:
            assert isinstance(activation, LearntSlopes)
            activation.outer.fill_(0.9)  # other than the inner slope, so that theta counts

    def forward(self, z: Tensor) -> Tensor:
        """Return `N(z)`, where `z` is the difference of an image and `centre`."""
        *inner, last = self.maps
        for each, bias, activation in zip(inner, self.biases, self.activations, strict=True):
            z = activation(each(z) + bias)
        value: Tensor = last(z)
        return value

    @torch.no_grad()
    def factors(self) -> tuple[Factor, ...]:
        """Return the factors of a Lipschitz constant of `N`, at the present weights."""
        slopes = [each.bound() for each in self.activations] + [1.0]  # type: ignore[operator]
        found = []
        for number, (each, slope) in enumerate(zip(self.maps, slopes, strict=True), 1):
            assert isinstance(each, Convolution)
            norm = float(each.bound(each.weights()))
            found.append(Factor(f"layer {number}", norm * slope, norm))
        return tuple(found)

    def lipschitz(self) -> float:
        """Return a Lipschitz constant of `N`, at the present weights."""
        return math.prod(factor.value for factor in self.factors())

    def project_(self) -> None:
        """Bring norms and slopes back within their limits."""
        for number, each in enumerate(self.maps):
            assert isinstance(each, Convolution)
            self.control.project_(number, each, self.limit)
        for activation in self.activations:
            activation.project_()  # type: ignore[operator]
