"""Affine functions of the values inside a feed-forward network, with the adjoints of their maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.operators import convolution_bound, dense_norm

__all__ = ["Affine", "Convolve", "Flatten", "LinearMap", "Multiply", "Scale", "Term"]

Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map of samples of one shape to samples of another one.

    Attributes:
        weight: What it multiplies by; may be replaced by another tensor of its shape.
        into: The shape of a sample before.
        out: The shape of a sample after.
        trained: Whether the weight is one of the network's.
    """

    weight: Tensor
    into: Shape
    out: Shape
    trained: bool = True

    def apply(self, weight: Tensor, z: Tensor) -> Tensor:
        """Return `A z`, shape (batch, *out)."""
        raise NotImplementedError  # abstract

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        """Return `A^T y`, shape (batch, *into)."""
        raise NotImplementedError  # abstract

    def bound(self, weight: Tensor) -> Tensor:
        """Return an upper bound of the norm of `A`."""
        raise NotImplementedError  # abstract

    def scaled(self, factor: Tensor) -> LinearMap | None:
        """Return the map with its output channels multiplied, if it has weights for that."""
        return None


@dataclass(frozen=True, eq=False)
class Convolve(LinearMap):
    """A convolution with zeros around the image; pooling and subsampling are convolutions too."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @classmethod
    def make(cls, weight: Tensor, into: Shape, **options: Any) -> Convolve:
        """Return the map on images of shape `into`."""
        made = cls(weight, into, (), **options)
        with torch.no_grad():
            out = made.apply(weight, weight.new_zeros(1, *into)).shape[1:]
        return replace(made, out=tuple(out))

    def apply(self, weight: Tensor, z: Tensor) -> Tensor:
        return F.conv2d(z, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        sides = zip(
            self.into[1:],
            self.out[1:],
            self.stride,
            self.padding,
            self.dilation,
            weight.shape[2:],
            strict=True,
        )
        # What a stride leaves over at the far side, where the image is longer than its windows.
        rest = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, s, p, d, k in sides]
        return F.conv_transpose2d(
            y, weight, None, self.stride, self.padding, rest, self.groups, self.dilation
        )

    def bound(self, weight: Tensor) -> Tensor:
        # Strides leave rows out, and dilation acts on interleaved images: neither adds to the norm.
        return convolution_bound(weight, groups=self.groups)

    def scaled(self, factor: Tensor) -> LinearMap | None:
        return replace(self, weight=self.weight * factor[:, None, None, None], trained=True)


@dataclass(frozen=True, eq=False)
class Multiply(LinearMap):
    """A matrix, which acts on the last axis."""

    def apply(self, weight: Tensor, z: Tensor) -> Tensor:
        return z @ weight.mT

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return y @ weight

    def bound(self, weight: Tensor) -> Tensor:
        return dense_norm(weight)

    def scaled(self, factor: Tensor) -> LinearMap | None:
        if len(self.out) > 1:  # channels are another axis than that of its rows
            return None
        return replace(self, weight=self.weight * factor[:, None], trained=True)


@dataclass(frozen=True, eq=False)
class Scale(LinearMap):
    """A factor for each channel, or one number for all."""

    def apply(self, weight: Tensor, z: Tensor) -> Tensor:
        return z * _spread(weight, self.into)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return self.apply(weight, y)

    def bound(self, weight: Tensor) -> Tensor:
        return weight.abs().max()


@dataclass(frozen=True, eq=False)
class Flatten(LinearMap):
    """Another shape for the same numbers."""

    def apply(self, weight: Tensor, z: Tensor) -> Tensor:
        return z.reshape(-1, *self.out)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return y.reshape(-1, *self.into)

    def bound(self, weight: Tensor) -> Tensor:
        return weight.new_ones(())


@dataclass(frozen=True)
class Term:
    """Linear maps one after the other, applied to one of the network's values.

    Attributes:
        source: Which value: 0 is the input, others are activations in their order.
        maps: The maps, the one that acts first first.
    """

    source: int
    maps: tuple[LinearMap, ...] = ()


@dataclass(frozen=True)
class Affine:
    """A sum of terms and a bias.

    Attributes:
        terms: The terms.
        bias: The bias, of the shape of a sample.
    """

    terms: tuple[Term, ...]
    bias: Tensor

    @property
    def shape(self) -> Shape:
        """The shape of a sample."""
        return tuple(self.bias.shape)

    def through(self, linear: LinearMap, bias: Tensor | None = None) -> Affine:
        """Return a linear map of it, plus a number for each channel of the result."""
        moved = linear.apply(linear.weight, self.bias[None])[0]
        moved = moved if bias is None else moved + _spread(bias, linear.out)
        return Affine(tuple(Term(own.source, (*own.maps, linear)) for own in self.terms), moved)

    def scale(self, factor: Tensor, bias: Tensor | None = None) -> Affine:
        """Return it with its channels multiplied, within the weights of a map before if it can."""
        terms = []
        for term in self.terms:
            folded = term.maps[-1].scaled(factor) if term.maps and factor.dim() else None
            before = term.maps[:-1] if folded else term.maps
            last = folded or Scale(factor, self.shape, self.shape, trained=bool(factor.dim()))
            terms.append(Term(term.source, (*before, last)))
        moved = self.bias * _spread(factor, self.shape)
        return Affine(tuple(terms), moved if bias is None else moved + _spread(bias, self.shape))

    def __add__(self, other: Affine) -> Affine:
        return Affine(self.terms + other.terms, self.bias + other.bias)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.scale(other.bias.new_tensor(-1.0))

    def flatten(self) -> Affine:
        """Return it with all numbers of a sample in one row."""
        size = math.prod(self.shape)
        return self.through(Flatten(self.bias.new_ones(()), self.shape, (size,), trained=False))


def _spread(value: Tensor, shape: Sequence[int]) -> Tensor:
    """A number for each channel, or for all, in a shape that multiplies samples."""
    return value.reshape(-1, *(1,) * (len(shape) - 1)) if value.dim() == 1 else value
