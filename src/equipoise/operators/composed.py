"""Operators one after the other."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from equipoise.operators.convolution import Convolution, Padding
from equipoise.operators.convolution_norm import (
    separable_bound,
    separable_density,
    separable_quick_bound,
    separable_within,
    slack_of,
)
from equipoise.operators.operator import START_NORM, Operator, OperatorWeights

__all__ = ["Composed", "separable"]

IMAGE = 12  # height and width of the image on which a start's norm is estimated
POWER = 20  # iterations for that; about one half need not be exact


class Composed(Operator):
    """Several operators one after the other; the adjoint runs through their adjoints backwards.

    Its norm is bounded by the product of the parts' bounds, where a depthwise convolution and the
    pointwise one behind it count as one part with a bound of its own.

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
        for part in reversed(self._parts):
            c = part.zeros(c)
        return c

    def bound(self, weights: OperatorWeights) -> Tensor:
        bounds = [
            part.bound(own)
            if mixed is None
            else separable_bound(own[0], mixed[0], cast(Convolution, part).groups)
            for part, own, mixed in self._pairs(weights)
        ]
        return torch.stack(bounds).prod()

    def quick_bound(self, weights: OperatorWeights) -> float:
        total = 1.0
        for part, own, mixed in self._pairs(weights):
            if mixed is None:
                quick = part.quick_bound(own)
                total *= quick if quick < math.inf else float(part.bound(own).detach())
            else:
                channels = cast(Convolution, part).groups
                total *= separable_quick_bound(own[0], mixed[0], channels)
        return total

    def within(self, weights: OperatorWeights, limit: float) -> bool:
        pairs = self._pairs(weights)
        part, own, mixed = pairs[0]
        if len(pairs) > 1 or mixed is None:
            return bool(self.bound(weights) <= limit)
        return separable_within(own[0], mixed[0], cast(Convolution, part).groups, limit)

    def drift(self, weights: OperatorWeights, other: OperatorWeights) -> float:
        # prod (W_l + dW_l) - prod W_l, each norm by its Frobenius norm.
        before, after, slack = 1.0, 1.0, 1.0
        for (part, new), (_, old) in zip(self._split(weights), self._split(other), strict=True):
            size = part.drift(old, tuple(torch.zeros_like(weight) for weight in old))
            before, after = before * size, after * (size + part.drift(new, old))
        for part, own, mixed in self._pairs(weights):
            if mixed is not None:
                density = separable_density(own[0], cast(Convolution, part).groups)
                slack *= slack_of(own[0], density) / slack_of(own[0])
        return slack * (after - before) + 4 * sys.float_info.epsilon * after

    def draw_frame_(self) -> None:
        for part in self._parts:
            part.draw_frame_()

    def orthogonalize_(self, size: float) -> None:
        for part in self._parts:
            part.orthogonalize_(size if part is self._parts[-1] else 1.0)

    def check(self, x: Tensor) -> None:
        for part in self._parts:
            part.check(x)

    def _pairs(
        self, weights: OperatorWeights
    ) -> list[tuple[Operator, OperatorWeights, OperatorWeights | None]]:
        """The parts and their weights, with those of a pointwise one behind a depthwise one."""
        pairs: list[tuple[Operator, OperatorWeights, OperatorWeights | None]] = []
        split = self._split(weights)
        while split:
            part, own = split.pop(0)
            follows = split and _is_depthwise(part) and _is_pointwise(split[0][0])
            pairs.append((part, own, split.pop(0)[1] if follows else None))
        return pairs

    def _split(self, weights: OperatorWeights) -> list[tuple[Operator, OperatorWeights]]:
        split, place = [], 0
        for part in self._parts:
            count = len(part.weights())
            split.append((part, weights[place : place + count]))
            place += count
        return split


def _is_depthwise(part: Operator) -> bool:
    return isinstance(part, Convolution) and part.groups > 1 and part.kernel.shape[1] == 1


def _is_pointwise(part: Operator) -> bool:
    return isinstance(part, Convolution) and part.groups == 1 and part.kernel.shape[2:].numel() == 1


@torch.no_grad()
def _start_small_(operator: Operator, channels: int) -> None:
    """Scale an operator on images to a norm of about one half.

    The norm is that found by power iteration on a small image, somewhat below the true one.

    Args:
        operator: The operator.
        channels: Channels of its images.
    """
    weight = operator.weights()[0]
    if weight.is_meta:  # which has no values
        return
    generator = torch.Generator().manual_seed(0)  # leaves the global one alone
    z = torch.randn(1, channels, IMAGE, IMAGE, generator=generator, dtype=torch.float64).to(weight)
    length = 1.0
    for _ in range(POWER):
        z = operator.adjoint(operator(z / torch.linalg.vector_norm(z)))
        length = float(torch.linalg.vector_norm(z))
    if length > 0:
        operator.scale_(START_NORM / math.sqrt(length))


def separable(
    in_channels: int,
    out_channels: int,
    kernel_size: int | tuple[int, int] = 3,
    *,
    multiplier: int = 1,
    padding: Padding = "zeros",
) -> Composed:
    """Return a depthwise-separable convolution (OptEq, 7.3.2).

    Each channel is convolved for itself, then the channels are mixed at each pixel. The two
    together begin with a norm of about one half.

    Args:
        in_channels: Channels of the state.
        out_channels: Channels of the result.
        kernel_size: Side of the depthwise kernel, or its height and width.
        multiplier: Channels that the depthwise convolution makes of each one.
        padding: `zeros` or `circular`.
    """
    middle = multiplier * in_channels
    depthwise = Convolution(in_channels, middle, kernel_size, padding=padding, groups=in_channels)
    pointwise = Convolution(middle, out_channels, 1)
    made = Composed([depthwise, pointwise])
    _start_small_(made, in_channels)
    return made
