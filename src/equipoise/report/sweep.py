"""The page about a sweep: its runs compared, with mean and deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np

from equipoise.engine import Metric, find_metric
from equipoise.report.chart import Chart, Line
from equipoise.report.curve import read_column, to_number
from equipoise.report.document import ChartDrawer, render_document
from equipoise.report.format import (
    DASH,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_plural,
)
from equipoise.report.markup import escape, make_scrollable, render_table
from equipoise.report.tiles import Tile, render_tile

__all__ = ["SweepReport", "SweptRun", "render_sweep"]

SEED = "train.seed"
MAX_CURVES = 12  # groups of runs that are drawn, the best ones


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Args:
        name: The name of its folder.
        settings: Those that the sweep varies.
        status: `finished`, `early`, `diverged` or `failed`.
        split: What was scored.
        metric: The name of the score.
        score: The score; NaN if there is none.
        loss: The loss on the same samples.
        seconds: How long it took.
        reason: Why it failed.
        epochs: The epoch lines of its metrics.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    split: str = "test"
    metric: str = ""
    score: float = math.nan
    loss: float = math.nan
    seconds: float = math.nan
    reason: str = ""
    epochs: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class SweepReport:
    """Everything that a page says about a sweep.

    Args:
        title: What the sweep is called.
        subtitle: When it ran, and on what.
        runs: Its runs.
    """

    title: str
    subtitle: str = ""
    runs: Sequence[SweptRun] = ()


@dataclass(frozen=True)
class _Group:
    """Runs that differ in their seed alone."""

    settings: Mapping[str, str]
    runs: Sequence[SweptRun]

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all runs"

    @property
    def scores(self) -> list[float]:
        return [run.score for run in self.runs if math.isfinite(run.score)]

    @property
    def mean(self) -> float:
        return fmean(self.scores) if self.scores else math.nan

    @property
    def deviation(self) -> float:
        return stdev(self.scores) if len(self.scores) > 1 else math.nan


def render_sweep(report: SweepReport) -> str:
    """Return a sweep as one page of HTML, as of `render_document`.

    Args:
        report: The runs.
    """
    scored = next((run for run in report.runs if run.metric), SweptRun(""))
    metric, split = find_metric(scored.metric or "loss"), scored.split
    groups = _group(report.runs, metric)
    drawer = ChartDrawer()
    sections = [
        ("Mean and deviation over seeds", _render_groups(groups, metric, split)),
        ("Curves", drawer.draw(_charts(groups, metric, split)) + _note(groups)),
        ("Runs", _render_runs(report.runs, metric, split)),
    ]
    tiles = "".join(render_tile(tile) for tile in _tiles(report.runs, groups, metric, split))
    return render_document(report.title, report.subtitle, tiles, sections)


def _group(runs: Sequence[SweptRun], metric: Metric) -> list[_Group]:
    """Runs that differ in their seed alone, the group with the best mean first."""
    found: dict[tuple[tuple[str, str], ...], list[SweptRun]] = {}
    for run in runs:
        key = tuple((name, value) for name, value in run.settings.items() if name != SEED)
        found.setdefault(key, []).append(run)
    groups = [_Group(dict(key), members) for key, members in found.items()]

    def rank(group: _Group) -> tuple[bool, float]:
        known = math.isfinite(group.mean)
        return not known, (-group.mean if metric.higher_is_better else group.mean) if known else 0.0

    return sorted(groups, key=rank)


def _tiles(
    runs: Sequence[SweptRun], groups: Sequence[_Group], metric: Metric, split: str
) -> Iterator[Tile]:
    if groups:
        best = groups[0]
        many = len(best.scores) > 1
        name = f"best {split} {metric.title[:1].lower()}{metric.title[1:]}"
        value = _format_score(best.mean, metric)
        if many:
            name += f", mean of {len(best.scores)} seeds"
        yield Tile(name, value, best.name)
    failed = sum(run.status in ("diverged", "failed") for run in runs)
    yield Tile("runs", format_count(len(runs)), f"{format_count(failed)} failed" if failed else "")
    seconds = [run.seconds for run in runs if math.isfinite(run.seconds)]
    yield Tile("time of all runs", format_duration(math.fsum(seconds)) if seconds else DASH)


def _render_groups(groups: Sequence[_Group], metric: Metric, split: str) -> str:
    if all(len(group.runs) == 1 for group in groups):
        return ""  # the table of runs says it all
    keys = list(dict.fromkeys(key for group in groups for key in group.settings))
    rows = []
    for group in groups:
        ends = sorted(group.scores, reverse=metric.higher_is_better)
        named = [escape(group.settings.get(key, "")) for key in keys] or ["all"]
        rows.append(
            [
                *named,
                f"{len(group.scores)} of {len(group.runs)}",
                _format_score(group.mean, metric),
                _format_score(group.deviation, metric),
                *(_format_score(ends[k] if ends else math.nan, metric) for k in (0, -1)),
            ]
        )
    names = [escape(key) for key in keys] or ["runs"]
    title = f"{metric.title} on the {split} samples"
    header = [*names, "finished", "mean", "deviation", "best", "worst"]
    return make_scrollable("counts", escape(title), render_table(escape(title), rows, header))


def _render_runs(runs: Sequence[SweptRun], metric: Metric, split: str) -> str:
    if not runs:
        return ""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    failed = any(run.reason for run in runs)
    rows = [
        [
            escape(run.name[:3]),
            *(escape(run.settings.get(key, "")) for key in keys),
            _format_score(run.score, metric),
            format_number(run.loss),
            format_duration(run.seconds),
            escape(run.status),
            *([escape(run.reason)] if failed else []),
        ]
        for run in runs
    ]
    header = ["run", *map(escape, keys), escape(f"{split} {metric.name}"), "loss", "time", "status"]
    header += ["reason"] if failed else []
    title = "The best first; each is in a folder whose name begins with its number"
    return make_scrollable("counts", "Runs", render_table(title, rows, header))


def _charts(groups: Sequence[_Group], metric: Metric, split: str) -> Iterator[Chart]:
    wanted = [(metric.name, split, f"{metric.title}, {split}"), ("loss", split, f"Loss, {split}")]
    wanted.append(("loss", "train", "Loss, training"))
    for key, part, title in dict.fromkeys(wanted):
        unit = find_metric(key).unit
        factor = 100.0 if unit == "%" else 1.0
        lines: list[Line] = []
        for colour, group in enumerate(groups[:MAX_CURVES]):
            curves = [_curve(run, key, part) for run in group.runs]
            curves = [(x, factor * y) for x, y in curves if np.isfinite(y).any()]
            if len(curves) > 1:
                lines += [Line(group.name, x, y, colour, "faint") for x, y in curves]
                lines.append(Line(group.name, *_mean(curves), colour))
            else:
                lines += [Line(group.name, x, y, colour) for x, y in curves]
        known = np.concatenate([line.y[np.isfinite(line.y)] for line in lines]) if lines else ()
        wide = unit != "%" and len(known) and min(known) > 0 and max(known) > 100 * min(known)
        yield Chart(title, lines, unit or key, x="epoch", log=bool(wide), faint="each seed")


def _note(groups: Sequence[_Group]) -> str:
    hidden = len(groups) - MAX_CURVES
    if hidden <= 0:
        return ""
    best = format_plural(MAX_CURVES, "setting")
    return f'<p class="note">Only the best {best} are drawn, of {format_count(len(groups))}.</p>'


def _curve(run: SweptRun, key: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    lines = [{**line, "step": to_number(line.get("epoch")) + 1} for line in run.epochs]
    return read_column(lines, key, part)


def _mean(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean of curves at the epochs that all of them have."""
    common = curves[0][0]
    for x, _ in curves[1:]:
        common = np.intersect1d(common, x)
    return common, np.mean([y[np.isin(x, common)] for x, y in curves], axis=0)


def _format_score(value: float, metric: Metric) -> str:
    if not math.isfinite(value):
        return DASH
    if metric.unit == "%":
        return format_percent(value, 1, digits=2)
    return f"{format_number(value)} {metric.unit}".strip()
