"""Pictures of solves: the ways of iterates, and their residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.analysis import Trajectory, project_paths
from equipoise.analysis.trajectory import Components
from equipoise.plots.figure import COLOURS, DASHES, MARKERS, grid_of, make_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_residuals", "plot_trajectories"]


def plot_trajectories(
    paths: Mapping[str, Trajectory],
    labels: np.ndarray | None = None,
    classes: Sequence[str] = (),
    *,
    common: bool = True,
    components: Components = "iterates",
) -> Figure:
    """Draw the iterates of solves in the plane of two principal components.

    Each sample is a thin line from a grey ring to a marker of its class, which is hollow where the
    solve did not converge.

    Args:
        paths: By title, one for each panel.
        labels: The class of each sample; without them all look alike.
        classes: Names of the classes.
        common: Whether all panels have the same principal directions and the same scale.
        components: As of `project_paths`.
    """
    if common:
        flat, explained = project_paths([one.state for one in paths.values()], components)
        fractions = [explained] * len(flat)
    else:
        found = [project_paths([one.state], components) for one in paths.values()]
        flat, fractions = [one[0][0] for one in found], [one[1] for one in found]
    rows, columns = grid_of(len(paths))
    figure = make_figure(1.2 + 4.0 * columns, 0.6 + 3.7 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=common, sharey=common).ravel()
    kinds = np.zeros(flat[0].shape[1], int) if labels is None else labels
    for axes, points, fraction, (title, path) in zip(
        panels, flat, fractions, paths.items(), strict=False
    ):
        _draw_paths(axes, points, path, kinds)
        missed = f"; {path.missed} of {len(path.status)} unsolved" if path.missed else ""
        length = float(np.median(path.lengths))
        axes.set_title(f"{title}\nmedian length {length:.3g}{missed}", fontsize=10)
        axes.set_xlabel(f"first component ({fraction[0]:.0%})")
        axes.set_ylabel(f"second component ({fraction[1]:.0%})")
        if common:
            axes.label_outer()
        tidy(axes)
    for axes in panels[len(paths) :]:
        axes.set_axis_off()
    if labels is not None and len(classes):
        _add_classes(figure, np.unique(kinds), classes)
    return figure


def _draw_paths(axes: Any, points: np.ndarray, path: Trajectory, kinds: np.ndarray) -> None:
    solved = path.status == 0
    for sample, kind in enumerate(kinds):
        colour = COLOURS[kind % len(COLOURS)]
        way = points[: path.steps[sample] + 1, sample]
        axes.plot(*way.T, color=colour, linewidth=0.7, alpha=0.55, zorder=2)
        axes.plot(
            *way[-1],
            marker=MARKERS[kind % len(MARKERS)],
            color=colour if solved[sample] else "white",
            markeredgecolor=colour if not solved[sample] else "white",
            markeredgewidth=1.0 if not solved[sample] else 0.4,
            markersize=5.5,
            zorder=3,
        )
    starts = points[0]
    axes.scatter(*starts.T, s=26, facecolors="none", edgecolors="#777777", linewidths=0.8, zorder=4)


def _add_classes(figure: Figure, kinds: np.ndarray, classes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shown = kinds[:20]
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[kind % len(COLOURS)],
            marker=MARKERS[kind % len(MARKERS)],
            linewidth=0.8,
            label=classes[kind],
        )
        for kind in shown
    ]
    title = "class" if len(shown) == len(kinds) else f"first {len(shown)} classes"
    figure.legend(
        handles=handles, loc="outside right center", frameon=False, fontsize=8, title=title
    )


def plot_residuals(
    panels: Mapping[str, Mapping[str, Trajectory]], tolerance: float | None = None
) -> Figure:
    """Draw the relative residual at each step of some solvers, side by side.

    Thick lines are medians over the samples that are still solved or ended, with a band from the
    tenth to the ninetieth percentile.

    Args:
        panels: Trajectories by the name of the solver, by the title of their panel.
        tolerance: What the residuals were to reach.
    """
    rows, columns = grid_of(len(panels))
    figure = make_figure(0.6 + 4.4 * columns, 0.5 + 3.8 * rows)
    axes_of = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel()
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    for axes, (title, panel) in zip(axes_of, panels.items(), strict=False):
        for name, path in panel.items():
            place = names.index(name)
            _draw_residual(axes, path, name, place)
        if tolerance is not None:
            axes.axhline(tolerance, color="#777777", linewidth=0.9, linestyle=(0, (6, 3)))
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("relative residual |f(z) - z| / |f(z)|")
        axes.label_outer()
        axes.set_title(title, fontsize=10)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    for axes in axes_of[len(panels) :]:
        axes.set_axis_off()
    return figure


def _draw_residual(axes: Any, path: Trajectory, name: str, place: int) -> None:
    values = np.where(path.residual > 0, path.residual, np.nan)
    known = np.isfinite(values).any(axis=1)
    steps = np.arange(len(values))[known]
    low, middle, high = np.nanpercentile(values[known], (10, 50, 90), axis=1)
    colour = COLOURS[place % len(COLOURS)]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    missed = f", {path.missed} of {len(path.status)} unsolved" if path.missed else ""
    axes.plot(
        steps,
        middle,
        color=colour,
        linestyle=DASHES[place % len(DASHES)],
        linewidth=2,
        marker=MARKERS[place % len(MARKERS)],
        markersize=3.5,
        markevery=max(1, len(steps) // 12),
        label=f"{name}{missed}",
    )
