"""The network of the convergence theorems, and models of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count, require_flag
from equipoise.families.relu_implicit.cell import ReluImplicitCell
from equipoise.layers.belief import input_lipschitz_of
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.lipschitz import Bound, Chain, Part, Sum, unknown
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.model import Model
from equipoise.operators import dense_norm

__all__ = ["ReluImplicitNetwork", "ReluImplicitOptions"]

ACCURACY: SolveOptions = {"solver": "fixed_point", "tolerance": 1e-5, "max_steps": 100}
"""The step contracts by about 0.2, so that plain steps gain five digits in seven."""


class ReluImplicitNetwork(Model):
    """`y = u^T z + v^T phi` with the equilibrium `z` of `ReluImplicitCell` (Gao et al., 2022).

    Samples are flattened, and divided by their length, as the theorems assume (`|x| = 1`).

    Args:
        input_shape: Shape of a sample.
        width: `m`.
        gamma: The scale of `A`, in (0, 1).
        outputs: How many numbers are predicted, each with its own `u` and `v`.
        unit_norm: Whether samples are divided by their length.
        project: Whether training keeps the step a contraction; see `ReluImplicitCell`.
        **solve: See `SolveOptions`.

    Shape:
        (batch, *input_shape) to (batch, outputs).
    """

    last_maps: ClassVar[tuple[str, ...]] = ("u", "v")

    def __init__(
        self,
        input_shape: Sequence[int],
        width: int = 1000,
        gamma: float = 0.1,
        *,
        outputs: int = 1,
        unit_norm: bool = True,
        project: bool = False,
        **solve: Unpack[SolveOptions],
    ) -> None:
        super().__init__()
        for side in input_shape:
            require_count("ReluImplicit.input_shape", side)
        require_count("ReluImplicit.outputs", outputs)
        require_flag("ReluImplicit.unit_norm", unit_norm)
        self.input_shape = tuple(input_shape)
        self.unit_norm = unit_norm
        cell = ReluImplicitCell(math.prod(self.input_shape), width, gamma, project=project)
        chosen = solve if solve.get("stop") is not None else ACCURACY | solve
        self.equilibrium = Equilibrium(cell, **chosen)
        # Random signs: the symmetric Bernoulli distribution of Assumption 1.
        self.u = nn.Parameter(2.0 * torch.randint(0, 2, (outputs, width)) - 1)
        self.v = nn.Parameter(2.0 * torch.randint(0, 2, (outputs, width)) - 1)

    @property
    def cell(self) -> ReluImplicitCell:
        """The cell."""
        cell = self.equilibrium.cell
        assert isinstance(cell, ReluImplicitCell)
        return cell

    def prepare(self, x: Tensor) -> Tensor:
        """Return samples as rows, of unit length if so set."""
        if not x.is_floating_point():
            raise SettingError(
                f"The input of {self.name}", "be floating-point numbers", x, got=str(x.dtype)
            )
        numbers = math.prod(self.input_shape)
        if x.dim() < 2 or (x.shape[1:] != self.input_shape and x.shape[1:] != (numbers,)):
            shape = ", ".join(map(str, self.input_shape))
            raise SettingError(
                f"The input of {self.name}", f"have shape (batch, {shape})", tuple(x.shape)
            )
        x = x.flatten(1)
        if not self.unit_norm:
            return x
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return x / torch.where(length > 0, length, 1.0)  # a sample of zeros stays one

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for rows."""
        phi = self.cell.inject(x)
        z: Tensor = self.equilibrium(x, context=phi)
        return z @ self.u.T + phi @ self.v.T

    @torch.no_grad()
    def output_lipschitz(self) -> Part:
        """Return how far predictions move with the samples, unless they are divided by lengths."""
        if self.unit_norm:
            return unknown("unit_norm", "dividing a sample by its length moves short ones far")
        u, v = (
            Bound(name, float(dense_norm(weight.double())), "spectral norm")
            for name, weight in (("u", self.u), ("v", self.v))
        )
        direct = Chain((input_lipschitz_of(self.cell), v))
        return Sum((Chain((self.equilibrium, u)), direct), "u z + v phi")


class ReluImplicitOptions(SolveOptions, total=False):
    """The options of the models; `ReluImplicitNetwork` explains them.

    Attributes:
        width: Units of the state, `m`.
        gamma: The scale of `A`, in (0, 1).
        unit_norm: Whether samples are divided by their length.
        project: Whether training keeps the step a contraction.
    """

    width: int
    gamma: float
    unit_norm: bool
    project: bool


@register_model("relu-implicit")
def relu_implicit(
    *,
    input_shape: Sequence[int] = (1, 28, 28),
    num_classes: int = 1,
    **options: Unpack[ReluImplicitOptions],
) -> ReluImplicitNetwork:
    """Any samples as rows: the implicit ReLU network with convergence theorems (Gao et al., 2022).

    One output for the task `binary-regression`, as many as classes or numbers for others.

    Args:
        input_shape: Shape of a sample.
        num_classes: Number of outputs.
        **options: See `ReluImplicitOptions`.
    """
    return ReluImplicitNetwork(input_shape, outputs=num_classes, **options)
