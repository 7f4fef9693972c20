"""Feature regularisers `R(z)`: each owns its value, gradient, proximal map and constants.

A regulariser changes which equilibrium a network has, or chooses among several. With `f` the
proximal map of `phi`, the fixed point of `f(z - gamma grad R(z))` minimises `phi + gamma R` (OptEq,
Theorem 4); that of `f(prox(z, gamma))` minimises `phi` plus the Moreau envelope of `gamma R`, which
is another function. `equipoise.solvers.SAM` finds the fixed point of `f` with the smallest `R`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.core.registry import Registry
from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import require_positive

__all__ = [
    "REGULARIZERS",
    "AbsoluteSum",
    "Custom",
    "Incay",
    "Regularizer",
    "SquaredNorm",
    "TotalVariation",
    "as_regularizer",
    "potential",
]


class Regularizer(ABC):
    """A function `R` of a state, one tensor with the batch first. Concrete regularisers are final.

    NaN and infinity in a state reach everything that is computed from it; in a sample alone, if the
    regulariser is not coupled.

    Attributes:
        coupled: Whether the value ties the samples of a batch together, so that it is one number
            for the whole batch.
        has_prox: Whether `prox` and `envelope` can be computed.
        convex: Whether `R` is convex, if that is known.
    """

    coupled: bool = False
    has_prox: bool = False
    convex: bool | None = None

    @property
    def lipschitz(self) -> float | None:
        """A Lipschitz constant of the gradient, if one is known."""
        return None

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """Return `R(z)`, shape (batch,), or () if the samples are coupled."""

    def gradient(self, z: Tensor) -> Tensor:
        """Return `grad R(z)`, of the shape of `z`, itself differentiable.

        At a kink it is the subgradient of smallest norm.
        """
        return _differentiate(self.value, z)

    def prox(self, z: Tensor, gamma: float) -> Tensor:
        """Return the proximal map `argmin_u |u - z|^2/2 + gamma R(u)`, of the shape of `z`."""
        self._require_prox(gamma)
        return self._prox(z, gamma)

    def envelope(self, z: Tensor, gamma: float) -> Tensor:
        """Return the Moreau envelope of `gamma R`, of the shape of the value.

        `min_u gamma R(u) + |u - z|^2/2`.

        Its gradient is `z - prox(z, gamma)`.
        """
        self._require_prox(gamma)

        def smallest(z: Tensor) -> Tensor:
            u = self._prox(z, gamma)
            distance = _sum((u - z).square() / 2, 0 if self.coupled else 1)
            return gamma * self.value(u) + distance

        return potential(z, smallest, lambda z: z - self._prox(z, gamma))

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        """Return the proximal map for a valid `gamma`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define _prox if has_prox is True."
        )  # abstract

    def _require_prox(self, gamma: float) -> None:
        if not self.has_prox:
            raise ValueError(
                "prox must be asked of a regulariser with a proximal map in closed form; got "
                f"{type(self).__name__}. "
                "Use z - gamma * gradient(z)."
            )
        require_positive("gamma", gamma)


REGULARIZERS: Registry[Regularizer] = Registry("regularizer", Regularizer)  # type: ignore[type-abstract]
"""All regularisers by name."""


@final
@REGULARIZERS.register("l2")
@dataclass(frozen=True)
class SquaredNorm(Regularizer):
    """Feature decay: `R(z) = |z|^2/2`; `prox = z/(1 + gamma)` (OptEq, Table 2, row 1)."""

    has_prox = True
    convex = True

    @property
    def lipschitz(self) -> float | None:
        return 1.0

    def value(self, z: Tensor) -> Tensor:
        return _sum(z.square(), 1) / 2

    def gradient(self, z: Tensor) -> Tensor:
        return z

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        return z / (1 + gamma)


@final
@REGULARIZERS.register("l1")
@dataclass(frozen=True)
class AbsoluteSum(Regularizer):
    """Sparse features: `R(z) = |z|_1` (OptEq, Table 2, row 2).

    `prox = sign(z) max(|z| - gamma, 0)`.
    """

    has_prox = True
    convex = True

    def value(self, z: Tensor) -> Tensor:
        return _sum(z.abs(), 1)

    def gradient(self, z: Tensor) -> Tensor:
        return _sign(z)

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        return z - z.clamp(-gamma, gamma)


