"""The statuses that solves ended with, as bars and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from equipoise.report.content import RunReport
from equipoise.report.curve import submapping, to_number
from equipoise.report.format import format_count, format_percent
from equipoise.report.markup import escape, make_scrollable, render_swatch, render_table
from equipoise.report.score import HELD_OUT

__all__ = ["render_statuses"]

COLOURS = {"CONVERGED": 1, "MAX_STEPS": 2, "STALLED": 6, "DIVERGED": 4, "NONFINITE": 5}
OTHER_COLOUR = 3


def render_statuses(report: RunReport) -> str:
    """Return how many solves ended with which status; empty if nothing was counted."""
    rows = _count_statuses(report)
    if not rows:
        return ""
    seen = {status for counts in rows.values() for status in counts}
    statuses = [status for status in COLOURS if status in seen] + sorted(seen.difference(COLOURS))
    bars = "".join(_render_bar(name, counts, statuses) for name, counts in rows.items())
    legend = "".join(render_swatch(_colour(status), _words(status)) for status in statuses)
    cells = [
        [
            escape(name),
            *(format_count(counts[status]) for status in statuses),
            format_percent(counts["CONVERGED"], counts.total()),
        ]
        for name, counts in rows.items()
    ]
    header = ["solves", *(escape(_words(status)) for status in statuses), "fraction converged"]
    title = "Solves, one for each sample"
    table = make_scrollable("counts", title, render_table(title, cells, header))
    return f'{bars}<ul class="legend">{legend}</ul>{table}'


def _count_statuses(report: RunReport) -> dict[str, Counter[str]]:
    """Training's counts come from the summary, else from the epochs, else from logged steps."""
    rows: dict[str, Counter[str]] = {}
    for way in ("forward", "backward"):
        key = f"{way}_status"
        total = _add([submapping(report.summary, key)])
        total = total or _add(submapping(line, key) for line in report.epochs)
        rows[f"training, {way}"] = total
        if not total:
            logged = _add(submapping(line, key) for line in report.steps)
            rows[f"training, {way}, logged steps"] = logged
    for split in HELD_OUT:
        rows[split] = _add([submapping(submapping(report.summary, split), "status")])
    return {name: counts for name, counts in rows.items() if counts}


def _add(lines: Iterable[Mapping[str, Any]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in lines:
        for status, count in line.items():
            if to_number(count) > 0:
                total[str(status)] += round(to_number(count))
    return total


def _render_bar(name: str, counts: Counter[str], statuses: list[str]) -> str:
    words = ", ".join(
        f"{format_count(counts[status])} {_words(status)}" for status in statuses if counts[status]
    )
    left, pieces = 0.0, ""
    for status in statuses:
        width = 100 * counts[status] / counts.total()
        pieces += f'<rect x="{left:.3f}" width="{width:.3f}" height="1" fill="{_colour(status)}"/>'
        left += width
    return (
        f'<h3>{escape(name.capitalize())}</h3><svg class="bar" viewBox="0 0 100 1" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(name)}: {escape(words)}">'
        f"{pieces}</svg>\n"
    )


def _colour(status: str) -> str:
    return f"var(--line-{COLOURS.get(status, OTHER_COLOUR)})"


def _words(status: str) -> str:
    return status.lower().replace("_", " ")
