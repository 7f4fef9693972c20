"""A page about a training run."""

from equipoise.report.content import MaskSample, RunReport, SolvePath
from equipoise.report.page import render_report

__all__ = [
    "MaskSample",
    "RunReport",
    "SolvePath",
    "render_report",
]
