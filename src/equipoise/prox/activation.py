"""Activations that make a layer a proximal map; each owns all that is known of its function.

Let `s` be monotone with slopes in `[0, L]`. Then `f(z) = (1/mu) W^T s(W z + c)` with
`mu >= L |W|^2` is the gradient of the convex `psi(z) = (1/mu) 1^T S(W z + c)`,
`S(a) = int_0^a s(t) dt`, and the proximal map of the convex `phi = psi* - |.|^2/2` (OptEq, Theorem
1). The objective needs the potential `S` and its conjugate `S*`; the step needs `s`; the adjoint
needs `s'`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.core.registry import Registry
from equipoise.core.validate import require_between, require_positive
from equipoise.prox.special import exponential_excess, log_cosh, sigmoid_integral, softplus_integral

__all__ = [
    "ACTIVATIONS",
    "ELU",
    "Activation",
    "HardTanh",
    "Identity",
    "LeakyReLU",
    "ReLU",
    "Sigmoid",
    "SoftShrink",
    "Softplus",
    "Tanh",
]


class Activation(ABC):
    """An activation `s` with its derivative, potential, conjugate and slopes.

    Concrete activations are final.

    Attributes:
        elementwise: Whether `s` acts on every entry alone, so that its Jacobian is diagonal and its
            potential a sum over entries.
    """

    elementwise: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, a: Tensor) -> Tensor:
        """Return `s(a)`, of the shape of `a`."""

    def overwrite(self, a: Tensor) -> Tensor:
        """Return `s(a)`, in the memory of `a` where that can be.

        Only for tensors of the caller's own that are not recorded.
        """
        return self(a)

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """Return `s'(a)`, of the shape of `a`; at a kink the derivative that autograd takes."""

    def potential(self, a: Tensor) -> Tensor:
        """Return `S(a) = int_0^a s(t) dt`, elementwise, with gradient `s(a)` (OptEq, Theorem 1)."""
        return _Integral.apply(a, self)  # type: ignore[no-any-return, no-untyped-call]

    @abstractmethod
    def conjugate(self, y: Tensor) -> Tensor:
        """Return `S*(y) = sup_a (a y - S(a))`, elementwise.

        It is infinite outside the closed range of `s`.

        It is differentiable inside the range, where its gradient is the inverse of `s`.
        """

    @property
    @abstractmethod
    def slopes(self) -> tuple[float, float]:
        """The infimum and the supremum of `s'`."""

    @abstractmethod
    def _integral(self, a: Tensor) -> Tensor:
        """Return the number `S(a)`; `potential` gives it its gradient."""

    @property
    def admissible(self) -> bool:
        """Whether it is monotone and Lipschitz, as proximal maps are (OptEq, Assumption 1)."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why the activation is not admissible, as a clause for a message; empty if it is."""
        lower, upper = self.slopes
        if not lower >= 0:
            return (
                f"its slope is negative (down to {lower:.3g}), so the layer would not be a "
                "proximal map"
            )
        if not upper < math.inf:
            return "its slope is unbounded, so no mu would make the layer a proximal map"
        return ""


ACTIVATIONS: Registry[Activation] = Registry("activation", Activation)  # type: ignore[type-abstract]
"""All activations by name."""


