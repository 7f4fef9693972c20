"""The picture of a tangent kernel's spectrum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from equipoise.plots.figure import COLOURS, DASHES, MARKERS, make_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_kernel"]


def plot_kernel(spectra: Mapping[str, np.ndarray]) -> Figure:
    """Draw the eigenvalues of tangent kernels, the largest first, on logarithmic axes.

    Eigenvalues that are zero or negative by rounding have no place there and are left out.

    Args:
        spectra: Eigenvalues by title, in any order.
    """
    figure = make_figure(6.4, 4.6)
    axes = figure.subplots()
    for place, (title, values) in enumerate(spectra.items()):
        falling = np.sort(values)[::-1]
        shown = falling[falling > 0]
        lost = len(values) - len(shown)
        axes.plot(
            np.arange(1, len(shown) + 1),
            shown,
            color=COLOURS[place % len(COLOURS)],
            linestyle=DASHES[place % len(DASHES)],
            marker=MARKERS[place % len(MARKERS)],
            markevery=max(1, len(shown) // 10),
            markersize=4,
            linewidth=1.6,
            label=title + (f" ({lost} not positive)" if lost else ""),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("number of the eigenvalue")
    axes.set_ylabel("eigenvalue of the tangent kernel")
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    return figure
