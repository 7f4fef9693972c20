"""The figure of a network's tangent kernel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.analysis import kernel_spectrum, tangent_kernel
from equipoise.plots import plot_kernel, save_figure
from equipoise.runs.curvature import copy_exact
from equipoise.runs.look import Look
from equipoise.runs.look_solves import SolveSettings, open_panels
from equipoise.runs.network import Source

__all__ = ["look_kernel"]


def look_kernel(sources: Sequence[Source], settings: SolveSettings, folder: Path) -> Look:
    """Draw the spectrum of the tangent kernel of networks, perhaps through their training.

    The kernel `J J^T` of all outputs and samples is computed in float64, with equilibria solved to
    1e-8.

    Args:
        sources: The networks.
        settings: Which samples and epochs.
        folder: Where to write.
    """
    spectra: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    lines: list[str] = []
    for panel in open_panels(sources, settings):
        kernel = tangent_kernel(copy_exact(panel.network.run.model), panel.x.cpu().double())
        spectra[panel.title] = found = kernel_spectrum(kernel.detach()).numpy()
        values[panel.title] = {"eigenvalues": found.tolist()}
        lines.append(
            f"{panel.title}: {len(found)} eigenvalues from {found[0]:.3g} to {found[-1]:.3g}, "
            f"trace {found.sum():.4g}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    caption = (
        f"Spectrum of the tangent kernel of all outputs at {len(panel.samples)} samples of "
        f"{panel.samples.split!r}, all parameters, in float64."
    )
    return Look(save_figure(plot_kernel(spectra), folder / "kernel", caption), lines, values)
