"""Lipschitz-bounded layers."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from equipoise.core.validate import SettingError, require_count, require_positive
from equipoise.families.lipschitz.cell import LipschitzCell
from equipoise.families.lipschitz.matrix import LipschitzMatrix
from equipoise.families.monotone import Splitting
from equipoise.families.monotone.cell import StepSize
from equipoise.families.monotone.layer import ActivationLike
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.prox.resolve import as_activation

__all__ = ["LipschitzBounded"]


class LipschitzBounded(Equilibrium):
    """A Lipschitz-bounded equilibrium network (LBEN; Revay, Wang & Manchester, 2020).

    `y = W_o z + b_o`, `z = s(W z + U x + b)`, where `W` is made such that every input has one
    equilibrium and `|y - y'| <= gamma |x - x'|` in Euclidean norms, whatever the parameters are.

    Args:
        in_features: Length of the input.
        features: Length of the state.
        out_features: Length of the output.
        gamma: The Lipschitz constant, positive.
        margin: `m`, positive: how strongly monotone `I - W` is, in the metric of `Psi`.
        activation: `s`: a name, an `Activation` or a torch module, elementwise with slopes in
            [0, 1]; see `MonotoneDense` for those that splittings take.
        splitting: `peaceman-rachford`, `douglas-rachford`, `forward-backward` or `none`, as for
            `MonotoneDense`.
        step_size: That of the splitting, or `auto`.
        bias: Whether there are `b` and `b_o`.
        **solve: `solver`, `gradient`, `tolerance`, `max_steps`, `on_failure`, `stop`,
            `eval_options`; see `SolveOptions`.

    Shape:
        (batch, in_features) to (batch, out_features).
    """

    cell: LipschitzCell

    def __init__(
        self,
        in_features: int,
        features: int,
        out_features: int,
        gamma: float = 1.0,
        margin: float = 0.1,
        activation: ActivationLike = "relu",
        splitting: Splitting = "peaceman-rachford",
        step_size: StepSize = "auto",
        *,
        bias: bool = True,
        **solve: Unpack[SolveOptions],
    ) -> None:
        require_count("LipschitzBounded.features", features)
        require_positive(
            "LipschitzBounded.margin",
            margin,
            remedy="Only then has every input one equilibrium.",
        )
        operator = LipschitzMatrix(in_features, features, out_features, gamma, margin)
        cell = LipschitzCell(operator, as_activation(activation), splitting, step_size, bias=bias)
        super().__init__(cell, **solve)
        self.in_features, self.features, self.out_features = in_features, features, out_features

    @property
    def gamma(self) -> float:
        """The Lipschitz constant."""
        return self.cell.gamma

    def check(self, x: Tensor, z0: Tensor | None = None) -> None:
        """Raise unless `x` is an input of this layer."""
        given: object = x
        if not isinstance(given, Tensor):
            raise SettingError("LipschitzBounded input", "be a tensor", x, got=type(given).__name__)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise SettingError(
                "LipschitzBounded input", f"have shape (batch, {self.in_features})", tuple(x.shape)
            )

    def slopes(self, x: Tensor) -> Tensor:
        """Return the norm of the Jacobian `dy/dx` at each sample: what of `gamma` is in use.

        `dy/dx = W_o (I - S W)^-1 S U`, `S` the slopes of the activation. No norm is above `gamma`.

        Args:
            x: Samples, shape (batch, in_features); each takes a matrix of the state's size squared.
        """
        jacobian = torch.func.vmap(torch.func.jacrev(lambda row: self(row[None])[0]))(x.detach())
        norms: Tensor = torch.linalg.matrix_norm(jacobian, 2)
        return norms.detach()