class _Integral(torch.autograd.Function):
    """A potential as a function whose gradient is the activation itself.

    Formulas that are accurate everywhere choose between pieces and use `|a|`, where autograd gets
    derivatives wrong.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, activation: Activation) -> Tensor:
        return activation._integral(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        a, ctx.activation = inputs
        ctx.save_for_backward(a)
        ctx.save_for_forward(a)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        return g * ctx.activation(a), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _activation: None) -> Tensor:
        (a,) = ctx.saved_tensors
        slope: Tensor = ctx.activation(a)
        return tangent * slope


def _infinite_where(outside: Tensor, value: Tensor) -> Tensor:
    return value.masked_fill(outside, math.inf)


@final
@ACTIVATIONS.register("relu")
@dataclass(frozen=True)
class ReLU(Activation):
    """`s(a) = max(a, 0)`; `S(a) = max(a, 0)^2/2`; `S*(y) = y^2/2` for `y >= 0` (OptEq, eq. 4).

    The paper prints an infinite `S*(0)`; the supremum is 0, and an equilibrium with an inactive
    unit needs it.
    """

    def __call__(self, a: Tensor) -> Tensor:
        return torch.relu(a)

    def overwrite(self, a: Tensor) -> Tensor:
        return torch.relu_(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)

    def conjugate(self, y: Tensor) -> Tensor:
        return _infinite_where(y < 0, y.square() / 2)

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return a.clamp_min(0).square() / 2


@final
@ACTIVATIONS.register("leaky_relu")
@dataclass(frozen=True)
class LeakyReLU(Activation):
    """`s(a) = a` for `a > 0`, else `r a`.

    `S(a) = a s(a)/2`; `S*(y) = y^2/2` for `y >= 0`, else `y^2/(2 r)`.

    Args:
        negative_slope: The slope `r` of the negative side, in [0, 1).
    """

    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        require_between("LeakyReLU.negative_slope", self.negative_slope, 0, 1, "[)")

    def __call__(self, a: Tensor) -> Tensor:
        return F.leaky_relu(a, self.negative_slope)

    def overwrite(self, a: Tensor) -> Tensor:
        return F.leaky_relu_(a, self.negative_slope)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.full_like(a, self.negative_slope).masked_fill(a > 0, 1)

    def conjugate(self, y: Tensor) -> Tensor:
        if self.negative_slope == 0:
            return _infinite_where(y < 0, y.square() / 2)
        return y.square() / torch.full_like(y, 2).masked_fill(y < 0, 2 * self.negative_slope)

    @property
    def slopes(self) -> tuple[float, float]:
        return float(self.negative_slope), 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return a * self(a) / 2


@final
@ACTIVATIONS.register("tanh")
@dataclass(frozen=True)
class Tanh(Activation):
    """`s(a) = tanh a`; `S(a) = log cosh a`.

    `S*(y) = ((1+y) log(1+y) + (1-y) log(1-y))/2` for `|y| <= 1`.
    """

    def __call__(self, a: Tensor) -> Tensor:
        return torch.tanh(a)

    def overwrite(self, a: Tensor) -> Tensor:
        return a.tanh_()

    def derivative(self, a: Tensor) -> Tensor:
        return (
            4 * torch.sigmoid(2 * a) * torch.sigmoid(-2 * a)
        )  # 1 - tanh^2 would cancel at large |a|

    def conjugate(self, y: Tensor) -> Tensor:
        inside = y.clamp(-1, 1)
        value = (
            torch.special.xlog1py(1 + inside, inside) + torch.special.xlog1py(1 - inside, -inside)
        ) / 2
        return _infinite_where(y.abs() > 1, value)

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return log_cosh(a)


@final
@ACTIVATIONS.register("sigmoid")
@dataclass(frozen=True)
class Sigmoid(Activation):
    """`s(a) = 1/(1 + e^-a)`; `S(a) = log(1 + e^a) - log 2`.

    `S*(y) = y log y + (1-y) log(1-y) + log 2` for `0 <= y <= 1`.
    """

    def __call__(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def overwrite(self, a: Tensor) -> Tensor:
        return a.sigmoid_()

    def derivative(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a) * torch.sigmoid(-a)

    def conjugate(self, y: Tensor) -> Tensor:
        inside = y.clamp(0, 1)
        value = (
            torch.xlogy(inside, inside) + torch.special.xlog1py(1 - inside, -inside) + math.log(2)
        )
        return _infinite_where((y < 0) | (y > 1), value)

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 0.25

    def _integral(self, a: Tensor) -> Tensor:
        return sigmoid_integral(a)


@final
@ACTIVATIONS.register("softplus")
@dataclass(frozen=True)
class Softplus(Activation):
    """`s(a) = log(1 + e^a)`; `S(a) = Li2(-1) - Li2(-e^a)`.

    `S*(y) = y a - S(a)` at `a = log(e^y - 1)` for `y >= 0`.

    `Li2` is the dilogarithm; `S` tends to `-pi^2/12` at minus infinity, so `S*(0) = pi^2/12`.
    """

    def __call__(self, a: Tensor) -> Tensor:
        return F.softplus(
            a, threshold=40
        )  # torch's own threshold of 20 errs by 2e-9, and downwards: not monotone

    def derivative(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def conjugate(self, y: Tensor) -> Tensor:
        inside = y.clamp_min(0)
        decay = -torch.expm1(-inside)
        value = (
            inside.square() + torch.xlogy(inside, decay) - self.potential(inside + torch.log(decay))
        )
        return _infinite_where(y < 0, value)

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return softplus_integral(a)


@final
@ACTIVATIONS.register("elu")
@dataclass(frozen=True)
class ELU(Activation):
    """`s(a) = a` for `a > 0`, else `r (e^a - 1)`; `S(a) = a^2/2` or `r (e^a - 1 - a)`.

    `S*(y) = y^2/2` for `y >= 0`, else `(y + r) log(1 + y/r) - y` down to `y = -r`.

    Args:
        alpha: The depth `r` of the negative side, at least 0. Above 1 the slope reaches `alpha`,
            and `mu` must grow with it.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        require_positive(
            "ELU.alpha",
            self.alpha,
            or_zero=True,
            remedy="A negative alpha makes the activation decrease.",
        )

    def __call__(self, a: Tensor) -> Tensor:
        return F.elu(a, self.alpha)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, 1.0, self.alpha * torch.exp(a.clamp_max(0)))

    def conjugate(self, y: Tensor) -> Tensor:
        if self.alpha == 0:
            return _infinite_where(y < 0, y.square() / 2)
        inside = y.clamp(-self.alpha, 0)
        negative = torch.special.xlog1py(inside + self.alpha, inside / self.alpha) - inside
        return _infinite_where(y < -self.alpha, torch.where(y < 0, negative, y.square() / 2))

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, max(1.0, float(self.alpha))

    def _integral(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, a.square() / 2, self.alpha * exponential_excess(a.clamp_max(0)))


