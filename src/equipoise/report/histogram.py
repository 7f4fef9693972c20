"""Histograms of a page: how a number is spread over samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equipoise.report.chart import (
    PAINT,
    RULE,
    Line,
    Rule,
    figure_settings,
    finish_axes,
    new_figure,
    render_legend,
    to_svg,
)
from equipoise.report.curve import MIN_VALUE, to_number
from equipoise.report.format import format_number, format_plural, format_power
from equipoise.report.markup import escape
from equipoise.report.svg import embed_svg

__all__ = ["Histogram", "bin_edges", "draw_histogram"]

MAX_BINS = 30


@dataclass(frozen=True)
class Histogram:
    """How often which values occur.

    Args:
        title: What they are.
        values: A number for each sample, by the name of what they are of.
        x: What the numbers are called.
        log: Whether their axis is logarithmic; only positive ones are drawn then.
        rule: A value to compare with.
    """

    title: str
    values: Mapping[str, Sequence[float]]
    x: str
    log: bool = False
    rule: Rule | None = None


def draw_histogram(histogram: Histogram, number: int) -> str:
    """Return a histogram as HTML, with heading, legend and notes; empty if it has no values.

    Args:
        histogram: What to draw.
        number: Number of the chart on its page, which keeps its ids apart from those of others.
    """
    smallest = MIN_VALUE if histogram.log else -math.inf
    drawn: dict[str, np.ndarray] = {}
    missing = 0
    for name, values in histogram.values.items():
        y = np.array([to_number(value) for value in values])
        known = y[np.isfinite(y) & (y >= smallest)]
        missing += len(y) - len(known)
        if len(known):
            drawn[name] = known
    if not drawn:
        return ""
    edges = bin_edges(np.concatenate(list(drawn.values())), histogram)
    # the names are that of one line each, in its colour
    lines = [Line(name, edges, edges, colour) for colour, name in enumerate(drawn)]
    words = "; ".join(_describe(name, values) for name, values in drawn.items())
    rule = f"; {histogram.rule.name}" if histogram.rule else ""
    svg = embed_svg(
        _plot(histogram, drawn, edges, [line.paint for line in lines]),
        f"c{number}",
        f"{histogram.title}, samples by {histogram.x}: {words}{rule}.",
        PAINT,
    )
    legend = render_legend(lines, histogram.rule)
    note = ""
    if missing:
        count, verb = format_plural(missing, "value"), "is" if missing == 1 else "are"
        sort = "finite and positive" if histogram.log else "finite"
        note = f"<figcaption>Not drawn: {count} that {verb} not {sort}.</figcaption>"
    return f"<figure><h3>{escape(histogram.title)}</h3>{legend}{svg}{note}</figure>\n"


def bin_edges(values: np.ndarray, histogram: Histogram) -> np.ndarray:
    """Return the edges of the bins: whole numbers of equal width, or equal ones of logarithms.

    Args:
        values: All numbers, finite, and positive if their axis is logarithmic.
        histogram: What is drawn.
    """
    low, high = float(values.min()), float(values.max())
    if histogram.log:
        if histogram.rule and histogram.rule.value >= MIN_VALUE:
            low, high = min(low, histogram.rule.value), max(high, histogram.rule.value)
        bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
        top = max(top, bottom + 1)
        # whole parts of a decade, so that a power of ten, as most tolerances are, is an edge
        parts = max(1, MAX_BINS // (top - bottom))
        decades = np.linspace(bottom, top, min((top - bottom) * parts, 4 * MAX_BINS) + 1)
        edges: np.ndarray = 10.0**decades
        # rounding must not leave the extremes outside
        edges[0], edges[-1] = min(edges[0], low), max(edges[-1], high)
        return edges[max(0, int(np.searchsorted(edges, low, "right")) - 1) :]
    width = max(1, math.ceil((high - low + 1) / MAX_BINS))
    # bars are nine tenths as wide as their bins, so those of one number stand in its middle
    count = math.floor((high - low + 0.45) / width) + 1
    return low - 0.45 + width * np.arange(count + 1)


def _plot(
    histogram: Histogram,
    drawn: Mapping[str, np.ndarray],
    edges: np.ndarray,
    paints: Sequence[str],
) -> str:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    with figure_settings():
        figure, axes = new_figure()
        for paint, values in zip(paints, drawn.values(), strict=True):
            counts, _ = np.histogram(values, edges)
            axes.bar(
                edges[:-1],
                counts,
                np.diff(edges) * (1 if histogram.log else 0.9),
                align="edge",
                color=paint,
                alpha=0.9 / len(drawn) ** 0.5,
                zorder=3,
            )
        if histogram.rule:
            axes.axvline(histogram.rule.value, **{**RULE, "zorder": 4})
        if histogram.log:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_power(value)))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True, min_n_ticks=2))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
        finish_axes(axes, "samples", histogram.x)
        return to_svg(figure)


def _describe(name: str, values: np.ndarray) -> str:
    low, middle, high = (
        format_number(float(value)) for value in np.percentile(values, [0, 50, 100])
    )
    return f"{name} from {low} to {high}, half of them up to {middle}"
