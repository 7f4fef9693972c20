"""A page about a training run."""

from equipoise.report.content import (
    Mistake,
    RunReport,
    ShownSample,
    SolvePath,
    SolveSpread,
    Survey,
)
from equipoise.report.page import render_report

__all__ = [
    "Mistake",
    "RunReport",
    "ShownSample",
    "SolvePath",
    "SolveSpread",
    "Survey",
    "render_report",
]
