"""Charts of a training: loss and scores, rates and gradients, solves and norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from equipoise.engine import find_metric
from equipoise.engine.part_activity import IDLE
from equipoise.report.chart import Chart, Line, Rule
from equipoise.report.content import RunReport
from equipoise.report.curve import (
    MIN_VALUE,
    average,
    numeric_keys,
    read_column,
    submapping,
    to_number,
)
from equipoise.report.format import format_number
from equipoise.report.markup import escape
from equipoise.report.score import HELD_OUT, find_scores

__all__ = [
    "describe_idle_parts",
    "describe_one_step",
    "optimizer_charts",
    "part_charts",
    "score_charts",
    "solver_charts",
    "tolerance_rule",
]

MAX_SCORES = 6


def score_charts(report: RunReport) -> Iterator[Chart]:
    """Loss and scores: each logged step faintly, their means, and what each epoch ended with."""
    for key in ("loss", *find_scores(report)[:MAX_SCORES]):
        metric = find_metric(key)
        factor = 100.0 if metric.unit == "%" else 1.0
        x, y = read_column(report.steps, key)
        lines = _with_means("training", x, factor * y)
        if not lines:
            x, y = read_column(report.epochs, key, "train")
            lines = [Line("training", x, factor * y, 0, "points")]
        for colour, split in enumerate(HELD_OUT, 1):
            x, y = read_column(_scored(report, split), key, split)
            lines.append(Line(split, x, factor * y, colour, "points"))
        wide = metric.unit != "%" and _is_wide(np.concatenate([line.y for line in lines]))
        unit = metric.unit or (key if key.isidentifier() else "value")
        yield Chart(metric.title, lines, unit, log=wide, skipped=_count_skipped(report, key))


def _scored(report: RunReport, split: str) -> list[Mapping[str, Any]]:
    """The epoch lines, and the scores of the last weights where those were made after all epochs.

    They are left out where the summary is about other samples or other weights than a curve is.
    """
    summary, lines = report.summary or {}, list(report.epochs)
    curve = [submapping(line, split) for line in lines if submapping(line, split)]
    last = submapping(summary, split)
    is_last = "epochs" in summary and summary["epochs"] == summary.get("kept_epoch")
    if curve and is_last and last.get("samples") == curve[-1].get("samples"):
        lines.append({"step": summary.get("steps"), split: last})
    return lines


def optimizer_charts(report: RunReport) -> Iterator[Chart]:
    """Learning rate, the norm of the gradient, and samples in a second."""
    rate = Line("learning rate", *read_column(report.steps, "learning_rate"))
    yield Chart("Learning rate", [rate], "rate")
    x, y = read_column(report.steps, "gradient_norm")
    yield Chart("Gradient norm", _with_means("mean", x, y), "norm", log=_is_wide(y))
    speed = _with_means("mean", *read_column(report.steps, "samples_per_second"))
    yield Chart("Throughput", speed, "training samples in a second")


def describe_one_step(report: RunReport) -> str:
    """Return a sentence if no solve of the run took more than one step; else nothing."""
    means = [
        value
        for lines in (report.steps, report.epochs)
        for value in read_column(lines, "forward_steps")[1].tolist()
    ]
    means += (
        [] if report.survey is None else [max(s.steps) for s in report.survey.solves if s.steps]
    )
    known = [value for value in means if np.isfinite(value)]
    if not known or max(known) > 1:
        return ""
    return (
        "<p>The equilibrium is within the tolerance after one pass: a tighter tolerance or a "
        "larger contraction factor would make it matter.</p>"
    )


def solver_charts(report: RunReport) -> Iterator[Chart]:
    """Steps and residuals of solves, and norms of operators."""
    yield Chart("Solver steps", _both_ways(report, "steps"), "steps per solve")
    yield Chart(
        "Residuals",
        _both_ways(report, "residual"),
        "relative residual",
        log=True,
        rule=tolerance_rule(report),
    )
    yield Chart(
        "Operator norms",
        _by_epoch(report, "operator_norms"),
        "norm",
        x="epoch",
        rule=_norm_rule(report),
    )


def part_charts(report: RunReport) -> Iterator[Chart]:
    """What the parts of cells get and give, after each epoch."""
    for title, key, unit in (
        ("Gradient of each part", "part_gradients", "fraction of the largest"),
        ("Contribution of each part", "part_contributions", "fraction of the state"),
    ):
        rule = Rule("idle", IDLE)
        yield Chart(title, _by_epoch(report, key), unit, x="epoch", log=True, rule=rule)


def describe_idle_parts(report: RunReport) -> str:
    """Return a sentence on parts that are idle in the end; empty if all of them work."""
    last = report.epochs[-1] if report.epochs else None
    gradients, given = submapping(last, "part_gradients"), submapping(last, "part_contributions")
    idle = [
        name
        for name in gradients
        if to_number(gradients[name]) < IDLE and to_number(given.get(name)) < IDLE
    ]
    if not gradients:
        return ""
    if not idle:
        return "<p>All of them work: no part is below 1 % in both.</p>"
    verb = "is" if len(idle) == 1 else "are"
    return (
        f"<p>{escape(', '.join(idle))} {verb} idle: less than 1 % of the largest gradient, and "
        "less than 1 % of the state, so that the others do all the work.</p>"
    )


def _by_epoch(report: RunReport, key: str) -> list[Line]:
    """A curve for each name of a table that lines of epochs have."""
    tables = [
        {**submapping(line, key), "step": to_number(line.get("epoch")) + 1}
        for line in report.epochs
    ]
    names = [name for name in numeric_keys(tables) if name != "step"]
    return [
        Line(name, *read_column(tables, name), colour, "points")
        for colour, name in enumerate(names)
    ]


def tolerance_rule(report: RunReport) -> Rule | None:
    """Return the tolerance of the run's solves, to compare residuals with."""
    options = submapping(submapping(report.config, "model"), "options")
    value = to_number(options.get("tolerance"))
    return Rule(f"tolerance {format_number(value)}", value) if value >= MIN_VALUE else None


def _norm_rule(report: RunReport) -> Rule | None:
    """The norm that the cells' own theory allows, where it is one number."""
    last = report.epochs[-1] if report.epochs else {}
    value = to_number(last.get("norm_limit"))
    return Rule(f"norm {format_number(value)}", value) if np.isfinite(value) else None


def _both_ways(report: RunReport, key: str) -> list[Line]:
    lines: list[Line] = []
    for colour, way in enumerate(("forward", "backward")):
        lines += _with_means(way, *read_column(report.steps, f"{way}_{key}"), colour)
    return lines


def _count_skipped(report: RunReport, key: str) -> int:
    """How many logged steps lack a value because they were skipped; a resumed one counts once."""
    lines = (line for line in report.steps if line.get("skipped") is True)
    return int(np.isnan(read_column(lines, key)[1]).sum())


def _with_means(name: str, x: np.ndarray, y: np.ndarray, colour: int = 0) -> list[Line]:
    """A curve, or for a long one its means with the curve itself faintly behind them."""
    if not np.isfinite(y).any():
        return []
    mean_x, mean_y = average(x, y)
    if not len(mean_x):
        return [Line(name, x, y, colour)]
    return [Line(name, x, y, colour, "faint"), Line(name, mean_x, mean_y, colour)]


def _is_wide(y: np.ndarray) -> bool:
    """Whether positive values span a factor of over 100, most of which a linear axis would hide."""
    known = y[np.isfinite(y)]
    return bool(len(known) and known.min() > 0 and known.max() > 100 * known.min())
