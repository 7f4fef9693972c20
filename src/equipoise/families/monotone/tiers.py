"""Several resolutions as one monotone operator network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_size
from equipoise.families.monotone.convolution import (
    autocorrelation,
    centred,
    filter_image,
    frequency_matrices,
    normalized,
    turned,
)
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.resolvent import invert
from equipoise.families.monotone.tier_maps import (
    FRAME,
    convolve,
    follow,
    grow,
    kernel_gradient,
    lead,
    shrink,
    woodbury,
)
from equipoise.layers.lipschitz import Bound
from equipoise.operators import convolution_bound, dense_norm
from equipoise.operators.operator import OperatorWeights

__all__ = ["MonotoneTiers", "TierInput"]

SIDE = 3


class _Weights(NamedTuple):
    """The kernels of a block lower triangular `W`, or of a multiple of it.

    `(W z)_i = K_i z_i + G_i^T N_i z_i + Q_i N_(i-1) z_(i-1)`, where `N_i` leads to the next tier,
    at half the resolution, and is followed there by `Q_i` alone.
    """

    K: tuple[Tensor, ...]
    N: tuple[Tensor, ...]
    G: tuple[Tensor, ...]
    Q: tuple[Tensor, ...]


class MonotoneTiers(MonotoneOperator):
    """`W = (1 - m) I - A^T A + B - B^T` on several resolutions (Winston & Kolter, 2020, eq. 14).

    `A` has convolutions `A_i` on its diagonal and convolutions `N_i` of stride 2 below it, from
    tier `i` to tier `i + 1`. `B` has convolutions `B_i` on its diagonal, and `-A_(i+1)^T N_i` below
    it, which cancels the blocks above the diagonal: so `W` is block lower triangular, and its
    resolvent is found tier by tier.

    A block on the diagonal, `P + a N^T N`, is inverted by Woodbury's identity,
    `P^-1 - P^-1 N^T (I/a + N P^-1 N^T)^-1 N P^-1`, in which `P` and `N P^-1 N^T` are convolutions
    on the finer and the coarser tier. For that, images lie in a frame of one pixel, in which the
    activation is zero, and are periodic (see `MonotoneConvolution`).

    Args:
        channels: Channels of each tier, the finest first.
        size: Height and width of the finest tier; each further one has half of it.
        margin: `m`.

    Shape:
        (batch, numbers of all tiers), twice.
    """

    def __init__(self, channels: Sequence[int], size: tuple[int, int], margin: float = 1.0) -> None:
        super().__init__(margin)
        if len(channels) < 2:
            raise SettingError(
                "MonotoneTiers.channels",
                "name at least two tiers",
                tuple(channels),
                "Use MonotoneConv2d for one.",
            )
        for own in channels:
            require_count("MonotoneTiers.channels", own)
        require_size("MonotoneTiers.size", size)
        last = 2 ** (len(channels) - 1)
        if any(side % last or side // last < SIDE for side in size):
            raise SettingError(
                "MonotoneTiers.size",
                f"have sides that are multiples of {last} and at least {SIDE * last}, for "
                f"{len(channels)} tiers",
                tuple(size),
            )
        self.channels = tuple(channels)
        self.sizes = [(size[0] >> tier, size[1] >> tier) for tier in range(len(channels))]
        self.A = nn.ParameterList(_kernel(own, own) for own in channels)
        self.B = nn.ParameterList(_kernel(own, own) for own in channels)
        self.N = nn.ParameterList(_kernel(fine, coarse) for fine, coarse in pairwise(channels))
        self.size_A = nn.ParameterList(torch.ones(()) for _ in channels)
        self.size_B = nn.ParameterList(torch.ones(()) for _ in channels)
        self.size_N = nn.ParameterList(torch.ones(()) for _ in channels[1:])

    def weights(self) -> OperatorWeights:
        A, B, N = (
            [normalized(*pair) for pair in zip(kernels, sizes, strict=True)]
            for kernels, sizes in (
                (self.A, self.size_A),
                (self.B, self.size_B),
                (self.N, self.size_N),
            )
        )
        diagonal = [
            centred(F.pad(b - turned(b), FRAME) - autocorrelation(a), 1 - self.margin)
            for a, b in zip(A, B, strict=True)
        ]
        return (*diagonal, *N, *(-kernel for kernel in N), *(-2 * turned(a) for a in A[1:]))

    def _split(self, weights: OperatorWeights) -> _Weights:
        tiers = len(self.channels)
        rest = [tiers - 1] * 3
        ends = [tiers, *(tiers + sum(rest[: n + 1]) for n in range(3))]
        parts = [weights[start:end] for start, end in pairwise([0, *ends])]
        return _Weights(*parts)

    def combined(self, weights: OperatorWeights, p: float, q: float) -> OperatorWeights:
        own = self._split(weights)
        scaled = [tuple(q * kernel for kernel in kernels) for kernels in (own.G, own.Q)]
        return (*(centred(q * kernel, p) for kernel in own.K), *own.N, *scaled[0], *scaled[1])

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        own = self._split(weights)
        return (*map(turned, own.K), *own.N, *own.G, *map(turned, own.Q))

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._product(weights, z, framed=False)

    def apply_enlarged(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._product(weights, z, framed=True)

    def _product(self, weights: OperatorWeights, z: Tensor, *, framed: bool) -> Tensor:
        own, images = self._split(weights), self._images(z, framed=framed)
        found = []
        below = None
        for tier, image in enumerate(images):
            value = convolve(image, own.K[tier], framed=framed)
            if below is not None:
                value = value + follow(below, own.Q[tier - 1], framed=framed)
            if tier + 1 < len(images):
                below = shrink(image, own.N[tier], framed=framed)
                value = value + grow(below, own.G[tier], image, framed=framed)
            found.append(value)
        return _flat(found)

    def adjoint_with(self, turned_weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._adjoint_product(turned_weights, z, framed=False)

    def adjoint_enlarged(self, turned_weights: OperatorWeights, z: Tensor) -> Tensor:
        return self._adjoint_product(turned_weights, z, framed=True)

    def _adjoint_product(self, weights: OperatorWeights, z: Tensor, *, framed: bool) -> Tensor:
        own, images = self._split(weights), self._images(z, framed=framed)
        found = []
        for tier, image in enumerate(images):
            value = convolve(image, own.K[tier], framed=framed)
            if tier + 1 < len(images):
                above = lead(images[tier + 1], own.Q[tier], framed=framed)
                value = value + grow(above, own.N[tier], image, framed=framed)
                down = shrink(image, own.G[tier], framed=framed)
                value = value + grow(down, own.N[tier], image, framed=framed)
            found.append(value)
        return _flat(found)

    def pull(self, weights: OperatorWeights, z: Tensor, v: Tensor) -> OperatorWeights:
        own = self._split(weights)
        images, others = self._images(z, framed=True), self._images(v, framed=True)
        K, N, G, Q = [], [], [], []
        for tier, (image, other) in enumerate(zip(images, others, strict=True)):
            K.append(kernel_gradient(image, own.K[tier], other))
            if tier + 1 == len(images):
                break
            down = shrink(image, own.N[tier], framed=True)
            back = shrink(other, own.G[tier], framed=True)
            back = back + lead(others[tier + 1], turned(own.Q[tier]), framed=True)
            N.append(kernel_gradient(image, own.N[tier], back, stride=2))
            G.append(kernel_gradient(other, own.G[tier], down, stride=2))
            next_frame = F.pad(down, (0, 1, 0, 1))
            Q.append(kernel_gradient(next_frame, own.Q[tier], others[tier + 1]))
        return (*K, *N, *G, *Q)

    def directions(
        self, weights: OperatorWeights, tangents: OperatorWeights
    ) -> Sequence[OperatorWeights]:
        own, moved = self._split(weights), self._split(tangents)
        still = [torch.zeros_like(kernel) for kernel in own.K]
        return [
            (*moved.K, *own.N, *moved.G, *moved.Q),
            (*still, *moved.N, *own.G, *own.Q),
        ]

    def bound(self, weights: OperatorWeights) -> Tensor:
        """Return the norm of the matrix of the blocks' bounds."""
        own = self._split(weights)
        K, N, G, Q = ([convolution_bound(one) for one in group] for group in own)
        blocks = torch.diag(torch.stack(K))
        for tier, norm in enumerate(N):
            blocks[tier, tier] += norm * G[tier]
            blocks[tier + 1, tier] += norm * Q[tier]
        return dense_norm(blocks)

    def blocks(self, weights: OperatorWeights) -> Sequence[Tensor]:
        return self._split(weights).K

    def factor(self, weights: OperatorWeights, a: float, c: Tensor) -> OperatorWeights:
        own = self._split(weights)
        fine, coarse = [], []
        for tier, kernel in enumerate(own.K):
            height, width = (side + 2 for side in self.sizes[tier])
            inverse = invert(frequency_matrices(centred(-a * kernel, 1 + a), (height, width)))
            fine.append(inverse)
            if tier < len(own.N):
                coarse.append(woodbury(inverse, own.N[tier], (height, width), a))
        return (*fine, *own.N, *coarse, *(a * kernel for kernel in own.Q))

    def resolve_with(self, factors: OperatorWeights, b: Tensor, *, transpose: bool) -> Tensor:
        own, images = self._split(factors), self._images(b, framed=True)
        tiers = range(len(images))
        found: dict[int, Tensor] = {}
        for tier in reversed(tiers) if transpose else tiers:
            value = images[tier]
            if not transpose and tier > 0:
                below = shrink(found[tier - 1], own.N[tier - 1], framed=True)
                value = value + follow(below, own.Q[tier - 1], framed=True)
            if transpose and tier < tiers[-1]:
                above = lead(found[tier + 1], turned(own.Q[tier]), framed=True)
                value = value + grow(above, own.N[tier], value, framed=True)
            value = filter_image(own.K[tier], value, transpose=transpose)
            if tier < tiers[-1]:
                inner = shrink(value, own.N[tier], framed=True)
                inner = filter_image(own.G[tier], inner, transpose=transpose)
                inner = grow(inner, own.N[tier], value, framed=True)
                value = value - filter_image(own.K[tier], inner, transpose=transpose)
            found[tier] = value
        return _flat([found[tier] for tier in tiers])

    def _images(self, z: Tensor, *, framed: bool) -> list[Tensor]:
        """The tiers of a state, or of an enlarged one."""
        shapes = self._shapes(framed=framed)
        parts = torch.split(z, [math.prod(shape) for shape in shapes], dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _shapes(self, *, framed: bool) -> list[tuple[int, int, int]]:
        return [
            (own, size[0] + 2 * framed, size[1] + 2 * framed)
            for own, size in zip(self.channels, self.sizes, strict=True)
        ]

    def state_shape(self, x: Tensor, *, enlarged: bool) -> tuple[int, ...]:
        return (sum(math.prod(shape) for shape in self._shapes(framed=enlarged)),)

    @property
    def enlarges(self) -> bool:
        return True

    def enlarge(self, c: Tensor) -> Tensor:
        return _flat([F.pad(image, FRAME) for image in self._images(c, framed=False)])

    def crop(self, z: Tensor) -> Tensor:
        return _flat([image[:, :, 1:-1, 1:-1] for image in self._images(z, framed=True)])

    def confine(self, z: Tensor) -> Tensor:
        return self.enlarge(self.crop(z))

    def present(self, z: Tensor) -> Tensor:
        """Return the coarsest tier as images."""
        return self._images(z, framed=False)[-1]

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 4 or tuple(x.shape[2:]) != self.sizes[0]:
            height, width = self.sizes[0]
            raise SettingError(
                "The input", f"have shape (batch, channels, {height}, {width})", tuple(x.shape)
            )

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.sizes[0]}, margin={self.margin:g}"


class TierInput(nn.Conv2d):
    """`U x + b` for the finest tier, and zeros for the others, as one vector.

    Args:
        in_channels: Channels of the input.
        operator: The tiers.
        bias: Whether there is `b`.
    """

    def __init__(self, in_channels: int, operator: MonotoneTiers, *, bias: bool = True) -> None:
        super().__init__(in_channels, operator.channels[0], SIDE, padding=1, bias=bias)
        self.rest = sum(
            own * size[0] * size[1]
            for own, size in zip(operator.channels[1:], operator.sizes[1:], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the vector."""
        return F.pad(super().forward(x).flatten(1), (0, self.rest))

    @torch.no_grad()
    def output_lipschitz(self) -> Bound:
        """Return the norm of the convolution."""
        return Bound("U", float(convolution_bound(self.weight.double())), "convolution_bound")


def _kernel(into: int, out: int) -> Tensor:
    kernel = torch.empty(out, into, SIDE, SIDE)
    return nn.init.kaiming_uniform_(kernel, a=math.sqrt(5))


def _flat(images: Sequence[Tensor]) -> Tensor:
    return torch.cat([image.flatten(1) for image in images], dim=1)