@final
@REGULARIZERS.register("incay")
@dataclass(frozen=True)
class Incay(Regularizer):
    """Feature incay, which makes features longer (OptEq, Table 2, row 3).

    `R(z) = 2/(|z|^2 + 2 epsilon)` for each sample.

    The gradient is `-4 z/(|z|^2 + 2 epsilon)^2`, so a step against it is
    `(1 + 4 gamma/(|z|^2 + 2 epsilon)^2) z`. The paper prints a minus sign there, which would
    shorten features. The Hessian is largest at zero, where it is `-1/epsilon^2`.

    Args:
        epsilon: What bounds the value at zero, in the unit of `|z|^2`.
    """

    epsilon: float = 1.0

    convex = False

    def __post_init__(self) -> None:
        require_positive("Incay.epsilon", self.epsilon)

    @property
    def lipschitz(self) -> float | None:
        return 1 / self.epsilon**2

    def value(self, z: Tensor) -> Tensor:
        return 2 / (_sum(z.square(), 1) + 2 * self.epsilon)

    def gradient(self, z: Tensor) -> Tensor:
        return -z * _spread(self.value(z).square(), z)


@final
@REGULARIZERS.register("tv")
@dataclass(frozen=True)
class TotalVariation(Regularizer):
    """Piecewise constant images: `R(z) = sum s(d)` over differences `d` of neighbours.

    Neighbours lie along the last two axes.

    `s(d) = sqrt(d^2 + epsilon^2) - epsilon` (Charbonnier), which is `|d|` for `epsilon = 0`. The
    sum of the two directions is anisotropic total variation. The norm of the differences is below
    `sqrt 8`, so the gradient has the Lipschitz constant `8/epsilon`. The proximal map has no closed
    form.

    Args:
        epsilon: Differences smaller than this are penalised by their squares.

    Shape:
        (batch, ..., height, width) for the state, with at least three axes; (batch,) for the value.
    """

    epsilon: float = 1e-2

    convex = True

    def __post_init__(self) -> None:
        require_positive("TotalVariation.epsilon", self.epsilon, or_zero=True)

    @property
    def lipschitz(self) -> float | None:
        return 8 / self.epsilon if self.epsilon else None

    def value(self, z: Tensor) -> Tensor:
        return sum((_sum(self._size(d), 1) for d in self._differences(z)), start=z.new_zeros(()))

    def gradient(self, z: Tensor) -> Tensor:
        down, right = (self._slope(d) for d in self._differences(z))
        return (
            F.pad(down, (0, 0, 1, 0))
            - F.pad(down, (0, 0, 0, 1))
            + F.pad(right, (1, 0))
            - F.pad(right, (0, 1))
        )

    def _differences(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.ndim < 3:
            raise ValueError(
                "TotalVariation must see images, a state of shape (batch, channels, height, "
                f"width); got shape {tuple(z.shape)}."
            )
        return z.diff(dim=-2), z.diff(dim=-1)

    def _size(self, d: Tensor) -> Tensor:
        if self.epsilon == 0:
            return d.abs()
        return d.square() / (
            (d.square() + self.epsilon**2).sqrt() + self.epsilon
        )  # the difference of roots would cancel

    def _slope(self, d: Tensor) -> Tensor:
        return _sign(d) if self.epsilon == 0 else d / (d.square() + self.epsilon**2).sqrt()


@final
@dataclass(frozen=True)
class Custom(Regularizer):
    """Any function of the state, differentiated by autograd.

    Args:
        function: Returns `R(z)`: shape (batch,), one number for each sample, or () if `coupled`.
        coupled: Whether the value ties the samples of a batch together.
        lipschitz: A Lipschitz constant of the gradient, if one is known; `SAM` needs it.
        convex: Whether the function is convex, if that is known.
    """

    function: Callable[[Tensor], Tensor]
    coupled: bool = False
    lipschitz: float | None = None
    convex: bool | None = None
    _inspected: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"Custom.function must be a function of the state; got {self.function!r}."
            )
        if self.lipschitz is not None:
            require_positive("Custom.lipschitz", self.lipschitz)
        object.__setattr__(self, "_inspected", self.coupled)

    def value(self, z: Tensor) -> Tensor:
        value = self.function(z)
        wanted = () if self.coupled else (len(z),)
        if not isinstance(value, Tensor) or value.shape != wanted:
            got = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            remedy = (
                "Sum over everything."
                if self.coupled
                else "Sum over all axes but the first, or use Custom(function, coupled=True)."
            )
            raise ValueError(
                f"Custom.function must return a tensor of shape {wanted}; got {got}. {remedy}"
            )
        return value

    def gradient(self, z: Tensor) -> Tensor:
        if not self._inspected and len(z) > 1 and not is_wrapped(z):
            self._inspect(z)
        return super().gradient(z)

    def _inspect(self, z: Tensor) -> None:
        """Refuse, once, a function that couples samples without saying so.

        Their solves would end on different problems.
        """
        source = torch.Generator().manual_seed(0)
        first, second = (
            torch.randn(z.shape, dtype=z.dtype, generator=source).to(z.device) for _ in range(2)
        )
        second[0] = first[0]
        with torch.no_grad():
            one, other = (_differentiate(self.value, point)[0] for point in (first, second))
        if float((one - other).norm()) > 1e-3 * float(one.norm()):
            raise ValueError(
                "Custom.function must treat each sample for itself; got one whose gradient "
                "for a sample depends on the others. "
                "Use Custom(function, coupled=True), with one number for the whole batch."
            )
        object.__setattr__(self, "_inspected", True)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return (
            f"Custom({name}, coupled={self.coupled}, lipschitz={self.lipschitz}, "
            f"convex={self.convex})"
        )


