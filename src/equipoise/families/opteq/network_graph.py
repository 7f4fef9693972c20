"""A feed-forward network as activations of affine functions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from equipoise.families.opteq.affine_map import Affine, Shape, Term
from equipoise.prox.activation import Activation, ReLU, Sigmoid, Softplus

__all__ = ["Graph"]

POSITIVE = (ReLU, Sigmoid, Softplus)
"""Activations whose values are never negative."""


@dataclass
class Graph:
    """A network as activations of affine functions of earlier activations and of the input.

    Attributes:
        input_shape: The shape of a sample.
        like: A tensor of the type of the weights.
        sources: Each activation with what it is applied to; they count from 1, and 0 is the input.
        output: What the network returns.
        last: What is done to it in the end, if anything.
    """

    input_shape: Shape
    like: Tensor
    sources: list[tuple[Activation, Affine]] = field(default_factory=list)
    output: Affine | None = None
    last: nn.Module | None = None

    def start(self) -> Affine:
        """Return the input."""
        return Affine((Term(0),), self.like.new_zeros(self.input_shape))

    def activate(self, activation: Activation, value: Affine) -> Affine:
        """Return the activation of a value."""
        self.sources.append((activation, value))
        return Affine((Term(len(self.sources)),), torch.zeros_like(value.bias))

    def is_positive(self, source: int) -> bool:
        """Whether a value is never negative."""
        return source > 0 and isinstance(self.sources[source - 1][0], POSITIVE)

    def is_positive_value(self, value: Affine) -> bool:
        """Whether it is plain that an affine function is never negative."""
        return bool((value.bias >= 0).all()) and all(
            not term.maps and self.is_positive(term.source) for term in value.terms
        )
