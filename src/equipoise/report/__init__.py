"""Pages about training runs and sweeps."""

from equipoise.report.content import (
    Mistake,
    RunReport,
    ShownSample,
    SolvePath,
    SolveSpread,
    Survey,
)
from equipoise.report.page import render_report
from equipoise.report.sweep import SweepReport, SweptRun, render_sweep

__all__ = [
    "Mistake",
    "RunReport",
    "ShownSample",
    "SolvePath",
    "SolveSpread",
    "Survey",
    "SweepReport",
    "SweptRun",
    "render_report",
    "render_sweep",
]
