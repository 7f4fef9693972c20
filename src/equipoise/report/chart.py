"""Charts as SVG for a page: drawn by matplotlib, then freed of all that a strict content policy refuses."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

import numpy as np

from equipoise.core import to_percent
from equipoise.report.curve import MIN_VALUE, thin
from equipoise.report.markup import clean, escape, figure, plural, power

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Chart", "Line", "Rule", "draw"]

WIDTH, HEIGHT, FONT = 420, 220, 13
COLOURS = 6
DASHES = ("", "6 3", "2 2.5")
GRID, TEXT = "#0000f0", "#0000f1"
PAINT = {
    GRID: "var(--grid)",
    TEXT: "var(--muted)",
    **{f"#0000{k:02x}": f"var(--line-{k})" for k in range(1, COLOURS + 1)},
}
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "equipoise",
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": "DejaVu Sans",
}
LONG = re.compile(r"-?\d+\.\d{3,}")


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        name: What it shows.
        x: Where.
        y: Values; NaN leaves a gap.
        colour: Number of its colour, from 0; after the sixth they come again with dashes.
        kind: A curve, a faint one behind others, or points that are joined.
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
    def dash(self) -> str:
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
        unit: What is counted upwards.
        x: What is counted to the right.
        log: Whether each tenfold is as high as the next; values that are not positive are left out
            then.
        rule: A value to compare with.
    """

    title: str
    lines: Sequence[Line]
    unit: str
    x: str = "step"
    log: bool = False
    rule: Rule | None = None


def draw(chart: Chart, number: int) -> str:
    """Return a chart as HTML: heading, legend, picture and a note of what could not be drawn. Empty if nothing could.

    Args:
        chart: What to draw.
        number: Number of the chart on its page, which keeps its names apart from those of others.
    """
    shown = [
        (line, np.where(line.y >= MIN_VALUE, line.y, np.nan) if chart.log else line.y)
        for line in chart.lines
    ]
    shown = [(line, y) for line, y in shown if np.isfinite(y).any()]
    if not shown:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        drawing = Figure(
            figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained"
        )  # without pyplot: no global state
        axes = drawing.subplots()
        for line, y in shown:
            _plot(axes, line, y)
        if chart.rule:
            axes.axhline(
                chart.rule.value, color=TEXT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5
            )
        _scales(axes, chart, [y for _, y in shown])
        content = io.StringIO()
        drawing.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    lost = max(int((~np.isfinite(y)).sum()) for _, y in shown)
    fit = "finite and positive" if chart.log else "finite"
    note = (
        f"<figcaption>Left out where not {fit}: {plural(lost, 'value')}.</figcaption>"
        if lost
        else ""
    )
    picture = _adapt(
        content.getvalue(),
        f"c{number}",
        _summary(chart, [(line.name, y) for line, y in shown if line.kind != "faint"]),
    )
    return f"<figure><h3>{escape(chart.title)}</h3>{_legend([line for line, _ in shown], chart.rule)}{picture}{note}</figure>\n"


def _plot(axes: Axes, line: Line, y: np.ndarray) -> None:
    x, y = thin(line.x, y)
    known = np.isfinite(y)
    alone = (
        known & ~np.append(False, known[:-1]) & ~np.append(known[1:], False)
    )  # a curve has no length there
    dots = known if line.kind == "points" and len(y) <= 60 else alone
    look: dict[str, Any] = {
        "color": line.paint,
        "zorder": {"faint": 2, "curve": 3, "points": 4}[line.kind],
    }
    dash = (0, [float(part) for part in line.dash.split()]) if line.dash else "-"
    axes.plot(
        x,
        y,
        linewidth=0.9 if line.kind == "faint" else 1.9,
        alpha=0.4 if line.kind == "faint" else 1,
        linestyle=dash,
        **look,
    )
    if dots.any():
        axes.plot(
            x[dots], y[dots], linestyle="", marker="o", markersize=4.5, markeredgewidth=0, **look
        )


