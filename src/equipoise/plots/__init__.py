"""Figures."""

from equipoise.plots.figure import save_figure
from equipoise.plots.kernel import plot_kernel
from equipoise.plots.landscape import plot_landscape
from equipoise.plots.objective import plot_objective
from equipoise.plots.spectrum import plot_spectrum
from equipoise.plots.trajectory import plot_residuals, plot_trajectories

__all__ = [
    "plot_kernel",
    "plot_landscape",
    "plot_objective",
    "plot_residuals",
    "plot_spectrum",
    "plot_trajectories",
    "save_figure",
]
