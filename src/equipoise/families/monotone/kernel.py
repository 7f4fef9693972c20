"""The tangent kernel of a monotone network with one output, by closed forms.

`yhat = u^T z`, `z = relu(W z + U x)`, `W = (1 - m) I - A^T A + B - B^T`. With
`v_i = D_i (I - D_i W)^-T u`, the kernel needs no Jacobian, which would have `2 n^2 + n d + n`
columns: all of it follows from products of the rows `v_i`, `z_i`, `x_i`, `A v_i` and `A z_i`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from equipoise.core.memory import require_memory
from equipoise.families.monotone.active_set import find_active_sets
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.layer import MonotoneDense
from equipoise.layers.options import SolveOptions

__all__ = ["MonotoneForms", "MonotoneRegression", "monotone_forms"]

EXACT: SolveOptions = {"tolerance": 1e-13, "max_steps": 3000, "on_failure": "ignore"}
"""Solved until rounding is all that is left."""


class MonotoneRegression(nn.Module):
    """The network of the theorems: a monotone layer without bias, and one linear output.

    Args:
        inputs: Length of an input.
        features: `n`, units of the state.
        margin: `m`.
        **solve: See `SolveOptions`; by default equilibria are solved up to rounding.

    Shape:
        (batch, inputs) to (batch, 1).
    """

    def __init__(self, inputs: int, features: int, margin: float = 1.0) -> None:
        super().__init__()
        self.equilibrium = MonotoneDense(inputs, features, margin, bias=False, **EXACT)
        self.u = nn.Parameter(torch.randn(features) / features**0.5)

    @property
    def operator(self) -> MonotoneMatrix:
        """`W` with its `A`, `B` and margin."""
        found = self.equilibrium.cell.operator
        assert isinstance(found, MonotoneMatrix)
        return found

    @property
    def U(self) -> Tensor:  # noqa: N802
        """The weights of the input, shape (features, inputs)."""
        linear = self.equilibrium.cell.inputs
        assert isinstance(linear, nn.Linear)
        return linear.weight

    @property
    def W(self) -> Tensor:  # noqa: N802
        """The matrix itself."""
        return self.operator.weights()[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for rows."""
        z: Tensor = self.equilibrium(x)
        return (z @ self.u)[:, None]


@dataclass(frozen=True)
class MonotoneForms:
    """What the thesis's formulas need, for `N` samples.

    Attributes:
        x: Inputs, shape (N, d).
        z: Equilibria, shape (N, n).
        v: `D (I - D W)^-T u`, shape (N, n).
        output: `u^T z`, shape (N,).
        A: The weights `A`.
    """

    x: Tensor
    z: Tensor
    v: Tensor
    output: Tensor
    A: Tensor

    def parts(self) -> dict[str, Tensor]:
        """Return the kernels of `A`, `B`, `U` and `u`, whose sum is `K` (Proposition 4)."""
        v, z = self.v, self.z
        Av, Az = v @ self.A.T, z @ self.A.T
        vv, zz, vz = v @ v.T, z @ z.T, v @ z.T
        cross = (Av @ Az.T) * vz.T
        return {
            "A": (Av @ Av.T) * zz + (Az @ Az.T) * vv + cross + cross.T,
            "B": 2 * (vv * zz - vz * vz.T),
            "U": vv * (self.x @ self.x.T),
            "u": zz,
        }

    def kernel(self) -> Tensor:
        """Return `K`, shape (N, N): `d yhat/dt = -K (yhat - y)` along the gradient flow."""
        return sum(self.parts().values(), torch.zeros_like(self.z[:1, :1]))

    def gradients(self, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of `|yhat - y|^2/2` (Lemma 3.2.3).

        With `G = sum_i e_i v_i z_i^T`: `-A (G + G^T)` in `A` and `G - G^T` in `B`.

        Args:
            y: Targets, shape (N,).
        """
        error = (self.output - y)[:, None]
        G = (error * self.v).T @ self.z
        return {
            "A": -self.A @ (G + G.T),
            "B": G - G.T,
            "U": (error * self.v).T @ self.x,
            "u": (error * self.z).sum(0),
        }


@torch.no_grad()
def monotone_forms(network: MonotoneRegression, x: Tensor) -> MonotoneForms:
    """Evaluate the closed forms at the present weights.

    Args:
        network: The network.
        x: Samples as rows.
    """
    width = len(network.u)
    size = x.element_size() * (4 * width**2 + 8 * x.shape[0] * width + 8 * len(x) ** 2)
    require_memory(
        "monotone_forms.network",
        size,
        f"matrices of {width:,} x {width:,} and {len(x):,} x {len(x):,}",
        "Take fewer units or samples.",
    )
    weights = network.operator.weights()
    gap = torch.eye(width, dtype=x.dtype, device=x.device) - weights[0]
    step_size = network.operator.typical_step_size(weights)
    found = find_active_sets(gap, x @ network.U.T, step_size)
    v = found.solve_adjoint(network.u)
    return MonotoneForms(x, found.z, v, found.z @ network.u, network.operator.A.detach())
