"""Monotone operator networks on vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count
from equipoise.families.monotone.cell import MonotoneCell, Splitting, StepSize, monotone_cell
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.operator import require_margin
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.prox.activation import Activation
from equipoise.prox.resolve import as_activation

__all__ = ["ActivationLike", "MonotoneDense", "MonotoneLayer"]

ActivationLike = str | Activation | nn.Module | Callable[[Tensor], Tensor]


class MonotoneLayer(Equilibrium):
    """What all monotone operator layers share: a cell, and the shape of their inputs."""

    cell: MonotoneCell

    def __init__(
        self, cell: MonotoneCell, shape: tuple[int | str, ...], **solve: Unpack[SolveOptions]
    ) -> None:
        super().__init__(cell, **solve)
        self.input_shape = shape

    @property
    def margin(self) -> float:
        """The margin `m` of `I - W >= m I`."""
        return self.cell.margin

    def check(self, x: Tensor, z0: Tensor | None = None) -> None:
        """Raise unless `x` is an input of this layer."""
        name, wanted = type(self).__name__, self.input_shape
        given: object = x
        if not isinstance(given, Tensor):
            raise SettingError(f"{name} input", "be a tensor", x, got=type(given).__name__)
        fits = x.dim() == len(wanted) and all(
            own == one for own, one in zip(x.shape, wanted, strict=True) if isinstance(one, int)
        )
        if not fits:
            shape = ", ".join(map(str, wanted))
            raise SettingError(f"{name} input", f"have shape ({shape})", tuple(x.shape))


class MonotoneDense(MonotoneLayer):
    """A monotone operator network (MON) on vectors (Winston & Kolter, 2020).

    `z = s(W z + U x + b)` with `W = (1 - m) I - A^T A + B - B^T`, so that `I - W >= m I`: every
    input has one equilibrium, whatever the weights are.

    Args:
        in_features: Length of the input.
        features: Length of the state, which is the output.
        margin: `m`, positive. A larger one makes the equilibrium easier to find and less sensitive
            to the input.
        activation: `s`: a name, an `Activation` or a torch module; the proximal map of a convex
            function. Splittings take `relu`, `leaky_relu`, `hard_tanh`, `soft_shrink`, `identity`.
        splitting: The map whose equilibrium is found: `peaceman-rachford`, `douglas-rachford` (both
            contract with any step size), `forward-backward` (with one that is small enough) or
            `none`, the equation itself, which may be found by Anderson's method or not at all.
        step_size: `a` of the splitting; `auto` is about `1/sqrt(m L)`, and `m/L^2` with a proven
            bound `L` of `|I - W|` for `forward-backward`.
        bias: Whether there is `b`.
        **solve: `solver`, `gradient`, `tolerance`, `max_steps`, `on_failure`, `stop`,
            `eval_options`; see `SolveOptions`.

    Shape:
        (batch, in_features) to (batch, features).
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        margin: float = 1.0,
        activation: ActivationLike = "relu",
        splitting: Splitting = "peaceman-rachford",
        step_size: StepSize = "auto",
        *,
        bias: bool = True,
        **solve: Unpack[SolveOptions],
    ) -> None:
        require_count("MonotoneDense.in_features", in_features)
        require_count("MonotoneDense.features", features)
        require_margin("MonotoneDense", margin)
        cell = monotone_cell(
            "MonotoneDense",
            MonotoneMatrix(features, margin),
            nn.Linear(in_features, features, bias=bias),
            as_activation(activation),
            splitting,
            step_size,
        )
        super().__init__(cell, ("batch", in_features), **solve)
        self.in_features, self.features = in_features, features
