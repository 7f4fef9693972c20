"""Closed forms of the paper: gradients (Lemma 2.3) and what they are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.families.relu_implicit.network import ReluImplicitNetwork

__all__ = ["ClosedForms", "closed_forms"]

MAX_NUMBERS = 2**25
"""Numbers in the matrices that are solved together."""


@dataclass(frozen=True)
class ClosedForms:
    """What the paper's formulas need, for `n` samples of a network with one output.

    Attributes:
        x: Inputs as the network sees them, shape (n, d).
        phi: `relu(V x)/sqrt(m)`, shape (n, m).
        z: The equilibria, shape (n, m).
        r: `D (I - (gamma/sqrt(m)) D A)^-T u`, shape (n, m).
        e: `E`, the active units of `V x` as 0 and 1, shape (n, m).
        output: `u^T z + v^T phi`, shape (n,).
        gamma: The scale.
        v: The weights `v`.
    """

    x: Tensor
    phi: Tensor
    z: Tensor
    r: Tensor
    e: Tensor
    output: Tensor
    gamma: float
    v: Tensor

    def gradients(self, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of `sum (output - y)^2 / 2` (Lemma 2.3, eqs. 10 to 13).

        `dL/dA = (gamma/sqrt(m)) sum_i e_i r_i z_i^T` (the printed eq. 10 lacks the factor),
        `dL/dV = (1/sqrt(m)) sum_i e_i E_i (r_i + v) x_i^T`, `dL/du = sum_i e_i z_i`,
        `dL/dv = sum_i e_i phi_i`, with `e_i = output_i - y_i`.

        Args:
            y: Targets, shape (n,).
        """
        error = (self.output - y)[:, None]
        root = math.sqrt(self.z.shape[1])
        return {
            "A": self.gamma / root * (error * self.r).T @ self.z,
            "V": ((error * self.e * (self.r + self.v)).T @ self.x) / root,
            "u": (error * self.z).sum(0),
            "v": (error * self.phi).sum(0),
        }


@torch.no_grad()
def closed_forms(network: ReluImplicitNetwork, x: Tensor) -> ClosedForms:
    """Evaluate the closed forms at the present weights, by elimination.

    Args:
        network: The network, with one output.
        x: Samples.
    """
    if len(network.u) != 1:
        raise ValueError(
            f"closed_forms.network must have one output, as in the paper; got {len(network.u)}."
        )
    cell = network.cell
    rows = network.prepare(x)
    phi = cell.inject(rows)
    z: Tensor = network.equilibrium(rows)
    active = (torch.addmm(phi, z, cell.A.T, alpha=cell.scale) > 0).to(z)
    u, v = network.u[0], network.v[0]
    width = cell.width
    size = max(MAX_NUMBERS // width**2, 1)
    eye = torch.eye(width, dtype=z.dtype, device=z.device)
    parts = []
    for some in torch.split(active, size):
        system = eye - cell.scale * some[:, :, None] * cell.A  # I - gb D A
        parts.append(some * torch.linalg.solve(system.mT, u.expand(len(some), -1)))
    return ClosedForms(
        rows, phi, z, torch.cat(parts), (phi > 0).to(z), z @ u + phi @ v, cell.gamma, v.clone()
    )
