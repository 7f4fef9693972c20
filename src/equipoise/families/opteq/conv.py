"""OptEq on images, with convolutions as weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import nn

from equipoise.core.validate import SettingError, require_count
from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.layer import (
    ActivationLike,
    OptEqLayer,
    RegularizerLike,
    Shape,
    each_activation,
    each_width,
)
from equipoise.families.opteq.norm_control import BOUND, Init, Norm
from equipoise.layers.options import SolveOptions
from equipoise.operators import Convolution, Operator, Padding, Pooled
from equipoise.operators import separable as make_separable

__all__ = ["OptEqConv2d", "each_side"]


class OptEqConv2d(OptEqLayer):
    """An OptEq on images, with convolutions as weights (OptEq, eq. 5 and 6).

    Its equilibrium solves a convex problem.

    `W_l` are convolutions of stride 1 that keep the image size, or that of an image of averages
    (`pool`), and `W_l^T` their exact adjoints.

    Args:
        in_channels: Channels of the input.
        state_channels: Channels of the state, which is the output.
        hidden: Output channels of `W_l`, one number for each layer; a number means one layer.
        kernel_size: Side of all kernels, of `W_l` and `U_l`, or their height and width. They must
            fit into the images.
        activation: As for `OptEq`, elementwise.
        alpha: As for `OptEq`.
        norm: As for `OptEq`; norms are proven bounds of the true operator norm at every image size.
            `orthogonal` brings all singular values close to `bound` on images without borders.
        regularizer: As for `OptEq`.
        padding: `zeros` or `circular`.
        groups: Channel groups of `W_l` that do not mix.
        separable: Whether `W_l` and `U_l` are depthwise-separable, as in the ImageNet models.
        pool: Side of the fields of pixels that `W_l` and `U_l` see as one, for all layers or one
            for each; 1 for all pixels. `W_l^T` writes to all pixels of a field. A layer with fields
            of 2 x 2 sees twice as far, for a quarter of the price.
        strength: As for `OptEq`.
        mu: As for `OptEq`.
        bound: As for `OptEq`.
        learn_alpha: As for `OptEq`.
        bias: As for `OptEq`.
        init: As for `OptEq`; orthogonal kernels are frames at their centre (Xiao et al., 2018).
        **solve: As for `OptEq`.

    Shape:
        (batch, in_channels, height, width) to (batch, state_channels, height, width).
    """

    def __init__(
        self,
        in_channels: int,
        state_channels: int,
        hidden: int | Sequence[int],
        kernel_size: int | tuple[int, int] = 3,
        activation: ActivationLike | Sequence[ActivationLike] = "relu",
        alpha: float | Sequence[float] = 0.8,
        norm: Norm = "scale",
        regularizer: RegularizerLike | None = None,
        *,
        padding: Padding = "zeros",
        groups: int = 1,
        separable: bool = False,
        pool: int | Sequence[int] = 1,
        strength: float = 0.1,
        mu: float = 1.0,
        bound: float = BOUND,
        learn_alpha: bool = False,
        bias: bool = True,
        init: Init = "auto",
        **solve: Unpack[SolveOptions],
    ) -> None:
        widths = each_width("OptEqConv2d", hidden)
        for name, value in (("in_channels", in_channels), ("state_channels", state_channels)):
            require_count(f"OptEqConv2d.{name}", value)
        size = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        for side in size:
            require_count("OptEqConv2d.kernel_size", side)
        if separable and groups != 1:
            raise ValueError(
                f"OptEqConv2d.groups must be 1 for separable convolutions; got {groups}."
            )

        sides = each_side("OptEqConv2d", pool, len(widths))

        def weight(width: int, side: int) -> Operator:
            made: Operator
            if separable:
                made = make_separable(state_channels, width, size, padding=padding)
            else:
                made = Convolution(state_channels, width, size, padding=padding, groups=groups)
            return made if side == 1 else Pooled(made, side)

        def injection(width: int, side: int) -> nn.Module:
            if separable:
                depthwise = _same_size(
                    in_channels, in_channels, size, padding, groups=in_channels, bias=False
                )
                made = [depthwise, nn.Conv2d(in_channels, width, 1, bias=bias)]
            else:
                made = [_same_size(in_channels, width, size, padding, bias=bias)]
            made = made if side == 1 else [nn.AvgPool2d(side), *made]
            return made[0] if len(made) == 1 else nn.Sequential(*made)

        cell = OptEqCell(
            [weight(*own) for own in zip(widths, sides, strict=True)],
            [injection(*own) for own in zip(widths, sides, strict=True)],
            each_activation(activation, len(widths)),
            alpha=alpha,
            learn_alpha=learn_alpha,
            mu=mu,
            norm=norm,
            bound=bound,
            start=in_channels == state_channels,
        )
        cell.draw_(init)
        if not all(own.elementwise for own in cell.activations):
            raise ValueError(
                "OptEqConv2d.activation must be elementwise; got a matrix activation. Use "
                "OptEq for it."
            )
        super().__init__(cell, regularizer, strength, **solve)
        self.in_channels = in_channels
        self.state_channels = state_channels

    def _shapes(self) -> tuple[Shape, Shape]:
        return ("batch", self.in_channels, "height", "width"), (
            "batch",
            self.state_channels,
            "height",
            "width",
        )


def each_side(owner: str, pool: int | Sequence[int], layers: int) -> list[int]:
    """Return the side of the pooled fields of each layer, from one number or several."""
    sides: list[Any] = list(pool) if isinstance(pool, list | tuple) else [pool] * layers
    if len(sides) != layers:
        rule = f"be a whole number, or a list of one for each of the {layers} layers"
        raise SettingError(f"{owner}.pool", rule, pool)
    for side in sides:
        require_count(f"{owner}.pool", side)
    return [int(side) for side in sides]


def _same_size(
    into: int, out: int, size: tuple[int, int], padding: Padding, *, bias: bool, groups: int = 1
) -> nn.Module:
    """A convolution that keeps the image size."""
    height, width = size
    if height % 2 and width % 2:
        return nn.Conv2d(
            into,
            out,
            size,
            padding=(height // 2, width // 2),
            padding_mode=padding,
            groups=groups,
            bias=bias,
        )
    margin = ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)
    pad = nn.ZeroPad2d(margin) if padding == "zeros" else nn.CircularPad2d(margin)
    return nn.Sequential(pad, nn.Conv2d(into, out, size, groups=groups, bias=bias))