def as_regularizer(
    value: str | Mapping[str, Any] | Regularizer | Callable[[Tensor], Tensor],
) -> Regularizer:
    """Return the regulariser that `value` means.

    Args:
        value: A name (`l1`), a table such as `{"name": "incay", "epsilon": 0.1}`, a `Regularizer`,
            or a function as `Custom` takes it.
    """
    if callable(value) and not isinstance(value, type | Regularizer):
        return Custom(value)
    return REGULARIZERS.resolve(value)  # type: ignore[arg-type]  # which refuses other things


def _sum(z: Tensor, first: int) -> Tensor:
    """Sum over the axes from `first` on, which may be none."""
    return z.sum(dim=tuple(range(first, z.ndim))) if z.ndim > first else z


def _spread(value: Tensor, z: Tensor) -> Tensor:
    """A number for each sample, or for all, in a shape that multiplies `z`."""
    return value.reshape(value.shape + (1,) * (z.ndim - value.ndim))


def _sign(z: Tensor) -> Tensor:
    """The sign; torch's own is 0 for NaN, which would hide it."""
    return torch.where(z.isnan(), z, z.sign())


def _differentiate(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The gradient of the sum of `function` at `z`.

    Its history ends in `z` and in what the function closes over.
    """
    recording = torch.is_grad_enabled()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or (recording and not z.requires_grad and function(z).requires_grad):
        # Autograd knows nothing of transforms, and would leave a leaf of its own in the history
        # where z has none.
        value, pull = torch.func.vjp(function, z)[:2]
        slope: Tensor = pull(torch.ones_like(value))[0]
        return slope
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "A gradient by autograd must be taken outside of torch.inference_mode; use "
            "torch.no_grad."
        )
    recording = recording and z.requires_grad
    with torch.enable_grad():
        # A new node, because what the function closes over may itself depend on z.
        point = z.view_as(z) if recording else z.detach().requires_grad_()
        total = function(point).sum()
        if not total.requires_grad:
            return torch.zeros_like(z)
        (found,) = torch.autograd.grad(total, point, create_graph=recording, allow_unused=True)
    return torch.zeros_like(z) if found is None else found


class _Potential(torch.autograd.Function):
    """A function of a state whose gradient is known better than autograd would find it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        z: Tensor,
        value: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],  # noqa: ARG004
    ) -> Tensor:
        return value(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, _, ctx.gradient = inputs
        ctx.axes = output.ndim
        ctx.save_for_backward(z)
        ctx.save_for_forward(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        return _spread(g, z) * ctx.gradient(z), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _value: None, _gradient: None) -> Tensor:
        (z,) = ctx.saved_tensors
        return _sum(tangent * ctx.gradient(z), ctx.axes)


def potential(
    z: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `value(z)` with `gradient(z)` as its derivative."""
    result: Tensor = _Potential.apply(z, value, gradient)  # type: ignore[no-untyped-call]
    return result
