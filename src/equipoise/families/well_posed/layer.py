"""Well-posed layers, and their equivalence by diagonal scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor, nn

from equipoise.core.transforms import require_dtype
from equipoise.core.validate import SettingError
from equipoise.families.well_posed.cell import Condition, Norm, WellPosedCell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.prox.activation import Activation, Identity, LeakyReLU, ReLU
from equipoise.prox.resolve import as_activation

__all__ = ["ActivationLike", "WellPosed", "to_infinity_norm"]

ActivationLike = str | Activation | nn.Module | Callable[[Tensor], Tensor]


class WellPosed(Equilibrium):
    """An implicit network that is well-posed by the entries of `A` (El Ghaoui et al., 2021).

    `z = s(A z + B x + b)` with `|A|_inf <= kappa < 1`, or `lambda_pf(|A|) <= kappa < 1`: every
    input has one equilibrium, which plain iteration finds.

    Args:
        in_features: Length of the input.
        features: Length of the state, which is the output.
        kappa: The prescribed bound, in (0, 1). A smaller one makes the equilibrium easier to find
            and less sensitive to the input.
        condition: What is bounded by `kappa`: `infinity`, the largest row sum of `|A|`, or
            `perron-frobenius`, the eigenvalue of `|A|`, which allows more matrices.
        norm: `scale`, `project` (call `project_norms` after each step; the trainer does) or `none`;
            see `WellPosedCell`.
        activation: `s`: a name, an `Activation` or a torch module with slopes in [-1, 1].
        bias: Whether there is `b`.
        **solve: `solver`, `gradient`, `tolerance`, `max_steps`, `on_failure`, `stop`,
            `eval_options`; see `SolveOptions`.

    Shape:
        (batch, in_features) to (batch, features).
    """

    cell: WellPosedCell

    def __init__(
        self,
        in_features: int,
        features: int,
        kappa: float = 0.95,
        condition: Condition = "infinity",
        norm: Norm = "scale",
        activation: ActivationLike = "relu",
        *,
        bias: bool = True,
        **solve: Unpack[SolveOptions],
    ) -> None:
        cell = WellPosedCell(
            in_features, features, kappa, condition, norm, as_activation(activation), bias=bias
        )
        super().__init__(cell, **solve)
        self.in_features, self.features = in_features, features

    def check(self, x: Tensor, z0: Tensor | None = None) -> None:
        """Raise unless `x` is an input of this layer."""
        given: object = x
        if not isinstance(given, Tensor):
            raise SettingError("WellPosed input", "be a tensor", x, got=type(given).__name__)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise SettingError(
                "WellPosed input", f"have shape (batch, {self.in_features})", tuple(x.shape)
            )
        require_dtype(x, self.cell.A, "WellPosed input")


@torch.no_grad()
def to_infinity_norm(layer: WellPosed) -> tuple[WellPosed, Tensor]:
    """Return a layer with `|A|_inf < 1` and a vector `v`: its output times `v` is that of `layer`.

    `lambda_pf(|A|) < 1` gives `v > 0` with `|A| v < v`. In the variable `D^-1 z`, `D = diag(v)`,
    the network has the matrices `D^-1 A D`, of infinity norm below 1, and `D^-1 B`, if `s` commutes
    with positive factors as ReLU does: so both conditions describe the same networks (El Ghaoui et
    al., 2021, section 2).

    Args:
        layer: The layer.
    """
    cell = layer.cell
    if not isinstance(cell.activation, ReLU | LeakyReLU | Identity):
        raise SettingError(
            "to_infinity_norm.layer",
            "have a positively homogeneous activation: relu, leaky_relu or identity",
            layer,
            got=type(cell.activation).__name__,
        )
    bound, v = cell.bound()
    if not bound < 1:
        raise SettingError(
            "to_infinity_norm.layer",
            "have a Perron-Frobenius eigenvalue of |A| below 1",
            layer,
            "Use norm='scale' or norm='project'.",
            got=f"the bound {bound:.6g}",
        )
    linear = cell.inputs
    made = WellPosed(
        layer.in_features,
        layer.features,
        cell.kappa,
        norm="none",
        activation=cell.activation,
        bias=linear.bias is not None,
        stop=layer.stop,
    ).to(cell.A)
    made.cell.A.copy_(cell.matrix().double() * (v / v[:, None]))
    made.cell.inputs.weight.copy_(linear.weight.double() / v[:, None])
    if linear.bias is not None:
        made.cell.inputs.bias.copy_(linear.bias.double() / v)
    return made, v.to(cell.A)
