"""Feature regularisers `R(z)`: each object owns the value, the gradient, the proximal map and the constants of its function.

A regulariser changes which equilibrium a network has, or chooses among several. With `f` the proximal map of `phi`, the fixed point
of `f(z - gamma grad R(z))` minimises `phi + gamma R` (OptEq, Theorem 4); that of `f(prox(z, gamma))` minimises `phi` plus the
Moreau envelope of `gamma R`, which is another function. `equipoise.solvers.SAM` finds the fixed point of `f` with the smallest `R`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.core.registry import Registry

__all__ = [
    "HSIC",
    "REGULARIZERS",
    "AbsoluteSum",
    "Custom",
    "Decorrelation",
    "Incay",
    "NuclearNorm",
    "Regularizer",
    "SquaredNorm",
    "TotalVariation",
    "regularizer",
]


class Regularizer(ABC):
    """A function `R` of a state, one tensor with the batch first. Concrete regularisers are final.

    NaN and infinity in a state reach everything that is computed from it; in a sample alone, if the regulariser is not coupled.

    Attributes:
        coupled: Whether the value ties the samples of a batch together, so that it is one number for the whole batch.
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
        """Return `R(z)`: shape (batch,), one number for each sample, or () if the samples are coupled."""

    def gradient(self, z: Tensor) -> Tensor:
        """Return `grad R(z)`, of the shape of `z`, where `R` has a kink the subgradient of smallest norm; differentiable itself."""
        return _differentiate(self.value, z)

    def prox(self, z: Tensor, gamma: float) -> Tensor:
        """Return the proximal map `argmin_u |u - z|^2/2 + gamma R(u)`, of the shape of `z`."""
        self._require_prox(gamma)
        return self._prox(z, gamma)

    def envelope(self, z: Tensor, gamma: float) -> Tensor:
        """Return the Moreau envelope of `gamma R`, `min_u gamma R(u) + |u - z|^2/2`, of the shape of the value.

        Its gradient is `z - prox(z, gamma)`.
        """
        self._require_prox(gamma)

        def smallest(z: Tensor) -> Tensor:
            u = self._prox(z, gamma)
            distance = _sum((u - z).square() / 2, 0 if self.coupled else 1)
            return gamma * self.value(u) + distance

        return _potential(z, smallest, lambda z: z - self._prox(z, gamma))

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        """Return the proximal map for a valid `gamma`."""
        raise NotImplementedError(f"{type(self).__name__} must define _prox if has_prox is True.")  # abstract

    def _require_prox(self, gamma: float) -> None:
        if not self.has_prox:
            raise ValueError(
                f"prox must be asked of a regulariser with a proximal map in closed form; got {type(self).__name__}. "
                "Use z - gamma * gradient(z)."
            )
        _require_positive("gamma", gamma)


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
    """Sparse features: `R(z) = |z|_1`; `prox = sign(z) max(|z| - gamma, 0)` (OptEq, Table 2, row 2)."""

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
    """Feature incay, which makes features longer: `R(z) = 2/(|z|^2 + 2 epsilon)` for each sample (OptEq, Table 2, row 3).

    The gradient is `-4 z/(|z|^2 + 2 epsilon)^2`, so a step against it is `(1 + 4 gamma/(|z|^2 + 2 epsilon)^2) z`. The paper prints
    a minus sign there, which would shorten features. The Hessian is largest at zero, where it is `-1/epsilon^2`.

    Args:
        epsilon: What bounds the value at zero, in the unit of `|z|^2`.
    """

    epsilon: float = 1.0

    convex = False

    def __post_init__(self) -> None:
        _require_positive("Incay.epsilon", self.epsilon)

    @property
    def lipschitz(self) -> float | None:
        return 1 / self.epsilon**2

    def value(self, z: Tensor) -> Tensor:
        return 2 / (_sum(z.square(), 1) + 2 * self.epsilon)

    def gradient(self, z: Tensor) -> Tensor:
        return -z * _spread(self.value(z).square(), z)


