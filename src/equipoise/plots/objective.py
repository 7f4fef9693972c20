"""The plot of a solve; matplotlib is imported when one is drawn."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from equipoise.core import SettingError
from equipoise.layers import Minimization
from equipoise.solvers import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_objective"]

BLUE, ORANGE, GREEN = "#1f5fa8", "#d9730d", "#2f7d4f"


def plot_objective(
    objective: Minimization, trace: Trace | None, path: str | Path | None = None
) -> Figure:
    """Draw how objective, merit function and residual fall along a solve.

    Each sample has a thin line, the median a thick one.

    The objective is that of the step from each iterate, `phi(f(z_k)) - phi*`, the merit function
    `h(z_k) - h*`, with the minima computed to the accuracy of float64 from where the solve ended.
    Differences below the accuracy of float64 are left out.

    Args:
        objective: The problem of the layer, `objective(layer, x)`.
        trace: The path of the solve at the same `x`: `layer.last.trace` after
            `layer(x, trace=True)`.
        path: Where to save the image, if anywhere; the suffix says in which format.
    """
    given: object = objective
    if not isinstance(given, Minimization):
        rule = "be a problem with a function that the equilibrium minimises"
        got = type(given).__name__
        raise SettingError("plot_objective.objective", rule, given, got=got)
    figure = _figure()
    found = objective.descent(trace)
    assert found is not None  # as the function that is minimised falls
    assert trace is not None  # which descent has refused
    lowest = objective.along([objective.minimizer(trace.state[-1])])
    left, right = figure.subplots(1, 2)
    for values, least, colour, label in (
        (found.value, lowest.value, BLUE, "objective at f(z), above its minimum"),
        (found.merit, lowest.merit, ORANGE, "merit function at z, above its minimum"),
    ):
        if values is None or least is None:
            continue
        excess = values - least
        smallest = 1e-15 * np.maximum(np.abs(least), np.abs(values[0]))
        _lines(left, np.where(excess > smallest, excess, np.nan), colour, label)
    _lines(
        right, np.where(found.residual > 0, found.residual, np.nan), GREEN, "|f(z) - z| / |f(z)|"
    )
    for axes, title in ((left, "Distance from the minimum"), (right, "Relative residual")):
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=11)
        axes.grid(True, which="major", alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.suptitle("\n".join(textwrap.wrap(objective.title.replace("phi", "φ"), 110)), fontsize=12)
    if path is not None:
        figure.savefig(path)
    return figure


def _figure() -> Figure:
    from matplotlib.figure import Figure  # slow to import, so only when a plot is drawn

    # without pyplot: no global state, no window
    return Figure(figsize=(10, 4.2), dpi=150, layout="constrained")


def _lines(axes: Any, values: np.ndarray, colour: str, label: str) -> None:
    """One thin line for each sample, and the median of those that still have a value."""
    steps = np.arange(len(values))
    several = values.shape[1] > 1
    if several:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.7)
    known = np.isfinite(values).any(axis=1)
    middle = np.full(len(values), np.nan)
    middle[known] = np.nanmedian(values[known], axis=1)
    axes.plot(
        steps,
        middle,
        color=colour,
        linewidth=2.2,
        zorder=3,
        label=f"{label}{', median' if several else ''}",
    )
