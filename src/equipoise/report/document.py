"""A page of HTML: everything inside, no scripts, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterable

from equipoise.report.chart import Chart, draw
from equipoise.report.histogram import Histogram, draw_histogram
from equipoise.report.markup import escape
from equipoise.report.style import STYLE

__all__ = ["ChartDrawer", "render_document"]


class ChartDrawer:
    """Draws the charts of one page, whose ids it keeps apart."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def draw(self, charts: Iterable[Chart | Histogram]) -> str:
        """Return charts as HTML; empty if none of them has anything to draw."""
        drawn = "".join(
            draw(chart, next(self._numbers))
            if isinstance(chart, Chart)
            else draw_histogram(chart, next(self._numbers))
            for chart in charts
        )
        return f'<div class="charts">\n{drawn}</div>' if drawn else ""


def render_document(
    title: str, subtitle: str, tiles: str, sections: Iterable[tuple[str, str]]
) -> str:
    """Return one page of HTML that can be sent around and opened without a network.

    Its content policy allows one style sheet, known by its hash, and images that are part of the
    page: nothing in a name or a setting can run or fetch anything.

    Args:
        title: Its heading, as text.
        subtitle: A line below, as text.
        tiles: The large numbers of its head, as HTML.
        sections: Headings as text, each with its content as HTML; empty ones are left out.
    """
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
    heading = escape(title)
    lead = f'<p class="lead">{escape(subtitle)}</p>\n' if subtitle else ""
    tab = f"{heading}, {escape(subtitle)}" if subtitle else heading
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
<header><h1>{heading}</h1>
{lead}<dl class="tiles">
{tiles}</dl></header>
{body}
</main>
</body>
</html>
"""