@final
@ACTIVATIONS.register("hard_tanh")
@dataclass(frozen=True)
class HardTanh(Activation):
    """`s(a) = min(max(a, -1), 1)`; `S(a) = a^2/2` for `|a| <= 1`, else `|a| - 1/2`.

    `S*(y) = y^2/2` for `|y| <= 1`.
    """

    def __call__(self, a: Tensor) -> Tensor:
        return F.hardtanh(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (a.abs() < 1).to(a.dtype)

    def conjugate(self, y: Tensor) -> Tensor:
        return _infinite_where(y.abs() > 1, y.square() / 2)

    @property
    def slopes(self) -> tuple[float, float]:
        return 0.0, 1.0

    def _integral(self, a: Tensor) -> Tensor:
        size = a.abs()
        return torch.where(size > 1, size - 0.5, a.square() / 2)


@final
@ACTIVATIONS.register("soft_shrink")
@dataclass(frozen=True)
class SoftShrink(Activation):
    """`s(a) = sign(a) max(|a| - t, 0)`; `S(a) = max(|a| - t, 0)^2/2`; `S*(y) = y^2/2 + t |y|`.

    Args:
        threshold: The half-width `t` of the interval that is mapped to zero, at least 0.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_positive(
            "SoftShrink.threshold",
            self.threshold,
            or_zero=True,
            remedy="A negative threshold makes the activation jump.",
        )

    def __call__(self, a: Tensor) -> Tensor:
        return F.softshrink(a, self.threshold)

    def derivative(self, a: Tensor) -> Tensor:
        return (a.abs() > self.threshold).to(a.dtype)

    def conjugate(self, y: Tensor) -> Tensor:
        return y.square() / 2 + self.threshold * y.abs()

    @property
    def slopes(self) -> tuple[float, float]:
        return (0.0 if self.threshold else 1.0), 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return (a.abs() - self.threshold).clamp_min(0).square() / 2


@final
@ACTIVATIONS.register("identity")
@dataclass(frozen=True)
class Identity(Activation):
    """`s(a) = a`; `S(a) = a^2/2`; `S*(y) = y^2/2`."""

    def __call__(self, a: Tensor) -> Tensor:
        return a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.ones_like(a)

    def conjugate(self, y: Tensor) -> Tensor:
        return y.square() / 2

    @property
    def slopes(self) -> tuple[float, float]:
        return 1.0, 1.0

    def _integral(self, a: Tensor) -> Tensor:
        return a.square() / 2
