"""One page of HTML about a run: everything inside, no scripts, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from equipoise.report.chart import Chart, draw
from equipoise.report.content import RunReport
from equipoise.report.histogram import Histogram, draw_histogram
from equipoise.report.markup import escape, render_setting_tables
from equipoise.report.prediction import render_bad_samples, render_confusion, render_samples
from equipoise.report.solve import render_solve, solve_charts, solve_title
from equipoise.report.status import render_statuses
from equipoise.report.style import STYLE
from equipoise.report.survey import render_mistakes, spread_histograms, spread_title
from equipoise.report.tiles import render_tiles
from equipoise.report.training import (
    describe_one_step,
    optimizer_charts,
    score_charts,
    solver_charts,
    tolerance_rule,
)

__all__ = ["render_report"]


def render_report(report: RunReport) -> str:
    """Return a run as one page of HTML that can be sent around and opened without a network.

    Its content policy allows one style sheet, known by its hash, and images that are part of the
    page: nothing in a name or a setting can run or fetch anything. The same report gives the same
    page.

    Args:
        report: What the run did. Sections without data are left out.
    """
    numbers = itertools.count()

    def draw_all(charts: Iterable[Chart | Histogram]) -> str:
        drawn = "".join(
            draw(chart, next(numbers))
            if isinstance(chart, Chart)
            else draw_histogram(chart, next(numbers))
            for chart in charts
        )
        return f'<div class="charts">\n{drawn}</div>' if drawn else ""

    sections = [
        ("Training", draw_all(score_charts(report))),
        ("Learning rate, gradient and throughput", draw_all(optimizer_charts(report))),
        ("Solver", describe_one_step(report) + draw_all(solver_charts(report))),
        (spread_title(report.survey), draw_all(spread_histograms(report.survey))),
        ("How solves ended", render_statuses(report)),
        ("Confusion matrix", render_confusion(report)),
        ("Misclassified samples", render_mistakes(report.survey)),
        ("Samples", render_samples(report)),
        ("Samples that could not be read", render_bad_samples(report)),
    ]
    tolerance = tolerance_rule(report)
    for solve in report.solves:
        charts = draw_all(solve_charts(solve, tolerance))
        sections.append((solve_title(solve), render_solve(solve) + charts))
    sections += [
        ("Configuration", _render_settings(report.config)),
        ("Environment", _render_settings(report.environment)),
    ]
    body = "\n".join(
        f"<section><h2>{escape(name)}</h2>\n{content}</section>"
        for name, content in sections
        if content
    )
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    title = escape(report.title)
    tab = f"{title}, {escape(report.subtitle)}" if report.subtitle else title
    subtitle = f'<p class="lead">{escape(report.subtitle)}</p>\n' if report.subtitle else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{tab}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>
{subtitle}<dl class="tiles">
{render_tiles(report)}</dl></header>
{body}
</main>
</body>
</html>
"""


def _render_settings(settings: Mapping[str, Any]) -> str:
    tables = render_setting_tables(settings, "general")
    return f'<div class="settings">{tables}</div>' if tables else ""
