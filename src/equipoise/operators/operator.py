"""A linear map with its exact adjoint and a proven bound of its norm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from equipoise.core.transforms import is_wrapped, require_dtype
from equipoise.core.validate import SettingError

__all__ = ["START_NORM", "Operator", "OperatorWeights", "distance", "is_recorded", "plus"]

OperatorWeights = tuple[Tensor, ...]
"""The weights of an operator, in its own order."""

START_NORM = 0.5
"""The operator norm that new weights have, about: small, as Algorithm 1 wants it."""


def is_recorded(value: Tensor) -> bool:
    """Whether autograd or a transform may still need a tensor, which must not be overwritten."""
    return torch.is_grad_enabled() or is_wrapped(value)


def plus(value: Tensor, other: Tensor, alpha: float = 1.0) -> Tensor:
    """Return `value + alpha other`, in the memory of `value` unless that is recorded.

    `value` must be the caller's own. Under autocast its precision is that of the sum.
    """
    return (
        torch.add(value, other.to(value.dtype), alpha=alpha)
        if is_recorded(value)
        else value.add_(other, alpha=alpha)
    )


@torch.no_grad()
def distance(one: Tensor, other: Tensor) -> float:
    """Return the Frobenius norm of a difference, rounded up: a bound of its spectral norm."""
    found = torch.linalg.vector_norm(one - other, dtype=torch.float64)
    return float(found) * (1 + 4 * torch.finfo(one.dtype).eps)


class Operator(nn.Module, ABC):
    """A linear map `W` and its adjoint: `<W z, y> = <z, W^T y>` to machine precision.

    They are functions of explicit weights, so that these are made once for each solve.
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

    def quick_bound(self, weights: OperatorWeights) -> float:
        """Return a number above `bound(weights)` for a small part of its price, or infinity."""
        return math.inf

    def within(self, weights: OperatorWeights, limit: float) -> bool:
        """Return whether `bound(weights)` is at most a limit; overridden where that costs less."""
        return bool(self.bound(weights) <= limit)

    def drift(self, weights: OperatorWeights, other: OperatorWeights) -> float:
        """Return a number that `bound(weights)` is at most above `bound(other)`, for one pass.

        `|W + dW| <= |W| + |dW|`: a bound stays proven while weights move, until this number uses up
        what is left to a limit. It is not finite if the weights are not, or if nothing is known.
        """
        return math.inf

    @abstractmethod
    def zeros(self, c: Tensor) -> Tensor:
        """Return a state of zeros, given a tensor of the shape of `W z`."""

    def draw_frame_(self) -> None:
        """Draw weights all of whose singular values are 1."""
        raise self._no_frames()

    def orthogonalize_(self, size: float) -> None:
        """Bring all singular values to `size`, or as close as such weights can get, in place."""
        raise self._no_frames()

    def _no_frames(self) -> SettingError:
        return SettingError(
            f"{type(self).__name__}.orthogonalize_",
            "be defined for orthogonal weights",
            None,
            "Use norm='project' and init='small'.",
            got="nothing",
        )

    def lower_bound(self, weights: OperatorWeights) -> float:
        """Return a proven lower bound of all singular values; 0 where none is known.

        Those of a matrix are as many as its smaller side has rows. Those of a convolution are
        those it has on images without borders, and of a pooled one on such that are constant on
        its fields: it does not see what else there is.
        """
        return 0.0

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        """Return `W z + c`."""
        a = self.apply_with(weights, z)
        if a.shape[1:] != c.shape[1:]:  # a `c` of one pixel would be added to all
            rule = f"go with the input, whose injection has shape {tuple(c.shape)}"
            raise SettingError("The state", rule, tuple(z.shape))
        return plus(a, c)

    def gram(self, weights: OperatorWeights) -> Tensor | None:
        """Return `W W^T` as a matrix, if that is how it is multiplied with fastest."""
        return None

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
        require_dtype(x, self.weights()[0])
