"""Pictures of loss landscapes: lines, contours and surfaces."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from equipoise.analysis import Landscape
from equipoise.core import SettingError, choose
from equipoise.plots.figure import COLOURS, DASHES, grid_of, make_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["View", "plot_landscape"]

View = Literal["contour", "surface"]
MAX_RATIO = 1e5  # between the highest and the lowest level that is drawn
LEVELS = 14
UNSOLVED, UNDEFINED = "#d62728", "#000000"


def plot_landscape(
    landscapes: Mapping[str, Landscape],
    *,
    view: View = "contour",
    path: np.ndarray | None = None,
    axis_names: tuple[str, str] = ("first direction", "second direction"),
) -> Figure:
    """Draw loss landscapes beside each other, all with the same levels.

    Points with a sample whose equilibrium missed its tolerance have a dot, larger for more samples;
    those without a finite loss have a cross. Landscapes of one dimension become lines of one chart.

    Args:
        landscapes: By title.
        view: Of planes: `contour` or `surface`.
        path: Where a training path goes through the plane, shape (weights, 2).
        axis_names: What the directions are.
    """
    choose("plot_landscape.view", view, get_args(View))
    lines = {title: one for title, one in landscapes.items() if len(one.y) == 1}
    if not landscapes or (lines and len(lines) < len(landscapes)):
        raise SettingError(
            "plot_landscape.landscapes", "be all lines or all planes", None, got="none or both"
        )
    if lines:
        return _plot_lines(lines, axis_names[0])
    levels = _levels(landscapes)
    rows, columns = grid_of(len(landscapes))
    figure = make_figure(1.2 + 4.6 * columns, 0.6 + 4.1 * rows)
    for place, (title, one) in enumerate(landscapes.items()):
        projection = "3d" if view == "surface" else None
        axes = figure.add_subplot(rows, columns, place + 1, projection=projection)
        if view == "surface":
            shades = _draw_surface(axes, one, levels)
        else:
            shades = _draw_contours(axes, one, levels, path)
        # The layout does not know of the slanted names of a surface.
        size, letters = (9, 24) if view == "surface" else (10, 200)
        axes.set_xlabel(textwrap.fill(axis_names[0], letters), fontsize=size)
        axes.set_ylabel(textwrap.fill(axis_names[1], letters), fontsize=size)
        axes.set_title(title, fontsize=11)
    bar = figure.colorbar(shades, ax=figure.axes, shrink=0.8, label="loss")
    bar.set_ticks(levels[::2].tolist(), labels=label_levels(levels)[::2])
    bar.ax.minorticks_off()
    return figure


def _plot_lines(landscapes: Mapping[str, Landscape], name: str) -> Figure:
    figure = make_figure(6.4, 4.4)
    axes = figure.subplots()
    for place, (title, one) in enumerate(landscapes.items()):
        colour = COLOURS[place % len(COLOURS)]
        dashes = DASHES[place % len(DASHES)]
        axes.plot(one.x, one.loss[0], color=colour, linestyle=dashes, linewidth=2, label=title)
        _mark(axes, one, one.loss[0])
    low, high = _span(landscapes)
    if high > 30 * max(low, 1e-12):
        axes.set_yscale("log")
        axes.set_ylim(max(low, high / MAX_RATIO) / 1.3, high * 1.3)
    axes.axvline(0, color="#999999", linewidth=0.8)
    axes.set_xlabel(name)
    axes.set_ylabel("loss")
    if len(landscapes) > 1:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.set_title(next(iter(landscapes)), fontsize=11)
    tidy(axes)
    return figure


def _span(landscapes: Mapping[str, Landscape]) -> tuple[float, float]:
    values = np.concatenate([one.loss.reshape(-1) for one in landscapes.values()])
    values = values[np.isfinite(values)]
    if not len(values):
        raise SettingError(
            "plot_landscape.landscapes",
            "have a finite loss somewhere",
            None,
            "Take a smaller range.",
            got="none",
        )
    return float(values.min()), float(values.max())


def _levels(landscapes: Mapping[str, Landscape]) -> np.ndarray:
    """Levels that grow by one factor, so that a basin and what lies far above it are both seen."""
    low, high = _span(landscapes)
    if low <= 0 or high <= low:  # losses that may be negative, or a plane of one loss
        return np.linspace(low, high if high > low else low + 1.0, LEVELS + 1)
    high = min(high, MAX_RATIO * low)
    return np.geomspace(low, high, LEVELS + 1)


def label_levels(levels: np.ndarray) -> list[str]:
    """Return levels in as few digits, at least two, as tell them all apart."""
    for digits in range(2, 17):
        labels = [
            f"{level:.{digits}g}" if abs(level) < 1000 else f"{level:.0f}" for level in levels
        ]
        if len(set(labels)) == len(set(levels)):
            break
    return labels


def _norm(levels: np.ndarray) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    kind = LogNorm if levels[0] > 0 else Normalize
    return kind(float(levels[0]), float(levels[-1]))


def _draw_contours(axes: Any, one: Landscape, levels: np.ndarray, path: np.ndarray | None) -> Any:
    loss = np.ma.masked_invalid(np.clip(one.loss, levels[0], None))
    shades = axes.contourf(
        one.x, one.y, loss, levels, norm=_norm(levels), cmap="viridis", extend="max"
    )
    lines = axes.contour(one.x, one.y, loss, levels[1:], colors="black", linewidths=0.5)
    axes.clabel(
        lines,
        lines.levels[1::2],
        fontsize=7,
        fmt=dict(zip(levels, label_levels(levels), strict=True)),
    )
    _mark(axes, one, None)
    axes.plot(0, 0, marker="+", markersize=10, color="white", markeredgewidth=2.6, zorder=4)
    axes.plot(0, 0, marker="+", markersize=9, color="black", markeredgewidth=1.2, zorder=5)
    if path is not None:
        axes.plot(*path.T, color="white", linewidth=2.6, zorder=4)
        axes.plot(*path.T, color="black", linewidth=1, marker="o", markersize=3, zorder=5)
        axes.annotate(
            "start",
            path[0],
            textcoords="offset points",
            xytext=(5, 5),
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            zorder=6,
        )
    axes.set_xlim(one.x[0], one.x[-1])
    axes.set_ylim(one.y[0], one.y[-1])
    return shades


def _draw_surface(axes: Any, one: Landscape, levels: np.ndarray) -> Any:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable

    norm = _norm(levels)
    clipped = np.clip(one.loss, levels[0], levels[-1])
    logarithmic = levels[0] > 0
    height = np.log10(clipped) if logarithmic else clipped
    x, y = np.meshgrid(one.x, one.y)
    axes.plot_surface(
        x,
        y,
        height,
        facecolors=colormaps["viridis"](norm(clipped)),
        rstride=1,
        cstride=1,
        linewidth=0.15,
        edgecolor=(0, 0, 0, 0.35),
        shade=False,
    )
    if logarithmic:
        ticks = levels[::3]
        axes.set_zticks(np.log10(ticks), labels=label_levels(levels)[::3])
    for name in ("x", "y"):
        axes.locator_params(axis=name, nbins=5)
    axes.tick_params(labelsize=8, pad=1)
    axes.view_init(elev=32, azim=-58)
    axes.set_box_aspect(None, zoom=0.85)  # room for the names of the axes
    return ScalarMappable(norm, "viridis")


def _mark(axes: Any, one: Landscape, heights: np.ndarray | None) -> None:
    """Mark points with samples that were not solved, and points without a loss."""
    rows, columns = np.nonzero(one.missed > 0)
    if len(rows):
        fraction = one.missed[rows, columns] / max(one.samples, 1)
        across = one.y[rows] if heights is None else heights[columns]
        axes.scatter(
            one.x[columns],
            across,
            s=2 + 14 * np.clip(fraction, 0, 1),
            color=UNSOLVED,
            edgecolors="white",
            linewidths=0.3,
            zorder=3,
        )
    rows, columns = np.nonzero(one.nonfinite > 0)
    if len(rows):
        across = one.y[rows] if heights is None else np.zeros(len(rows))
        more = {} if heights is None else {"transform": axes.get_xaxis_transform()}
        axes.scatter(
            one.x[columns], across, s=12, marker="x", color=UNDEFINED, linewidths=0.8, **more
        )
