"""One solve looked at closely: what it solves, what is proven, how it converged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from equipoise.report.chart import Chart, Line, Rule
from equipoise.report.content import SolvePath
from equipoise.report.curve import to_number
from equipoise.report.image import encode, shrink, to_bytes
from equipoise.report.markup import escape

__all__ = ["render_solve", "solve_charts", "solve_title"]


def solve_title(solve: SolvePath) -> str:
    """Return the heading of a solve, with its layer where a page shows several."""
    return f"The equilibrium of one sample{': ' if solve.name else ''}{solve.name}"


def render_solve(solve: SolvePath) -> str:
    """Return the sample, the problem that its equilibrium solves, and what is proven."""
    prose = "".join(
        f'<p class="prose">{escape(text)}</p>'
        for text in (solve.description, solve.certificate)
        if text
    )
    if solve.image is None:
        return prose
    source = encode(shrink(to_bytes(solve.image)))
    return f'<img class="sample pixels" src="{source}" alt="the sample">{prose}'


def solve_charts(solve: SolvePath, tolerance: Rule | None) -> Iterator[Chart]:
    """Residual and objective at each step of the solver."""
    residual = _line("residual", solve.residual, 0)
    objective = _line("objective", () if solve.objective is None else solve.objective, 2)
    x = "solver step"
    yield Chart("Residual", [residual], "relative residual", x=x, log=True, rule=tolerance)
    yield Chart("Objective", [objective], "value above the minimum", x=x, log=True)


def _line(name: str, values: Sequence[float], colour: int) -> Line:
    y = np.array([to_number(value) for value in values])
    return Line(name, np.arange(len(y), dtype=np.float64), y, colour, "points")