@final
@REGULARIZERS.register("decorrelation")
@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """Uncorrelated features: `R(Z) = |D Z Z^T D - I|_F^2/2`, `D = diag(1/|z_i|)` (OptEq, eq. 13 and Table 2, row 4).

    Row `z_i` is feature `i`, which is axis 1 of the state, over all observations: the samples of the batch and their positions. So
    `R = sum_{i != j} (u_i . u_j)^2/2`, `u_i = z_i/|z_i|`, and `grad_i = (2/|z_i|) (I - u_i u_i^T) sum_{j != i} (u_i . u_j) u_j`.
    The paper prints `I + Proj` in place of `I - u_i u_i^T`.

    Args:
        epsilon: Added to `|z_i|^2` in both, so that a feature that is zero everywhere counts as uncorrelated.

    Shape:
        (batch, features, ...) for the state, () for the value.
    """

    epsilon: float = 1e-8

    coupled = True
    convex = False

    def __post_init__(self) -> None:
        _require_positive("Decorrelation.epsilon", self.epsilon)

    def value(self, z: Tensor) -> Tensor:
        return self._correlations(_features("Decorrelation", z))[2].square().sum() / 2

    def gradient(self, z: Tensor) -> Tensor:
        unit, length, correlation = self._correlations(_features("Decorrelation", z))
        pull = 2 * correlation @ unit
        pull = (pull - unit * (unit * pull).sum(dim=1, keepdim=True)) / length
        return _unfeatures(pull, z)

    def _correlations(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The features in units of their lengths, the lengths, and the products of different features."""
        length = (rows.square().sum(dim=1, keepdim=True) + self.epsilon).sqrt()  # (features, 1)
        unit = rows / length
        different = 1 - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        return unit, length, (unit @ unit.mT) * different


@final
@REGULARIZERS.register("hsic")
@dataclass(frozen=True)
class HSIC(Regularizer):
    """Independent features, by the Hilbert-Schmidt criterion: `R(Z) = sum_{i<j} (N-1)^-2 tr(K_i H K_j H)` (OptEq, section 7.2.1).

    `K_i` is the matrix of `exp(-(s - t)^2/(2 bandwidth^2))` over the values of feature `i`, axis 1 of the state, in all `N`
    observations: the samples of the batch and their positions. `H = I - 1 1^T/N`. Since `tr(K_i H K_j H)` is the product of the
    centred kernels, the pairs are summed through the sum of all of them, in time and memory of the order of `features * N^2`. The
    random form replaces each kernel by `cos(w (s - t))` averaged over random `w`, and tends to the exact one as their number grows;
    its time and memory grow with `N` alone, not with its square.

    Args:
        bandwidth: The distance at which two values count as different.
        features: The number of random frequencies, or None for the exact form.
        seed: Seed of the frequencies.

    Shape:
        (batch, features, ...) for the state, () for the value.
    """

    bandwidth: float = 1.0
    features: int | None = None
    seed: int = 0
    _frequencies: Tensor | None = field(init=False, repr=False, compare=False)

    coupled = True
    convex = False

    def __post_init__(self) -> None:
        _require_positive("HSIC.bandwidth", self.bandwidth)
        if self.features is not None and (
            isinstance(self.features, bool) or not isinstance(self.features, int) or self.features < 1
        ):
            raise ValueError(f"HSIC.features must be None or a whole number of at least 1; got {self.features!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"HSIC.seed must be a whole number; got {self.seed!r}.")
        frequencies = None
        if self.features is not None:
            source = torch.Generator().manual_seed(self.seed)
            frequencies = torch.randn(self.features, dtype=torch.float64, generator=source) / self.bandwidth
        object.__setattr__(self, "_frequencies", frequencies)

    def value(self, z: Tensor) -> Tensor:
        rows = _features("HSIC", z)
        observations = rows.shape[1]
        if observations < 2:
            raise ValueError(
                f"HSIC must see at least 2 observations of each feature; got {observations} in a state of shape {tuple(z.shape)}. "
                "Use larger batches."
            )
        pairs = self._exact(rows) if self._frequencies is None else self._random(rows, self._frequencies.to(rows))
        return pairs / (observations - 1) ** 2

    def _exact(self, rows: Tensor) -> Tensor:
        kernel = torch.exp((rows[:, :, None] - rows[:, None, :]).square() / (-2 * self.bandwidth**2))  # (features, N, N)
        kernel = kernel - kernel.mean(dim=1, keepdim=True)
        kernel = kernel - kernel.mean(dim=2, keepdim=True)
        return (kernel * (kernel.sum(dim=0) - kernel)).sum() / 2

    def _random(self, rows: Tensor, frequencies: Tensor) -> Tensor:
        angles = rows[:, :, None] * frequencies  # (features, N, frequencies)
        waves = torch.cat([angles.cos(), angles.sin()], dim=2) / len(frequencies) ** 0.5
        waves = waves - waves.mean(dim=1, keepdim=True)
        every = waves.transpose(0, 1).flatten(1)  # (N, all waves)
        return (_squares(every) - _squares(waves)) / 2


@final
@REGULARIZERS.register("nuclear")
@dataclass(frozen=True)
class NuclearNorm(Regularizer):
    """Features of low rank: `R(Z) = sum_i s_i`, the singular values of a sample as a matrix of features by positions.

    With `Z = U diag(s) V^T` the gradient is `U V^T`, over the singular values that are not zero, and the proximal map is
    `U diag(max(s - gamma, 0)) V^T` (Cai et al., 2010). Derivatives of both stay finite where singular values are equal or zero.

    Shape:
        (batch, features, ...) for the state, with at least three axes; (batch,) for the value.
    """

    has_prox = True
    convex = True

    def value(self, z: Tensor) -> Tensor:
        return _potential(self._matrices(z), _singular_sum, lambda matrix: _spectral(matrix, None))

    def gradient(self, z: Tensor) -> Tensor:
        return _spectral(self._matrices(z), None).reshape(z.shape)

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        return _spectral(self._matrices(z), gamma).reshape(z.shape)

    def _matrices(self, z: Tensor) -> Tensor:
        if z.ndim < 3:
            raise ValueError(
                "NuclearNorm must see samples that are matrices, a state of shape (batch, features, positions, ...); "
                f"got shape {tuple(z.shape)}."
            )
        return z.flatten(2)


@final
@REGULARIZERS.register("tv")
@dataclass(frozen=True)
class TotalVariation(Regularizer):
    """Piecewise constant images: `R(z) = sum s(d)` over the differences `d` of neighbours along the last two axes.

    `s(d) = sqrt(d^2 + epsilon^2) - epsilon` (Charbonnier), which is `|d|` for `epsilon = 0`. The sum of the two directions is
    anisotropic total variation. The norm of the differences is below `sqrt 8`, so the gradient has the Lipschitz constant
    `8/epsilon`. The proximal map has no closed form.

    Args:
        epsilon: Differences smaller than this are penalised by their squares.

    Shape:
        (batch, ..., height, width) for the state, with at least three axes; (batch,) for the value.
    """

    epsilon: float = 1e-2

    convex = True

    def __post_init__(self) -> None:
        _require_positive("TotalVariation.epsilon", self.epsilon, or_zero=True)

    @property
    def lipschitz(self) -> float | None:
        return 8 / self.epsilon if self.epsilon else None

    def value(self, z: Tensor) -> Tensor:
        return sum((_sum(self._size(d), 1) for d in self._differences(z)), start=z.new_zeros(()))

    def gradient(self, z: Tensor) -> Tensor:
        down, right = (self._slope(d) for d in self._differences(z))
        return F.pad(down, (0, 0, 1, 0)) - F.pad(down, (0, 0, 0, 1)) + F.pad(right, (1, 0)) - F.pad(right, (0, 1))

    def _differences(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.ndim < 3:
            raise ValueError(
                f"TotalVariation must see images, a state of shape (batch, channels, height, width); got shape {tuple(z.shape)}."
            )
        return z.diff(dim=-2), z.diff(dim=-1)

    def _size(self, d: Tensor) -> Tensor:
        if self.epsilon == 0:
            return d.abs()
        return d.square() / ((d.square() + self.epsilon**2).sqrt() + self.epsilon)  # the difference of roots would cancel

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

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"Custom.function must be a function of the state; got {self.function!r}.")
        if self.lipschitz is not None:
            _require_positive("Custom.lipschitz", self.lipschitz)

    def value(self, z: Tensor) -> Tensor:
        value = self.function(z)
        wanted = () if self.coupled else (len(z),)
        if not isinstance(value, Tensor) or value.shape != wanted:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            remedy = "Sum over everything." if self.coupled else "Sum over all axes but the first, or set coupled=True."
            raise ValueError(f"Custom.function must return a tensor of shape {wanted}; got {got}. {remedy}")
        return value

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return f"Custom({name}, coupled={self.coupled}, lipschitz={self.lipschitz}, convex={self.convex})"


def regularizer(value: str | Regularizer | Callable[[Tensor], Tensor]) -> Regularizer:
    """Return the regulariser that `value` means.

    Args:
        value: A name (`l1`), a `Regularizer`, or a function as `Custom` takes it.
    """
    if callable(value) and not isinstance(value, type | Regularizer):
        return Custom(value)
    return REGULARIZERS.resolve(value)  # type: ignore[arg-type]  # which refuses other things


def _require_positive(owner: str, value: object, *, or_zero: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (0 < value < math.inf or (or_zero and value == 0))):  # type: ignore[operator]
        raise ValueError(f"{owner} must be {'zero or ' if or_zero else ''}a positive number; got {value!r}.")


def _sum(z: Tensor, first: int) -> Tensor:
    """Sum over the axes from `first` on, which may be none."""
    return z.sum(dim=tuple(range(first, z.ndim))) if z.ndim > first else z


def _spread(value: Tensor, z: Tensor) -> Tensor:
    """A number for each sample, or for all, in a shape that multiplies `z`."""
    return value.reshape(value.shape + (1,) * (z.ndim - value.ndim))


def _sign(z: Tensor) -> Tensor:
    """The sign; torch's own is 0 for NaN, which would hide it."""
    return torch.where(z.isnan(), z, z.sign())


def _features(owner: str, z: Tensor) -> Tensor:
    """The state as a matrix with one row for each feature and one column for each observation."""
    if z.ndim < 2:
        raise ValueError(f"{owner} must see a state of shape (batch, features, ...); got shape {tuple(z.shape)}.")
    return z.transpose(0, 1).flatten(1)


def _unfeatures(rows: Tensor, z: Tensor) -> Tensor:
    """The inverse of `_features`, for the state `z`."""
    return rows.reshape(z.transpose(0, 1).shape).transpose(0, 1)


def _squares(matrix: Tensor) -> Tensor:
    """Return `|A A^T|_F^2 = |A^T A|_F^2`, summed over a batch of matrices, by the smaller of the two products."""
    product = matrix @ matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix.mT @ matrix
    total: Tensor = product.square().sum()
    return total


def _differentiate(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The gradient of the sum of `function` at `z`, with a history that ends in `z` and in what the function closes over."""
    recording = torch.is_grad_enabled()
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or (recording and not z.requires_grad and function(z).requires_grad):
        # Autograd knows nothing of transforms, and would leave a leaf of its own in the history where z has none.
        value, pull = torch.func.vjp(function, z)[:2]
        slope: Tensor = pull(torch.ones_like(value))[0]
        return slope
    if torch.is_inference_mode_enabled():
        raise ValueError("A gradient by autograd must be taken outside of torch.inference_mode; use torch.no_grad.")
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
    def forward(z: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004
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


def _potential(z: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Potential.apply(z, value, gradient)  # type: ignore[no-untyped-call]
    return result


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which matrices are finite, shape (batch, 1, 1), and `U`, `s`, `V^T` of those; torch refuses a batch with one that is not."""
    finite = matrix.isfinite().all(dim=2, keepdim=True).all(dim=1, keepdim=True)
    U, s, Vh = torch.linalg.svd(torch.where(finite, matrix, 0.0), full_matrices=False)
    return finite, U, s, Vh


def _singular_sum(matrix: Tensor) -> Tensor:
    finite, _, s, _ = _decompose(matrix)
    return torch.where(finite[:, 0, 0], s.sum(dim=1), torch.nan)


def _spectral(matrix: Tensor, threshold: float | None) -> Tensor:
    result: Tensor = _Spectral.apply(matrix, threshold)  # type: ignore[no-untyped-call]
    return result


class _Spectral(torch.autograd.Function):
    """`U diag(h(s)) V^T` with `h(s) = max(s - threshold, 0)`, or `h(s) = 1` for `s > 0` if there is no threshold.

    Its derivative has the divided differences of `h` as coefficients (Ding et al., 2018), which exist where singular values are
    equal; autograd divides by the differences of their squares. It is self-adjoint.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, threshold: float | None) -> Tensor:
        finite, U, s, Vh = _decompose(matrix)
        _, h = _shrink(s, matrix, threshold)
        return torch.where(finite, (U * h[:, None, :]) @ Vh, torch.nan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        matrix, ctx.threshold = inputs
        ctx.save_for_backward(matrix)
        ctx.save_for_forward(matrix)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _spectral_product(ctx.saved_tensors[0], ctx.threshold, g), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _threshold: None) -> Tensor:
        return _spectral_product(ctx.saved_tensors[0], ctx.threshold, tangent)


def _shrink(s: Tensor, matrix: Tensor, threshold: float | None) -> tuple[Tensor, Tensor]:
    """Which singular values are not mapped to zero, and what they are mapped to."""
    if threshold is not None:
        return s > threshold, (s - threshold).relu()
    rounding = max(matrix.shape[1:]) * torch.finfo(s.dtype).eps
    active = s > rounding * s[:, :1]
    return active, active.to(s.dtype)


def _spectral_product(matrix: Tensor, threshold: float | None, g: Tensor) -> Tensor:
    """The derivative of `_Spectral` times `g`."""
    finite, U, s, Vh = _decompose(matrix)
    active, h = _shrink(s, matrix, threshold)
    row, column = active[:, :, None], active[:, None, :]
    total, gap = s[:, :, None] + s[:, None, :], s[:, :, None] - s[:, None, :]
    # Where the quotient is not wanted its denominator is 1, so that second derivatives are not NaN there.
    even = (h[:, :, None] - h[:, None, :]) / torch.where(row ^ column, gap, 1.0)
    even = torch.where(row & column, 0.0 if threshold is None else 1.0, torch.where(row ^ column, even, 0.0))
    odd = (h[:, :, None] + h[:, None, :]) / torch.where(row | column, total, 1.0)
    side = (h / torch.where(active, s, 1.0))[:, :, None]
    inside = U.mT @ g @ Vh.mT
    inside_even, inside_odd = (inside + inside.mT) / 2, (inside - inside.mT) / 2
    result = U @ (even * inside_even + odd * inside_odd) @ Vh
    result = result + U @ (side * (U.mT @ g - inside @ Vh)) + ((g @ Vh.mT - U @ inside) * side.mT) @ Vh
    return torch.where(finite, result, torch.nan)
