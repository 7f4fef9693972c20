"""Figures."""

from equipoise.plots.objective import plot_objective

__all__ = [
    "plot_objective",
]
