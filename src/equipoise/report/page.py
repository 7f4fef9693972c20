"""The page about a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.report.certificate import render_certificate
from equipoise.report.content import RunReport
from equipoise.report.document import ChartDrawer, render_document
from equipoise.report.image import render_figures
from equipoise.report.markup import render_setting_tables
from equipoise.report.prediction import render_bad_samples, render_confusion, render_samples
from equipoise.report.solve import render_solve, solve_charts, solve_title
from equipoise.report.status import render_statuses
from equipoise.report.survey import render_mistakes, spread_histograms, spread_title
from equipoise.report.tiles import render_tiles
from equipoise.report.training import (
    describe_idle_parts,
    describe_one_step,
    optimizer_charts,
    part_charts,
    score_charts,
    solver_charts,
    tolerance_rule,
)

__all__ = ["render_report"]


def render_report(report: RunReport) -> str:
    """Return a run as one page of HTML, as of `render_document`.

    The same report gives the same page.

    Args:
        report: What the run did. Sections without data are left out.
    """
    drawer = ChartDrawer()
    sections = [
        ("Training", drawer.draw(score_charts(report))),
        ("Learning rate, gradient and throughput", drawer.draw(optimizer_charts(report))),
        ("Solver", describe_one_step(report) + drawer.draw(solver_charts(report))),
        (
            "What each part of the equilibrium gets and gives",
            describe_idle_parts(report) + drawer.draw(part_charts(report)),
        ),
        (spread_title(report.survey), drawer.draw(spread_histograms(report.survey))),
        ("How solves ended", render_statuses(report)),
        ("Confusion matrix", render_confusion(report)),
        ("Misclassified samples", render_mistakes(report.survey)),
        ("Samples", render_samples(report)),
        ("Samples that could not be read", render_bad_samples(report)),
    ]
    tolerance = tolerance_rule(report)
    for solve in report.solves:
        charts = drawer.draw(solve_charts(solve, tolerance))
        sections.append((solve_title(solve), render_solve(solve) + charts))
    sections += [
        ("What is proved of the network", render_certificate(report.certificate)),
        ("Figures", render_figures(report.figures)),
        ("Configuration", _render_settings(report.config)),
        ("Environment", _render_settings(report.environment)),
    ]
    return render_document(report.title, report.subtitle, render_tiles(report), sections)


def _render_settings(settings: Mapping[str, Any]) -> str:
    tables = render_setting_tables(settings, "general")
    return f'<div class="settings">{tables}</div>' if tables else ""
