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
    drawn = f"The path below is drawn by {solve.solver}." if solve.solver else ""
    if solve.own_solve:
        drawn += f" {solve.own_solve}"
    prose = "".join(
        f'<p class="prose">{escape(text)}</p>'
        for text in (solve.description, solve.certificate, drawn)
        if text
    )
    named = (("truth", solve.truth), ("prediction", solve.prediction))
    labels = [f"{name} {text}" for name, text in named if text]
    if solve.image is None:
        return prose + (f"<p>The sample: {escape(', '.join(labels))}.</p>" if labels else "")
    source = encode(shrink(to_bytes(solve.image)))
    image = f'<img class="pixels" src="{source}" alt="the sample">'
    caption = "".join(f"<span>{escape(label)}</span>" for label in labels)
    caption = f"<figcaption>{caption}</figcaption>" if labels else ""
    return f'<figure class="sample">{image}{caption}</figure>{prose}'


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
