"""The multivariate activation of a quadratic objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from equipoise.prox.activation import Activation

__all__ = ["MatrixActivation"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class MatrixActivation(Activation):
    """Multiply by a symmetric positive semidefinite matrix: `s(a) = S a` (OptEq, Table 1, row 4).

    `W^T S (W z + c)` is the proximal map of `<q, S^+ q>/2 - <c, q> - |z|^2/2`, `z = W^T q` (`S^+`
    is the pseudo-inverse). The entries of `a` are coupled, so the potential `<a, S a>/2` and the
    conjugate `<y, S^+ y>/2` are numbers for each sample, not for each entry, and the derivative is
    the whole matrix. Two objects are equal only if they are the same.

    Args:
        S: The matrix, copied and made exactly symmetric. Gradients reach the tensor given here, so
            if it is learned, build the activation anew for each forward pass: changing it
            afterwards changes nothing.

    Shape:
        (..., n) for the value, (...,) for the potential and the conjugate, (..., n, n) for the
        derivative.
    """

    elementwise: ClassVar[bool] = False

    S: Tensor
    _slopes: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.S, Tensor) or not self.S.is_floating_point():
            kind = self.S.dtype if isinstance(self.S, Tensor) else type(self.S).__name__
            raise ValueError(
                f"MatrixActivation.S must be a tensor of real floating-point numbers; got {kind}."
            )
        if self.S.ndim != 2 or self.S.shape[0] != self.S.shape[1] or not self.S.numel():
            raise ValueError(
                f"MatrixActivation.S must be a square matrix; got shape {tuple(self.S.shape)}."
            )
        if not bool(self.S.isfinite().all()):
            raise ValueError("MatrixActivation.S must be finite; got NaN or infinity.")
        S = self.S.detach()
        rounding = 10 * _rounding(S)
        gap = float((S - S.mT).abs().max())
        if gap > rounding * max(1.0, float(S.abs().max())):
            raise ValueError(
                f"MatrixActivation.S must be symmetric; got entries that differ by {gap:.3g}. "
                "Use (S + S.T) / 2."
            )
        object.__setattr__(self, "S", (self.S + self.S.mT) / 2)
        values = torch.linalg.eigvalsh(self.S.detach())
        lower, upper = float(values[0]), float(values[-1])
        if lower < -rounding * max(1.0, upper):
            raise ValueError(
                "MatrixActivation.S must be positive semidefinite; got the eigenvalue "
                f"{lower:.3g}. Use A.T @ A for some matrix A."
            )
        if upper > 1 + rounding:
            raise ValueError(
                f"MatrixActivation.S must have norm at most 1; got {upper:.6g}. Divide S by "
                "its norm."
            )
        object.__setattr__(self, "_slopes", (max(0.0, lower), max(0.0, min(1.0, upper))))

    def __call__(self, a: Tensor) -> Tensor:
        return a @ self.S.to(a)

    def derivative(self, a: Tensor) -> Tensor:
        return self.S.to(a).expand(*a.shape[:-1], *self.S.shape)

    def potential(self, a: Tensor) -> Tensor:
        return self._integral(a)

    def conjugate(self, y: Tensor) -> Tensor:
        S = self.S.to(y)
        cutoff = max(_rounding(self.S), _rounding(S))
        values, vectors = torch.linalg.eigh(S.detach())
        beyond = (
            y.detach() @ vectors[:, values <= cutoff * values[-1].clamp_min(0)]
        )  # the part of y that S cannot reach
        outside = beyond.norm(dim=-1) > 100 * cutoff * y.detach().norm(dim=-1)
        inverse: Tensor = torch.linalg.pinv(S, rtol=cutoff, hermitian=True)
        value = (y * (y @ inverse)).sum(dim=-1) / 2
        return value.masked_fill(outside, torch.inf)

    @property
    def slopes(self) -> tuple[float, float]:
        """The smallest and the largest eigenvalue of `S`."""
        return self._slopes

    def _integral(self, a: Tensor) -> Tensor:
        return (a * self(a)).sum(dim=-1) / 2

    def __repr__(self) -> str:
        return (
            f"MatrixActivation(S of shape {tuple(self.S.shape)}, eigenvalues in "
            f"[{self.slopes[0]:.3g}, {self.slopes[1]:.3g}])"
        )


def _rounding(S: Tensor) -> float:
    """Return the relative error to expect in the eigenvalues of `S`."""
    return S.shape[0] * float(torch.finfo(S.dtype).eps)
