"""A look at some of the scored samples: how their solves ended, and which are wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from equipoise.report.chart import Rule
from equipoise.report.content import Mistake, Survey
from equipoise.report.curve import MIN_VALUE, to_number
from equipoise.report.format import DASH, format_count, format_number, format_percent, format_plural
from equipoise.report.histogram import Histogram
from equipoise.report.image import encode, shrink, to_bytes
from equipoise.report.markup import escape, make_scrollable, render_table

__all__ = ["render_mistakes", "spread_histograms", "spread_title"]

MAX_MISTAKES = 12
MAX_SIDE = 96  # pixels of a mistake's image; it is shown small


def spread_title(survey: Survey | None) -> str:
    """Return the heading of the histograms."""
    return f"Solves of {_count(survey)}" if survey is not None else ""


def spread_histograms(survey: Survey | None) -> Iterator[Histogram]:
    """Steps and residuals of samples."""
    if survey is None:
        return
    spreads = survey.solves
    names = [spread.name or "forward" for spread in spreads]
    steps = dict(zip(names, (spread.steps for spread in spreads), strict=True))
    yield Histogram("Steps of each sample", steps, "solver steps")
    residuals = dict(zip(names, (spread.residual for spread in spreads), strict=True))
    tolerances = {to_number(spread.tolerance) for spread in spreads}
    value = tolerances.pop() if len(tolerances) == 1 else math.nan
    rule = Rule(f"tolerance {format_number(value)}", value) if value >= MIN_VALUE else None
    yield Histogram("Residual of each sample", residuals, "relative residual", log=True, rule=rule)


def render_mistakes(survey: Survey | None) -> str:
    """Return samples whose class the model got wrong, the most confident mistakes first."""
    if survey is None or survey.wrong is None:
        return ""
    if not survey.wrong:
        return f"<p>None of {_count(survey)}.</p>"
    shown = survey.mistakes[:MAX_MISTAKES]
    fraction = format_percent(survey.wrong, survey.samples)
    words = f"{format_count(survey.wrong)} of {_count(survey)} ({fraction})"
    if len(shown) < survey.wrong:
        words += f"; these {format_count(len(shown))} are the most confident mistakes"
    words = f"<p>{words}. A percentage is the model's confidence in its prediction.</p>"
    if any(mistake.image is None for mistake in shown):
        rows = [
            [
                format_count(mistake.number),
                escape(mistake.truth),
                escape(mistake.prediction),
                _confidence(mistake),
            ]
            for mistake in shown
        ]
        header = ["sample", "truth", "prediction", "confidence"]
        table = render_table("Samples by their position in the data, from 0", rows, header)
        return words + make_scrollable("counts", "Misclassified samples", table)
    return f'{words}<div class="mistakes">{"".join(map(_render_mistake, shown))}</div>'


def _render_mistake(mistake: Mistake) -> str:
    source = encode(shrink(to_bytes(mistake.image), MAX_SIDE))
    name = f"sample {format_count(mistake.number)}"
    caption = (
        f"<span>truth {escape(mistake.truth)}</span>"
        f"<span>prediction {escape(mistake.prediction)}, {_confidence(mistake)}</span>"
        f"<span>{name}</span>"
    )
    image = f'<img class="pixels" src="{source}" alt="{name}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _confidence(mistake: Mistake) -> str:
    value = to_number(mistake.confidence)
    return format_percent(value, 1) if math.isfinite(value) else DASH


def _count(survey: Survey) -> str:
    """Which samples were looked at: 359 test samples, or 1 000 of 10 000 test samples."""
    of = format_plural(survey.total, f"{escape(survey.split)} sample")
    return of if survey.samples == survey.total else f"{format_count(survey.samples)} of {of}"
