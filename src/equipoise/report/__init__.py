"""Pictures of what a layer does, and a page about a training run."""

from equipoise.report.page import render_report
from equipoise.report.plot import plot_objective
from equipoise.report.run_report import MaskSample, RunReport, SolvePath

__all__ = ["MaskSample", "RunReport", "SolvePath", "plot_objective", "render_report"]
