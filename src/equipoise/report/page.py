"""One page of HTML about a run: everything inside, no scripts, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterable

from equipoise.report.chart import Chart, draw
from equipoise.report.content import RunReport
from equipoise.report.markup import escape, sections
from equipoise.report.section import (
    confusion_matrix,
    curves,
    describe_solve,
    masks,
    rates,
    solve_charts,
    solve_title,
    solver,
    statuses,
    tiles,
)
from equipoise.report.style import STYLE

__all__ = ["render_report"]


def render_report(report: RunReport) -> str:
    """Return a training run as one page of HTML that can be sent to others and opened without a network.

    Its content policy allows one style sheet, known by its hash, and pictures that are part of the
    page: nothing in a name or a setting can run or fetch anything. The same report gives the same
        page.

    Args:
        report: What the run did. Sections without data are left out.
    """
    numbers = itertools.count()

    def charts(found: Iterable[Chart]) -> str:
        drawn = "".join(draw(chart, next(numbers)) for chart in found)
        return f'<div class="charts">\n{drawn}</div>' if drawn else ""

    solves = [
        (solve_title(solve), describe_solve(solve) + charts(solve_charts(solve, report)))
        for solve in report.solves
    ]
    parts = (
        ("Training", charts(curves(report))),
        ("Learning rate and gradient", charts(rates(report))),
        ("Solver", charts(solver(report))),
        ("How solves ended", statuses(report)),
        ("Confusion matrix", confusion_matrix(report)),
        ("Sample masks", masks(report)),
        *solves,
        ("Configuration", _settings(sections(report.config, "general"))),
        ("Environment", _settings(sections(report.environment, "general"))),
    )
    body = "\n".join(
        f"<section><h2>{name}</h2>\n{content}</section>" for name, content in parts if content
    )
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri "
        "'none'; form-action 'none'"
    )
    title = escape(report.title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{title}</h1>
<dl class="tiles">
{tiles(report)}</dl></header>
{body}
</main>
</body>
</html>
"""


def _settings(tables: str) -> str:
    return f'<div class="settings">{tables}</div>' if tables else ""
