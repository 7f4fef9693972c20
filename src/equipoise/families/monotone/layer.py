"""Monotone operator networks on vectors and on images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from torch import Tensor, nn

from equipoise.core.validate import SettingError, require_count
from equipoise.families.monotone.cell import MonotoneCell, Splitting, StepSize, monotone_cell
from equipoise.families.monotone.convolution import MonotoneConvolution, require_odd
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.operator import require_margin
from equipoise.families.monotone.tiers import MonotoneTiers, TierInput
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.operators import Padding
from equipoise.prox.activation import Activation
from equipoise.prox.resolve import as_activation

__all__ = [
    "ActivationLike",
    "MonotoneConv2d",
    "MonotoneDense",
    "MonotoneLayer",
    "MonotoneMultiTier",
]

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
        """Raise unless `x` is an input of this layer, and `z0` a state to start at."""
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
        if z0 is None:
            return
        cell, start = self.cell, getattr(z0, "shape", None)
        state = (len(x), *cell.operator.state_shape(x, enlarged=cell.enlarged))
        if start is None or tuple(start) != state:
            raise SettingError(
                f"{name} z0",
                f"be a state of shape {state}",
                z0,
                "States of splittings differ from outputs: take layer.last.value.",
                got=type(z0).__name__ if start is None else f"shape {tuple(start)}",
            )


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
        step_size: `a` of the splitting; `auto` is `m/L^2` with a proven bound `L` of
            `|I - W|` for `forward-backward`, and between `1/L` and `1/m` for the others.
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


class MonotoneConv2d(MonotoneLayer):
    """A monotone operator network (MON) on images, with convolutions (Winston & Kolter, 2020).

    `z = s(W * z + U * x + b)` with `W = (1 - m) I - A^T A + B - B^T`, `A` and `B` convolutions.
    Resolvents are computed by Fourier transforms.

    Args:
        in_channels: Channels of the input.
        channels: Channels of the state, which is the output.
        kernel_size: Side of the kernels of `A`, `B` and `U`, odd.
        margin: As for `MonotoneDense`.
        activation: As for `MonotoneDense`.
        splitting: As for `MonotoneDense`.
        step_size: As for `MonotoneDense`.
        padding: `zeros`, as published, or `circular`.
        bias: As for `MonotoneDense`.
        **solve: As for `MonotoneDense`.

    Shape:
        (batch, in_channels, height, width) to (batch, channels, height, width).
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        kernel_size: int = 3,
        margin: float = 1.0,
        activation: ActivationLike = "relu",
        splitting: Splitting = "peaceman-rachford",
        step_size: StepSize = "auto",
        *,
        padding: Padding = "zeros",
        bias: bool = True,
        **solve: Unpack[SolveOptions],
    ) -> None:
        require_count("MonotoneConv2d.in_channels", in_channels)
        require_count("MonotoneConv2d.channels", channels)
        require_odd("MonotoneConv2d", kernel_size)
        require_margin("MonotoneConv2d", margin)
        operator = MonotoneConvolution(channels, kernel_size, margin, padding=padding)
        inputs = nn.Conv2d(
            in_channels,
            channels,
            kernel_size,
            padding=kernel_size // 2,
            padding_mode=padding,
            bias=bias,
        )
        cell = monotone_cell(
            "MonotoneConv2d", operator, inputs, as_activation(activation), splitting, step_size
        )
        super().__init__(cell, ("batch", in_channels, "height", "width"), **solve)
        self.in_channels, self.channels = in_channels, channels


class MonotoneMultiTier(MonotoneLayer):
    """A monotone operator network (MON) of several resolutions (Winston & Kolter, 2020, eq. 14).

    The input enters the finest tier, each tier the next one, at half its height and width, and the
    output is the coarsest. All of them are one equilibrium.

    Args:
        in_channels: Channels of the input.
        channels: Channels of each tier, the finest first.
        size: Height and width of the images, multiples of `2 ** (tiers - 1)`.
        margin: As for `MonotoneDense`.
        activation: As for `MonotoneDense`.
        splitting: As for `MonotoneDense`.
        step_size: As for `MonotoneDense`.
        bias: As for `MonotoneDense`.
        **solve: As for `MonotoneDense`.

    Shape:
        (batch, in_channels, height, width) to (batch, channels[-1], height', width').
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        size: tuple[int, int],
        margin: float = 1.0,
        activation: ActivationLike = "relu",
        splitting: Splitting = "peaceman-rachford",
        step_size: StepSize = "auto",
        *,
        bias: bool = True,
        **solve: Unpack[SolveOptions],
    ) -> None:
        require_count("MonotoneMultiTier.in_channels", in_channels)
        require_margin("MonotoneMultiTier", margin)
        operator = MonotoneTiers(channels, size, margin)
        cell = monotone_cell(
            "MonotoneMultiTier",
            operator,
            TierInput(in_channels, operator, bias=bias),
            as_activation(activation),
            splitting,
            step_size,
        )
        super().__init__(cell, ("batch", in_channels, *size), **solve)
        self.in_channels, self.channels = in_channels, tuple(channels)
