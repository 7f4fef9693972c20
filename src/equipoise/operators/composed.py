"""Operators one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.operators.convolution import Convolution, Padding
from equipoise.operators.operator import Operator, OperatorWeights

__all__ = ["Composed", "separable"]


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

    def draw_frame_(self) -> None:
        for part in self._parts:
            part.draw_frame_()

    def orthogonalize_(self, size: float) -> None:
        for part in self._parts:
            part.orthogonalize_(size if part is self._parts[-1] else 1.0)

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
    """Return a depthwise-separable convolution (OptEq, 7.3.2).

    Each channel is convolved for itself, then the channels are mixed at each pixel.

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
