"""The multiscale layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from equipoise.families.multiscale.cell import MultiscaleCell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions

__all__ = ["ACCURACY", "Multiscale", "solved_to"]

ACCURACY: SolveOptions = {"solver": "broyden", "tolerance": 1e-3, "max_steps": 30}
"""Broyden's method and about as many steps as in the authors' experiments."""


class Multiscale(Equilibrium):
    """A multiscale DEQ: several resolutions of an image as one equilibrium (Bai et al., 2020).

    Args:
        channels: Channels of each resolution, the finest first.
        expansion: How many times as many channels the blocks have between their convolutions.
        groups: Groups of the normalisations, 1 or even, which must divide all `channels`.
        weight_norm: Whether kernels are normalised, once for each solve.
        dropout: Probability of dropping a channel of a block in training, with one mask for a
            solve.
        deviation: Standard deviation of the first kernels.
        gain: First weights of the normalisations through which the state comes back; see
            `MultiscaleCell`.
        **solve: `solver`, `gradient`, `tolerance`, `max_steps`, `on_failure`, `stop`,
            `eval_options`; see `SolveOptions`. By default Broyden's method, 30 steps at most, to
            1e-3.

    Shape:
        (batch, channels[0], height, width) to a tuple of (batch, channels[i], height/2^i,
        width/2^i). Sides must be multiples of `2^(resolutions - 1)`.
    """

    cell: MultiscaleCell

    def __init__(
        self,
        channels: Sequence[int],
        expansion: int = 5,
        groups: int = 8,
        *,
        weight_norm: bool = True,
        dropout: float = 0.0,
        deviation: float = 0.01,
        gain: float = 0.2,
        **solve: Unpack[SolveOptions],
    ) -> None:
        cell = MultiscaleCell(
            channels,
            expansion,
            groups,
            weight_norm=weight_norm,
            dropout=dropout,
            deviation=deviation,
            gain=gain,
        )
        super().__init__(cell, **solved_to(ACCURACY, solve))


def solved_to(accuracy: SolveOptions, solve: SolveOptions) -> SolveOptions:
    """Return options with defaults, of which a stopping rule in full replaces the numbers."""
    if solve.get("stop") is None:
        return accuracy | solve
    return {"solver": accuracy["solver"], **solve}
