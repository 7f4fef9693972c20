"""A deep OptEq with a linear head, unrolled: a function of one vector of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_type
from equipoise.families.opteq.layer import OptEq
from equipoise.prox.activation import Activation

__all__ = ["UnrolledNetwork"]

MAX_ENTRIES = 2**25
"""Largest Jacobian, in numbers, that is computed in full."""


@dataclass(frozen=True)
class UnrolledNetwork:
    """The unrolled network as a function of one vector of parameters: the head first.

    Attributes:
        activations: `s_1, ..., s_L`.
        alpha: `alpha`.
        x: The inputs.
        y: The targets, less the bias of the head.
        passes: Passes through the layers, from zero.
        theta: The parameters.
        shapes: The shapes that they have.
    """

    activations: tuple[Activation, ...]
    alpha: float
    x: Tensor
    y: Tensor
    passes: int
    theta: Tensor
    shapes: tuple[torch.Size, ...]

    @classmethod
    def read(
        cls, layer: OptEq, head: nn.Linear, x: Tensor, y: Tensor, steps: int
    ) -> UnrolledNetwork:
        """Return the network of a layer and a head, in float64."""
        require_type("training_bound.layer", layer, OptEq, "an OptEq")
        require_type("training_bound.head", head, nn.Linear, "an nn.Linear")
        require_count("training_bound.steps", steps)
        cell = layer.layers
        if layer.cell is not cell or cell.mu != 1 or not cell.shared_alpha:
            rule = "have no regulariser, mu = 1 and one alpha for all layers, as in the theorem"
            raise SettingError("training_bound.layer", rule, layer, got="another one")
        if len(x) != len(y) or y.dim() != 2 or y.shape[1] != head.out_features:
            wanted = f"({len(x)}, {head.out_features})"
            got = str(tuple(y.shape))
            raise SettingError("training_bound.y", f"have shape {wanted}", y, got=got)
        parts: list[Tensor] = [head.weight]
        for (weight,), inputs in zip(cell.effective_weights(), cell.inputs, strict=True):
            assert isinstance(inputs, nn.Linear)
            zero = weight.new_zeros(len(weight))
            parts += [weight, inputs.weight, zero if inputs.bias is None else inputs.bias]
        tensors = [part.detach().double() for part in parts]
        size = y.numel() * sum(part.numel() for part in tensors)
        if size > MAX_ENTRIES:
            rule = f"have a Jacobian of at most {MAX_ENTRIES} numbers"
            remedy = "Take fewer samples or a smaller network."
            raise SettingError("training_bound.layer", rule, size, remedy)
        alpha = cell.alpha[0]
        target = y.detach().double()
        target = target if head.bias is None else target - head.bias.detach().double()
        return cls(
            cell.activations,
            float(alpha.detach() if isinstance(alpha, Tensor) else alpha),
            x.detach().double(),
            target,
            steps,
            torch.cat([part.flatten() for part in tensors]),
            tuple(part.shape for part in tensors),
        )

    def split(self, theta: Tensor) -> list[Tensor]:
        """Return `W_(L+1), W_1, U_1, b_1, W_2, ...`."""
        pieces = torch.split(theta, [shape.numel() for shape in self.shapes])
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def layer(self, number: int, z: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
        """Return `f_l(z)`, the layers counted from 0."""
        hidden: Tensor = self.activations[number](z @ W.mT + self.x @ U.mT + b)
        return self.alpha * hidden @ W + (1 - self.alpha) * z

    def state(self, theta: Tensor) -> Tensor:
        """Return `z^K`."""
        head, *rest = self.split(theta)
        z = self.x.new_zeros(len(self.x), head.shape[1])
        for _ in range(self.passes):
            for number in range(len(self.activations)):
                z = self.layer(number, z, *rest[3 * number : 3 * number + 3])
        return z

    def output(self, theta: Tensor) -> Tensor:
        """Return `y`, in one row."""
        return (self.state(theta) @ self.split(theta)[0].mT).flatten()

    def loss(self, theta: Tensor) -> Tensor:
        """Return `|y - y_0|^2/2`."""
        return (self.output(theta) - self.y.flatten()).square().sum() / 2
