"""Pictures of spectra: eigenvalues in the complex plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from equipoise.plots.figure import COLOURS, grid_of, make_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_spectrum"]


def plot_spectrum(
    values: Mapping[str, np.ndarray], solved: Mapping[str, np.ndarray] | None = None
) -> Figure:
    """Draw the eigenvalues of Jacobians in the complex plane, with the unit circle.

    Plain iteration converges near an equilibrium whose eigenvalues are all inside.

    Args:
        values: Complex eigenvalues by title, shape (samples, eigenvalues); NaN is left out.
        solved: Which samples are at an equilibrium, by title; the others are hollow triangles.
    """
    rows, columns = grid_of(len(values))
    figure = make_figure(0.6 + 4.2 * columns, 0.5 + 4.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    turn = np.linspace(0, 2 * np.pi, 241)
    for axes, (title, found) in zip(panels, values.items(), strict=False):
        at = np.ones(len(found), bool) if solved is None else solved[title]
        inside, outside = found[at], found[~at]
        axes.plot(np.cos(turn), np.sin(turn), color="#444444", linewidth=1, linestyle="--")
        axes.scatter(
            inside.real,
            inside.imag,
            s=9,
            color=COLOURS[0],
            alpha=0.5,
            linewidths=0,
            label=f"{len(inside)} equilibria",
        )
        if len(outside):
            axes.scatter(
                outside.real,
                outside.imag,
                s=12,
                marker="^",
                facecolors="none",
                edgecolors=COLOURS[1],
                linewidths=0.6,
                label=f"{len(outside)} unsolved states",
            )
            axes.legend(frameon=False, fontsize=8)
        known = found[np.isfinite(found).any(axis=1)]
        radius = np.nanmax(np.abs(known), axis=1) if known.size else np.full(1, np.nan)
        axes.set_title(
            f"{title}\nspectral radius {radius.min():.3g} to {radius.max():.3g}", fontsize=10
        )
        axes.set_xlabel("real part")
        axes.set_ylabel("imaginary part")
        axes.set_aspect("equal", adjustable="datalim")
        tidy(axes)
    for axes in panels[len(values) :]:
        axes.set_axis_off()
    return figure
