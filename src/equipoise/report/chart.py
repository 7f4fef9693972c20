"""Charts of a page, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from equipoise.core import to_percent
from equipoise.report.curve import MIN_VALUE, thin
from equipoise.report.format import format_number, format_plural, format_power
from equipoise.report.markup import escape
from equipoise.report.svg import embed_svg

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Chart",
    "Line",
    "Rule",
    "draw",
    "figure_settings",
    "finish_axes",
    "new_figure",
    "render_legend",
    "to_svg",
]

WIDTH, HEIGHT, FONT = 420, 220, 13
COLOURS = 6
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2.5))
GRID, TEXT = "#0000f0", "#0000f1"
PAINT = {
    GRID: "var(--grid)",
    TEXT: "var(--muted)",
    **{f"#0000{k:02x}": f"var(--line-{k})" for k in range(1, COLOURS + 1)},
}
RULE: dict[str, Any] = {
    "color": TEXT,
    "linewidth": 1.2,
    "linestyle": (0, (4, 3)),
    "zorder": 1.5,
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "equipoise",
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "DejaVu Sans",
}


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        name: What it shows.
        x: The steps.
        y: The values there; NaN leaves a gap.
        colour: Number of its colour, from 0; after the sixth they come again, dashed.
        kind: A curve, a faint one behind others, or joined points.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    kind: Literal["curve", "faint", "points"] = "curve"

    @property
    def paint(self) -> str:
        return f"#0000{self.colour % COLOURS + 1:02x}"

    @property
    def dashes(self) -> tuple[float, ...]:
        return DASHES[self.colour // COLOURS % len(DASHES)]


@dataclass(frozen=True)
class Rule:
    """A value to compare with, drawn across."""

    name: str
    value: float


@dataclass(frozen=True)
class Chart:
    """Curves over the same steps.

    Args:
        title: What they show.
        lines: The curves.
        unit: The unit of the values.
        x: What the steps are called.
        log: Whether the axis of the values is logarithmic; only positive ones are drawn then.
        rule: A value to compare with.
        faint: What its faint curves are.
        skipped: How many steps have no value because training skipped them.
    """

    title: str
    lines: Sequence[Line]
    unit: str
    x: str = "step"
    log: bool = False
    rule: Rule | None = None
    faint: str = "each logged step"
    skipped: int = 0


def draw(chart: Chart, number: int) -> str:
    """Return a chart as HTML, with heading, legend and notes; empty if there is nothing to draw.

    Args:
        chart: What to draw.
        number: Number of the chart on its page, which keeps its ids apart from those of others.
    """
    drawn = [(line, _drawable(line.y, chart.log)) for line in chart.lines]
    drawn = [(line, y) for line, y in drawn if np.isfinite(y).any()]
    if not drawn:
        return ""
    words = _summary(chart, [(line.name, y) for line, y in drawn if line.kind != "faint"])
    svg = embed_svg(_plot_chart(chart, drawn), f"c{number}", words, PAINT)
    legend = render_legend([line for line, _ in drawn], chart.rule, chart.faint)
    missing = max(int((~np.isfinite(y)).sum()) for _, y in drawn)
    skipped = min(chart.skipped, missing)
    reasons = [f"{format_plural(skipped, 'step')} that training skipped"] if skipped else []
    if missing > skipped:
        count = missing - skipped
        values, verb = format_plural(count, "value"), "is" if count == 1 else "are"
        rule = "finite and positive" if chart.log else "finite"
        reasons.append(f"{values} that {verb} not {rule}")
    note = f"<figcaption>Not drawn: {' and '.join(reasons)}.</figcaption>" if reasons else ""
    return f"<figure><h3>{escape(chart.title)}</h3>{legend}{svg}{note}</figure>\n"


def _drawable(y: np.ndarray, log: bool) -> np.ndarray:
    """Values with NaN in place of those that a logarithmic axis does not have."""
    return np.where(y >= MIN_VALUE, y, np.nan) if log else y


def _plot_chart(chart: Chart, drawn: Sequence[tuple[Line, np.ndarray]]) -> str:
    """A chart as matplotlib writes it."""
    with figure_settings():
        figure, axes = new_figure()
        for line, y in drawn:
            _plot_line(axes, line, y)
        if chart.rule:
            axes.axhline(chart.rule.value, **RULE)
        _scales(axes, chart, [y for _, y in drawn])
        return to_svg(figure)


def figure_settings() -> AbstractContextManager[None]:
    """Return the context in which charts are drawn."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def new_figure() -> tuple[Figure, Axes]:
    """Return an empty chart, made without pyplot: no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
    return figure, figure.subplots()


def to_svg(figure: Figure) -> str:
    """Return a chart as matplotlib writes it."""
    content = io.StringIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def _plot_line(axes: Axes, line: Line, y: np.ndarray) -> None:
    x, y = thin(line.x, y)
    known = np.isfinite(y)
    # a point without neighbours is invisible as a curve
    alone = known & ~np.append(False, known[:-1]) & ~np.append(known[1:], False)
    dots = known if line.kind == "points" and len(y) <= 60 else alone
    zorder = {"faint": 2, "curve": 3, "points": 4}[line.kind]
    axes.plot(
        x,
        y,
        color=line.paint,
        linewidth=0.9 if line.kind == "faint" else 1.9,
        alpha=0.4 if line.kind == "faint" else 1,
        linestyle=(0, line.dashes) if line.dashes else "-",
        zorder=zorder,
    )
    if dots.any():
        axes.plot(
            x[dots],
            y[dots],
            color=line.paint,
            linestyle="",
            marker="o",
            markersize=4.5,
            markeredgewidth=0,
            zorder=zorder,
        )


def _scales(axes: Axes, chart: Chart, values: Sequence[np.ndarray]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if chart.log:
        seen = [float(end(y)) for y in values for end in (np.nanmin, np.nanmax)]
        seen += [chart.rule.value] if chart.rule else []
        low, high = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
        axes.set_yscale("log")
        # whole decades, so that there are labels
        axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        plain, digits = low >= -2 and high <= 3, 4
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
        largest = max(map(abs, axes.get_ylim()))
        plain, digits = 1e-3 <= largest < 1e6, _digits(axes.get_yticks(), largest)
    axes.yaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: format_number(value, digits) if plain else format_power(value)
        )
    )
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    finish_axes(axes, chart.unit, chart.x)


def finish_axes(axes: Axes, unit: str, x: str) -> None:
    """Name the axes and make them look like those of all charts.

    Args:
        axes: The axes.
        unit: The unit of the values.
        x: What they are over.
    """
    axes.set_title(unit, loc="left", fontsize=FONT, color=TEXT, pad=9)
    axes.set_xlabel(x, loc="right", fontsize=FONT, color=TEXT)
    axes.tick_params(length=0, pad=5, labelsize=FONT, labelcolor=TEXT)
    axes.grid(True, axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set(color=GRID, linewidth=0.9)
    axes.margins(x=0.02)


def _digits(ticks: np.ndarray, largest: float) -> int:
    """Return how many significant digits tell each tick from the next: 99.996 % is not 100 %."""
    spacing = float(np.diff(ticks).min()) if len(ticks) > 1 else 0.0
    if not 0 < spacing < largest:
        return 4
    return min(max(4, math.ceil(math.log10(largest / spacing)) + 1), 12)


def _summary(chart: Chart, ends: Sequence[tuple[str, np.ndarray]]) -> str:
    """The chart in words, for those who do not see it."""
    parts = []
    for name, y in ends:
        known = y[np.isfinite(y)]
        first, last = (
            to_percent(value / 100, 2) if chart.unit == "%" else format_number(value)
            for value in known[[0, -1]]
        )
        parts.append(f"{name} {last}" if len(known) == 1 else f"{name} from {first} to {last}")
    rule = f"; {chart.rule.name}" if chart.rule else ""
    return f"{chart.title} ({chart.unit}) by {chart.x}: {'; '.join(parts)}{rule}."


def render_legend(lines: Sequence[Line], rule: Rule | None, faint: str = "") -> str:
    """Return the names of lines beside what they look like; empty for a single one."""
    entries = [(_legend_key(line), line.name) for line in lines if line.kind != "faint"]
    if any(line.kind == "faint" for line in lines):
        zigzag = "M0 6L4 3L9 8L13 2L17 7L22 4"
        key = f'<path d="{zigzag}" stroke="{PAINT[TEXT]}" opacity="0.6"/>'
        entries.append((key, faint))
    if rule:
        look = f'stroke="{PAINT[TEXT]}" stroke-width="1.4" stroke-dasharray="4 3"'
        entries.append((f'<path d="M0 5H22" {look}/>', rule.name))
    if len(entries) == 1:
        return ""
    items = "".join(
        '<li><svg class="key" viewBox="0 0 22 10" aria-hidden="true">'
        f"{key}</svg>{escape(name)}</li>"
        for key, name in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _legend_key(line: Line) -> str:
    colour = PAINT[line.paint]
    look = f'stroke="{colour}" stroke-width="2"'
    if line.dashes:
        look += f' stroke-dasharray="{" ".join(map(str, line.dashes))}"'
    dot = f'<circle cx="11" cy="5" r="3.2" fill="{colour}"/>' if line.kind == "points" else ""
    return f'<path d="M0 5H22" {look}/>{dot}'
