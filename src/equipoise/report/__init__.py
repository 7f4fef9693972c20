"""Pictures of what a layer does."""

from equipoise.report.plot import plot_objective

__all__ = ["plot_objective"]
