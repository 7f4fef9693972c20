"""Linear maps `W` with `I - W` strongly monotone, whatever their parameters are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equipoise.core.transforms import is_wrapped, require_dtype
from equipoise.core.validate import SettingError, require_positive
from equipoise.operators.operator import OperatorWeights, plus

__all__ = ["MonotoneOperator", "Remembered", "require_margin"]

T = TypeVar("T")


def require_margin(owner: str, margin: object) -> None:
    """Raise unless a margin keeps `I - W` strongly monotone."""
    require_positive(
        f"{owner}.margin",
        margin,
        remedy="Only then has every input one equilibrium; the paper takes 1.",
    )


class Remembered:
    """What was computed from parameters, kept until they change; copies begin without it."""

    def __init__(self) -> None:
        self._kept: dict[object, tuple[tuple[object, ...], Any]] = {}

    def get(self, key: object, parameters: tuple[Tensor, ...], make: Callable[[], T]) -> T:
        """Return what was kept under `key` for these parameters, or make it, without gradients.

        Args:
            key: What it is, and what else it depends on.
            parameters: What it is computed from.
            make: Computes it.
        """
        with torch.no_grad():
            if any(map(is_wrapped, parameters)):  # they have no values to recognise them by
                return make()
            mark = _fingerprint(parameters)
            known = self._kept.get(key)
            if known is None or known[0] != mark:
                known = self._kept[key] = (mark, make())
            value: T = known[1]
            return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return Remembered()

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()


def _fingerprint(parameters: tuple[Tensor, ...]) -> tuple[object, ...]:
    """What changes whenever parameters do.

    The sums are for changes through `.data`, which torch's version counter does not see.
    """
    return tuple(
        mark
        for one in parameters
        for mark in (
            one.data_ptr(),
            one._version,
            one.dtype,
            float(one.detach().sum()),
            float(torch.linalg.vector_norm(one.detach())),
        )
    )


class MonotoneOperator(nn.Module, ABC):
    """A linear map `W = (1 - m) I - A^T A + B - B^T` on states, so that `I - W >= m I`.

    The symmetric part of `I - W` is `m I + A^T A`, whatever `A` and `B` are (Winston & Kolter,
    2020, Proposition 1). Products are functions of explicit weights, those of `W` itself, so that
    they are made once for each solve.

    The resolvent `(I + a (I - W))^-1` may live on larger states than `W` does, where it is cheap:
    `enlarge` and `crop` lead there and back, and `confine` sets to zero what lies outside.

    Args:
        margin: `m`, positive.
    """

    def __init__(self, margin: float) -> None:
        super().__init__()
        require_margin(type(self).__name__, margin)
        self.margin = float(margin)
        self.remembered = Remembered()

    @abstractmethod
    def weights(self) -> OperatorWeights:
        """Return the weights of `W`, made of `A` and `B`, differentiable."""

    @abstractmethod
    def combined(self, weights: OperatorWeights, p: float, q: float) -> OperatorWeights:
        """Return the weights of `p I + q W`."""

    @abstractmethod
    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        """Return the weights that `adjoint_with` takes; by default those of `W^T`."""

    @abstractmethod
    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        """Return `W z` for `W` with these weights."""

    def adjoint_with(self, turned_weights: OperatorWeights, z: Tensor) -> Tensor:
        """Return `W^T z`, given what `transposed` returned."""
        return self.apply_with(turned_weights, z)

    @abstractmethod
    def bound(self, weights: OperatorWeights) -> Tensor:
        """Return a proven upper bound of the norm of a map with these weights."""

    @abstractmethod
    def blocks(self, weights: OperatorWeights) -> Sequence[Tensor]:
        """Return the convolutions on the diagonal of `W`, of shape (channels, channels, h, w)."""

    def typical_step_size(self, weights: OperatorWeights) -> float:
        """Return a step size with which splittings that converge with any are fast.

        `1/sqrt(M L)`, with about the norm of `I - W` for `L` and the geometric mean of its smallest
        and its mean real part for `M`. For random matrices the largest singular value is about
        twice the root mean square.
        """
        m, sizes = self.margin, []
        for kernel in self.blocks(weights):
            channels, height, width = len(kernel), *kernel.shape[2:]
            trace = float(kernel[:, :, height // 2, width // 2].diagonal().sum())
            square = float(torch.linalg.vector_norm(kernel)) ** 2
            rest = square - 2 * (1 - m) * trace + (1 - m) ** 2 * channels  # |W - (1 - m) I|^2
            norm = m + 2 * math.sqrt(max(rest, 0.0) / channels)
            sizes.append(norm * math.sqrt(m * max(1 - trace / channels, m)))
        largest = max(sizes)
        return 1 / math.sqrt(largest) if largest < math.inf else 1.0  # which NaN gives as well

    @abstractmethod
    def factor(self, weights: OperatorWeights, a: float, c: Tensor) -> OperatorWeights:
        """Return what the resolvent is computed with, given an enlarged state for its shape."""

    @abstractmethod
    def resolve_with(self, factors: OperatorWeights, b: Tensor, *, transpose: bool) -> Tensor:
        """Return `(I + a (I - W))^-1 b`, or the product with its transpose."""

    def reflect_with(self, factors: OperatorWeights, b: Tensor, r: Tensor) -> Tensor:
        """Return `2 (I + a (I - W))^-1 b - r`, not recorded."""
        return self.resolve_with(factors, b, transpose=False).mul_(2).sub_(r)

    def affine_with(self, weights: OperatorWeights, z: Tensor, c: Tensor) -> Tensor:
        """Return `W z + c`."""
        return plus(self.apply_with(weights, z), c)

    def apply_enlarged(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        """Return `W z` on enlarged states."""
        return self.apply_with(weights, z)

    def adjoint_enlarged(self, turned_weights: OperatorWeights, z: Tensor) -> Tensor:
        """Return `W^T z` on enlarged states, given what `transposed` returned."""
        return self.apply_enlarged(turned_weights, z)

    @abstractmethod
    def pull(self, weights: OperatorWeights, z: Tensor, v: Tensor) -> OperatorWeights:
        """Return the gradient of `<v, W z>`, on enlarged states, in the weights, differentiable."""

    def directions(
        self, weights: OperatorWeights, tangents: OperatorWeights
    ) -> Sequence[OperatorWeights]:
        """Return weights of maps that add up to the derivative of `W` along `tangents`."""
        return [tangents]

    @abstractmethod
    def state_shape(self, x: Tensor, *, enlarged: bool) -> tuple[int, ...]:
        """Return the shape of one sample's state, or of an enlarged one, for inputs like `x`."""

    def enlarge(self, c: Tensor) -> Tensor:
        """Return a state as an enlarged one; by default there is no difference."""
        return c

    def crop(self, z: Tensor) -> Tensor:
        """Return the part of an enlarged state that is the state."""
        return z

    def present(self, z: Tensor) -> Tensor:
        """Return the layer's output for an equilibrium; by default itself."""
        return z

    def confine(self, z: Tensor) -> Tensor:
        """Return an enlarged state with zeros outside of the state."""
        return z

    def gap_matrix(self) -> Tensor | None:
        """Return `I - W` as a matrix in float64, where states are vectors and it is one anyway."""
        return None

    @property
    def enlarges(self) -> bool:
        """Whether enlarged states differ from states."""
        return False

    def gap_bound(self) -> float:
        """Return a proven upper bound of `|I - W|`, the Lipschitz constant `L`."""
        return self.remembered.get("gap", tuple(self.parameters()), self._gap_bound)

    def _gap_bound(self) -> float:
        doubled = tuple(weight.double() for weight in self.weights())
        return float(self.bound(self.combined(doubled, 1.0, -1.0)))

    def check(self, x: Tensor) -> None:
        """Raise if inputs like `x` cannot go with states that the operator acts on."""
        weight = next(self.parameters())
        require_dtype(x, weight)
        if weight.dtype in (torch.float16, torch.bfloat16):  # of which torch inverts no matrices
            raise SettingError(
                "The weights of a monotone operator",
                "be float32 or float64",
                weight,
                "For lower precision use torch.autocast.",
                got=str(weight.dtype),
            )