def _scales(axes: Axes, chart: Chart, values: Sequence[np.ndarray]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if chart.log:
        seen = [float(pick(y)) for y in values for pick in (np.nanmin, np.nanmax)] + (
            [chart.rule.value] if chart.rule else []
        )
        low, high = math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))
        axes.set_yscale("log")
        axes.set_ylim(
            10.0**low, 10.0 ** max(high, low + 1)
        )  # whole tenfolds, so that there are labels
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        plain, digits = low >= -2 and high <= 3, 4
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
        largest = max(map(abs, axes.get_ylim()))
        plain, digits = 0.01 <= largest < 1e6, _digits(axes.get_yticks(), largest)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: figure(value, digits) if plain else power(value))
    )
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: figure(value)))
    axes.set_title(chart.unit, loc="left", fontsize=FONT, color=TEXT, pad=7)
    axes.set_xlabel(chart.x, loc="right", fontsize=FONT, color=TEXT)
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
            to_percent(value / 100, 2) if chart.unit == "%" else figure(value)
            for value in known[[0, -1]]
        )
        parts.append(f"{name} {last}" if len(known) == 1 else f"{name} from {first} to {last}")
    rule = f"; {chart.rule.name}" if chart.rule else ""
    return f"{chart.title} ({chart.unit}) by {chart.x}: {'; '.join(parts)}{rule}."


def _legend(lines: Sequence[Line], rule: Rule | None) -> str:
    entries = []
    for line in lines:
        if line.kind != "faint":
            look = f'stroke="{PAINT[line.paint]}" stroke-width="2"' + (
                f' stroke-dasharray="{line.dash}"' if line.dash else ""
            )
            dot = (
                f'<circle cx="11" cy="5" r="3.2" fill="{PAINT[line.paint]}"/>'
                if line.kind == "points"
                else ""
            )
            entries.append((f'<path d="M0 5H22" {look}/>{dot}', line.name))
    if any(line.kind == "faint" for line in lines):
        entries.append(
            (
                f'<path d="M0 6L4 3L9 8L13 2L17 7L22 4" stroke="{PAINT[TEXT]}" opacity="0.6"/>',
                "each logged step",
            )
        )
    if rule:
        entries.append(
            (
                f'<path d="M0 5H22" stroke="{PAINT[TEXT]}" stroke-width="1.4" '
                'stroke-dasharray="4 3"/>',
                rule.name,
            )
        )
    if len(entries) == 1:
        return ""
    listed = "".join(
        '<li><svg class="key" viewBox="0 0 22 10" '
        f'aria-hidden="true">{key}</svg>{escape(name)}</li>'
        for key, name in entries
    )
    return f'<ul class="legend">{listed}</ul>'


def _adapt(source: str, prefix: str, words: str) -> str:
    """Make the SVG part of a page: attributes in place of styles, colours of the page, names of its own, no metadata."""
    root = ElementTree.fromstring(source)
    names: dict[str, str] = {}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}metadata") or child.tag.endswith("}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        given = dict(element.attrib)
        element.attrib.clear()
        style = dict(part.split(": ", 1) for part in given.pop("style", "").split("; ") if part)
        if element.tag == "text":  # its font is the page's
            style = {key: value for key, value in style.items() if not key.startswith("font")}
            given.pop("transform", None)
        for key, value in [*given.items(), *style.items()]:
            if key == "id" and element.tag == "g":
                continue
            key = "href" if key.endswith("}href") else key
            value = PAINT.get(value, "currentColor" if value == "#000000" else value)
            value = re.sub(
                r"#([mp][0-9a-f]{10})\b",
                lambda name: "#" + names.setdefault(name[1], f"{prefix}-{len(names)}"),
                value,
            )
            element.set(
                key,
                names.setdefault(value, f"{prefix}-{len(names)}") if key == "id" else _short(value),
            )
        if element.text and not element.text.strip():
            element.text = None
        element.tail = None
    root.attrib = {
        "class": "chart",
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "aria-label": clean(words),
    }
    return ElementTree.tostring(root, encoding="unicode")


def _short(value: str) -> str:
    return LONG.sub(
        lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), " ".join(value.split())
    )
