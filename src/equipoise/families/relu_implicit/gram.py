"""The Gram matrices that govern training: `H`, `M`, `Q`, `G`, and the limit of `G` at any width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.memory import require_memory
from equipoise.families.relu_implicit.lemma import closed_forms
from equipoise.families.relu_implicit.network import ReluImplicitNetwork

__all__ = ["Gram", "gram", "limit_gram", "limit_variance"]


@dataclass(frozen=True)
class Gram:
    """`H = (gamma^2 M + 1 1^T) o Z Z^T + Q o X X^T + G` and what it is made of (Lemma 3.1).

    Attributes:
        M: `r_i . r_j/m` (eq. 16).
        Q: `E_i (r_i + v) . E_j (r_j + v)/m` (eq. 17).
        G: `Phi Phi^T`.
        Z: `Z Z^T`.
        X: `X X^T`.
        gamma: The scale.
    """

    M: Tensor
    Q: Tensor
    G: Tensor
    Z: Tensor
    X: Tensor
    gamma: float

    @property
    def H(self) -> Tensor:  # noqa: N802
        """The kernel of `d yhat/dt = -H (yhat - y)`."""
        return (self.gamma**2 * self.M + 1) * self.Z + self.Q * self.X + self.G


def gram(network: ReluImplicitNetwork, x: Tensor) -> Gram:
    """Return the Gram matrices at the present weights, by closed forms.

    Args:
        network: The network, with one output.
        x: Samples.
    """
    width = network.cell.width
    require_memory(
        "gram.network",
        2 * width**2 * x.element_size(),
        f"matrices of {width:,} x {width:,}",
        "Take a smaller width.",
    )
    forms = closed_forms(network, x)
    lit = forms.e * (forms.r + forms.v)
    return Gram(
        forms.r @ forms.r.T / width,
        lit @ lit.T / width,
        forms.phi @ forms.phi.T,
        forms.z @ forms.z.T,
        forms.x @ forms.x.T,
        forms.gamma,
    )


def limit_gram(x: Tensor) -> Tensor:
    """Return `G_inf = E[relu(X w) relu(X w)^T]`, `w` standard Gaussian, for rows of any length.

    `|x_i| |x_j| (sqrt(1 - t^2) + t (pi - arccos t))/(2 pi)`, `t` the cosine of their angle (Cho &
    Saul, 2009). Its smallest eigenvalue is `lambda_0`.

    Args:
        x: Samples, shape (n, d).
    """
    size, t = _angles(x)
    return size * ((1 - t**2).sqrt() + t * (math.pi - torch.arccos(t))) / (2 * math.pi)


def limit_variance(x: Tensor) -> Tensor:
    """Return the variances of `relu(x_i w) relu(x_j w)`: those of `G(0)` times the width.

    `E[relu(x_i w)^2 relu(x_j w)^2] = (3 sin cos + (pi - theta)(1 + 2 cos^2))/(2 pi)` (Cho & Saul).

    Args:
        x: Samples, shape (n, d).
    """
    size, t = _angles(x)
    theta = torch.arccos(t)
    fourth = 3 * (1 - t**2).sqrt() * t + (math.pi - theta) * (1 + 2 * t**2)
    return size**2 * fourth / (2 * math.pi) - limit_gram(x) ** 2


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    length = x.norm(dim=1)
    size = length[:, None] * length
    t = (x @ x.T / torch.where(size > 0, size, 1.0)).clamp(-1, 1)
    return size, t.fill_diagonal_(1.0)
