"""Matrices `W` that bound the Lipschitz constant of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core.validate import require_count, require_positive
from equipoise.families.monotone import MonotoneMatrix
from equipoise.operators import dense_norm
from equipoise.operators.operator import OperatorWeights

__all__ = ["Inequality", "LipschitzMatrix"]


class Inequality(NamedTuple):
    """What is proved of `W` as it is stored, in float64 and less the rounding.

    Attributes:
        lowest: The smallest eigenvalue of the matrix of the theorem; its bound holds if positive.
        margin: The largest proven `m` with `Psi (I - W) + (I - W)^T Psi >= 2 m Psi`.
    """

    lowest: float
    margin: float


class LipschitzMatrix(MonotoneMatrix):
    """The `W` of `z = s(W z + U x + b)`, `y = W_o z + b_o`, with `|y - y'| <= gamma |x - x'|`.

    With a positive diagonal matrix `Psi` and any `A` and `B` (Revay, Wang & Manchester, 2020),

        W = (1 - m) I - Psi^-1 ((W_o^T W_o + Psi U U^T Psi)/(2 gamma) + A^T A + B^T - B).

    Theorem. Let `s` act on entries with slopes in [0, 1], and let

        M = Psi (I - W) + (I - W)^T Psi - (W_o^T W_o + Psi U U^T Psi)/gamma

    be positive definite. Then there is one equilibrium for every input, and `y` is Lipschitz
    continuous in `x` with the constant `gamma`. Here `M = 2 m Psi + 2 A^T A >= 2 m Psi`.

    Proof. The symmetric part of `Psi (I - W)` is at least `M/2`, positive definite: in the inner
    product `<z, Psi z>` the matrix `I - W` is strongly monotone. So is the inclusion
    `0 in (I - W) z - U x - b + dphi(z)`, as `dphi` is monotone in every diagonal metric, since
    `s = prox_phi` acts on entries; it has one zero. For two inputs let `d` be the difference of the
    states, `e` that of the inputs and `p = W d + U e` that of the arguments of `s`. Slopes in
    [0, 1] mean `d_i (p_i - d_i) >= 0`, and the sum with weights `Psi` is
    `d^T Psi (I - W) d <= d^T Psi U e`. Twice that gives

        d^T (M + (W_o^T W_o + Psi U U^T Psi)/gamma) d <= 2 (U^T Psi d)^T e
                                                      <= |U^T Psi d|^2/gamma + gamma |e|^2,

    and so `d^T M d + |W_o d|^2/gamma <= gamma |e|^2`: `|y - y'|^2 <= gamma^2 |x - x'|^2`.

    For ReLU, which commutes with positive factors, `Psi` changes nothing but the scale of states:
    `Psi^(1/2) z` obeys the same equation with `Psi = I`, `A Psi^(-1/2)` for `A` and
    `Psi^(-1/2) B Psi^(-1/2)` for `B`. For others it allows more networks. Norms and margins of this
    operator are those in the metric of `Psi`, in which splittings contract; resolvents and proximal
    maps are the same in all diagonal metrics.

    Args:
        in_features: Length of the input.
        features: Length of the state.
        out_features: Length of the output.
        gamma: The Lipschitz constant, positive.
        margin: `m`, positive.
    """

    last_maps: ClassVar[tuple[str, ...]] = ("W_o",)

    def __init__(
        self,
        in_features: int,
        features: int,
        out_features: int,
        gamma: float,
        margin: float,
    ) -> None:
        super().__init__(features, margin)
        require_positive(
            "LipschitzBounded.gamma",
            gamma,
            remedy="With the constant 0 the output would be the same for every input.",
        )
        require_count("LipschitzBounded.in_features", in_features)
        require_count("LipschitzBounded.out_features", out_features)
        self.gamma = float(gamma)
        self.U = nn.Parameter(torch.empty(features, in_features))
        self.W_o = nn.Parameter(torch.empty(out_features, features))
        self.log_psi = nn.Parameter(torch.zeros(features))
        for weight in (self.U, self.W_o):
            edge = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -edge, edge)

    def weights(self) -> OperatorWeights:
        psi = self.log_psi.exp()[:, None]
        scaled = psi * self.U
        gained = self.W_o.T @ self.W_o + scaled @ scaled.T
        rest = gained / (2 * self.gamma) + self.A.T @ self.A + self.B.T - self.B
        (W,) = self.combined((rest / psi,), 1 - self.margin, -1.0)
        return (W,)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return dense_norm(self._in_metric(weights[0]))

    def blocks(self, weights: OperatorWeights) -> Sequence[Tensor]:
        return super().blocks((self._in_metric(weights[0]),))

    def _in_metric(self, W: Tensor) -> Tensor:
        """`Psi^(1/2) W Psi^(-1/2)`, whose Euclidean norm is that of `W` in the metric of `Psi`."""
        half = (self.log_psi / 2).to(W.dtype)
        return (half[:, None] - half).exp() * W

    @torch.no_grad()
    def condition(self) -> float:
        """Return how far Euclidean norms may be from those of the metric: `sqrt(max/min Psi)`."""
        spread = float(self.log_psi.double().max() - self.log_psi.double().min())
        return math.exp(spread / 2) * (1 + 1e-14) if spread < 700 else math.inf

    @torch.no_grad()
    def inequality(self) -> Inequality:
        """Return what is proved of `W` as it is stored, and not as it is meant.

        Eigenvalues are computed in float64 and lowered by a bound of all rounding.
        """
        (W,) = (weight.double() for weight in self.weights())
        psi, U, W_o = (t.double() for t in (self.log_psi.double().exp(), self.U, self.W_o))
        eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
        gap = psi[:, None] * (eye - W)
        scaled = psi[:, None] * U
        parts = [gap + gap.T, -W_o.T @ W_o / self.gamma, -scaled @ scaled.T / self.gamma]
        if not all(bool(part.isfinite().all()) for part in parts):
            return Inequality(-math.inf, -math.inf)
        unit = 8 * (len(W) + W_o.shape[0] + U.shape[1]) * torch.finfo(torch.float64).eps
        size = sum(float(torch.linalg.matrix_norm(part)) for part in parts)
        lowest = float(torch.linalg.eigvalsh(parts[0] + parts[1] + parts[2])[0])
        tilted = parts[0] / torch.outer(psi, psi).sqrt() / 2
        margin = float(torch.linalg.eigvalsh(tilted)[0])
        error = unit * float(torch.linalg.matrix_norm(tilted))
        return Inequality(lowest - unit * size, margin - error)

    def extra_repr(self) -> str:
        return f"{len(self.A)}, gamma={self.gamma:g}, margin={self.margin:g}"
