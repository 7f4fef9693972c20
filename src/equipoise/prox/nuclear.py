"""The nuclear norm, with derivatives that exist where singular values are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from equipoise.prox.regularizer import REGULARIZERS, Regularizer, potential

__all__ = ["NuclearNorm"]


@final
@REGULARIZERS.register("nuclear")
@dataclass(frozen=True)
class NuclearNorm(Regularizer):
    """Features of low rank: `R(Z) = sum_i s_i`, with the singular values of each sample.

    A sample is a matrix of features by positions.

    With `Z = U diag(s) V^T` the gradient is `U V^T`, over the singular values that are not zero,
    and the proximal map is `U diag(max(s - gamma, 0)) V^T` (Cai et al., 2010). Derivatives of both
    stay finite where singular values are equal or zero.

    Shape:
        (batch, features, ...) for the state, with at least three axes; (batch,) for the value.
    """

    has_prox = True
    convex = True

    def value(self, z: Tensor) -> Tensor:
        return potential(self._matrices(z), _singular_sum, lambda matrix: _spectral(matrix, None))

    def gradient(self, z: Tensor) -> Tensor:
        return _spectral(self._matrices(z), None).reshape(z.shape)

    def _prox(self, z: Tensor, gamma: float) -> Tensor:
        return _spectral(self._matrices(z), gamma).reshape(z.shape)

    def _matrices(self, z: Tensor) -> Tensor:
        if z.ndim < 3:
            raise ValueError(
                "NuclearNorm must see samples that are matrices, a state of shape (batch, "
                "features, positions, ...); "
                f"got shape {tuple(z.shape)}."
            )
        return z.flatten(2)


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which matrices are finite, shape (batch, 1, 1), and `U`, `s`, `V^T` of those.

    Torch refuses a batch with one that is not.
    """
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
    """`U diag(h(s)) V^T` with `h(s) = max(s - threshold, 0)`.

    Without a threshold, `h(s) = 1` for `s > 0`.

    Its derivative has the divided differences of `h` as coefficients (Ding et al., 2018), which
    exist where singular values are equal; autograd divides by the differences of their squares. It
    is self-adjoint.
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
    # Where the quotient is not wanted its denominator is 1, so that second derivatives are not NaN
    # there.
    even = (h[:, :, None] - h[:, None, :]) / torch.where(row ^ column, gap, 1.0)
    even = torch.where(
        row & column, 0.0 if threshold is None else 1.0, torch.where(row ^ column, even, 0.0)
    )
    odd = (h[:, :, None] + h[:, None, :]) / torch.where(row | column, total, 1.0)
    side = (h / torch.where(active, s, 1.0))[:, :, None]
    inside = U.mT @ g @ Vh.mT
    inside_even, inside_odd = (inside + inside.mT) / 2, (inside - inside.mT) / 2
    result = U @ (even * inside_even + odd * inside_odd) @ Vh
    result = (
        result + U @ (side * (U.mT @ g - inside @ Vh)) + ((g @ Vh.mT - U @ inside) * side.mT) @ Vh
    )
    return torch.where(finite, result, torch.nan)
