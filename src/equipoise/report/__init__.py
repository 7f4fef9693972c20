"""A page about a training run."""

from equipoise.report.content import RunReport, ShownSample, SolvePath
from equipoise.report.page import render_report

__all__ = [
    "RunReport",
    "ShownSample",
    "SolvePath",
    "render_report",
]
