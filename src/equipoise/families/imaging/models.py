"""Networks that restore images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

from torch import nn

from equipoise.core.registry import choose
from equipoise.families.imaging.cell import GradientCell, ImagingCell, ProximalCell
from equipoise.families.imaging.network import ResidualNetwork
from equipoise.families.residual import WeightTied
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.image_network import ExplicitNetwork, ImageNetwork
from equipoise.operators.degradation import DEGRADATIONS, Degradation

__all__ = ["ImagingOptions", "Method"]

Method = Literal["gradient", "proximal"]
ACCURACY: SolveOptions = {"tolerance": 1e-3, "max_steps": 50}


class CellOptions(TypedDict, total=False):
    """The options of the cell.

    Attributes:
        degradation: What happened to the images, a name or a table such as
            `{ name = "blur", deviation = 1.6 }`; in a run, that of the data.
        width: Channels between the convolutions of R.
        depth: How many convolutions R has.
        kernel_size: Side of the convolutions, odd.
        epsilon: The largest Lipschitz constant of R - I.
        weight: The first weight of what was observed, which is learnt: eta of the proximal
            gradient, tau of gradient descent.
    """

    degradation: str | Mapping[str, Any] | Degradation
    width: int
    depth: int
    kernel_size: int
    epsilon: float
    weight: float


class ImagingOptions(CellOptions, SolveOptions, total=False):
    """The options of the cell and of its solve."""


def _cell(method: Method, channels: int, options: CellOptions) -> ImagingCell:
    proximal = method == "proximal"
    network = ResidualNetwork(
        channels,
        options.pop("width", 24),
        options.pop("depth", 3),
        options.pop("kernel_size", 3),
        options.pop("epsilon", 0.95 if proximal else 0.99),
    )
    degradation = DEGRADATIONS.resolve(options.pop("degradation", "identity"))
    weight = options.pop("weight", 0.8 if proximal else 0.5)
    return (ProximalCell if proximal else GradientCell)(degradation, network, weight)


def _network(method: Method, input_shape: Sequence[int], options: ImagingOptions) -> ImageNetwork:
    chosen = dict(options)
    cell = _cell(method, input_shape[0], chosen)  # type: ignore[arg-type]
    solve = chosen if chosen.get("stop") is not None else {**ACCURACY, **chosen}
    return ImageNetwork(
        nn.Identity(),
        Equilibrium(cell, **solve),  # type: ignore[arg-type]
        nn.Identity(),
        input_shape,
        size_multiple=1,
    )


@register_model("imaging-gradient")
def imaging_gradient(
    *, input_shape: Sequence[int] = (1, 40, 40), **options: Unpack[ImagingOptions]
) -> ImageNetwork:
    """Restores images by descent along a learnt regulariser (DE-Grad; Gilton et al., 2021).

    Args:
        input_shape: Channels, height and width of the images it is trained on; any size is taken.
        **options: See `ImagingOptions`.
    """
    return _network("gradient", input_shape, options)


@register_model("imaging-proximal")
def imaging_proximal(
    *, input_shape: Sequence[int] = (1, 40, 40), **options: Unpack[ImagingOptions]
) -> ImageNetwork:
    """Restores images by proximal gradient with a learnt map (DE-Prox; Gilton et al., 2021).

    Args:
        input_shape: Channels, height and width of the images it is trained on; any size is taken.
        **options: See `ImagingOptions`.
    """
    return _network("proximal", input_shape, options)


@register_model("imaging-unrolled")
def imaging_unrolled(
    *,
    input_shape: Sequence[int] = (1, 40, 40),
    method: Method = "gradient",
    steps: int = 10,
    checkpoint: bool = False,
    **options: Unpack[CellOptions],
) -> ExplicitNetwork:
    """The cell of the imaging networks applied a fixed number of times (deep unrolling).

    Args:
        input_shape: Channels, height and width of the images it is trained on; any size is taken.
        method: Whose cell: `gradient` or `proximal`.
        steps: How often it is applied.
        checkpoint: Whether steps are computed again in backward, for memory.
        **options: See `CellOptions`.
    """
    choose("imaging-unrolled.method", method, get_args(Method))
    body = WeightTied(_cell(method, input_shape[0], options), steps, checkpoint=checkpoint)
    return ExplicitNetwork(body, nn.Identity(), input_shape, size_multiple=1)
