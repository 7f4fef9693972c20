"""The head of a run's page: its results in a few large numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from equipoise.engine import find_metric
from equipoise.report.content import RunReport
from equipoise.report.curve import submapping, to_number
from equipoise.report.format import (
    DASH,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_plural,
)
from equipoise.report.markup import escape
from equipoise.report.score import HELD_OUT, find_scores

__all__ = ["Tile", "render_tile", "render_tiles"]

MANY_SAMPLES = 5000  # from which on a second decimal of a percentage means something


@dataclass(frozen=True)
class Tile:
    """One large number, what it counts, and a line of detail."""

    name: str
    value: str
    detail: str = ""


def render_tiles(report: RunReport) -> str:
    """Return the results of a run as tiles; those without a number are left out."""
    tiles = [*_score_tiles(report), *_missed_tiles(report)]
    tiles += _unfinished_tiles(report) if report.summary is None else _summary_tiles(report.summary)
    tiles += _speed_tiles(report)
    return "".join(render_tile(tile) for tile in tiles)


def render_tile(tile: Tile) -> str:
    """Return a tile as HTML; empty if it has no number."""
    if tile.value == DASH:
        return ""
    return (
        f'<div><dt>{escape(tile.name)}</dt><dd class="value">{escape(tile.value)}</dd>'
        f'<dd class="more">{escape(tile.detail)}</dd></div>\n'
    )


def _score_tiles(report: RunReport) -> Iterator[Tile]:
    """The score on the test data, else on the validation data, else in training."""
    key = next(iter(find_scores(report)), "loss")
    if report.summary and "metric" in report.summary:
        key = str(report.summary["metric"])
    metric = find_metric(key)
    for split in (*HELD_OUT, "train"):
        values = _final_values(report, split)
        value = to_number(values.get(key))
        if math.isfinite(value):
            name = metric.title[:1].lower() + metric.title[1:]
            samples = to_number(values.get("samples"))
            if metric.unit == "%":
                text = format_percent(value, 1, digits=2 if samples >= MANY_SAMPLES else 1)
            else:
                text = f"{format_number(value)} {metric.unit}".strip()
            detail = format_plural(samples, "sample") if math.isfinite(samples) else ""
            yield Tile(f"{split} {name}", text, detail)
            return


def _missed_tiles(report: RunReport) -> Iterator[Tile]:
    for split in HELD_OUT:
        values = _final_values(report, split)
        missed, samples = to_number(values.get("missed")), to_number(values.get("samples"))
        if values.get("status") == {}:  # nothing was solved for: there is no tolerance to miss
            return
        if math.isfinite(missed):
            detail = f"in the {split} set"
            if math.isfinite(samples):
                detail = f"of {format_count(samples)} {detail}"
            yield Tile("samples that missed the tolerance", format_count(missed), detail)
            return


def _summary_tiles(summary: Mapping[str, Any]) -> Iterator[Tile]:
    lengths = [(noun, to_number(summary.get(f"{noun}s"))) for noun in ("epoch", "step")]
    length = [format_plural(value, noun) for noun, value in lengths if math.isfinite(value)]
    length += ["stopped early"] if summary.get("stopped") == "early" else []
    yield Tile("time", format_duration(to_number(summary.get("seconds"))), ", ".join(length))
    parameters = dict(submapping(summary, "parameters"))
    total = format_count(to_number(parameters.pop("total", None)))
    detail = ", ".join(
        f"{format_count(to_number(count))}\u00a0{module}"
        for module, count in parameters.items()
        if count != 0  # a part that this model does not have
    )
    yield Tile("parameters", total, detail)
    yield Tile("skipped steps", format_count(to_number(summary.get("skipped"))))
    bad = to_number(summary.get("bad_samples"))
    if bad > 0:
        yield Tile("skipped samples", format_count(bad), "could not be read")


def _unfinished_tiles(report: RunReport) -> Iterator[Tile]:
    last = (report.steps or report.epochs or [{}])[-1]
    step = to_number(last.get("step"))
    done = f"{format_plural(len(report.epochs), 'epoch')} done"
    yield Tile("not finished", f"step {format_count(step)}" if math.isfinite(step) else DASH, done)
    seconds = _sum_finite(to_number(line.get("seconds")) for line in report.epochs)
    yield Tile("time of these epochs", format_duration(seconds))
    skipped = _sum_finite(to_number(line.get("skipped")) for line in report.epochs)
    yield Tile("skipped steps", format_count(skipped))


def _speed_tiles(report: RunReport) -> Iterator[Tile]:
    """Training samples in a second: the median of epochs, or of logged steps before the first."""
    for lines in (report.epochs, report.steps):
        speeds = [to_number(line.get("samples_per_second")) for line in lines]
        known = [speed for speed in speeds if math.isfinite(speed)]
        if known:
            waits = [to_number(line.get("loading_fraction")) for line in lines]
            waits = [wait for wait in waits if math.isfinite(wait)]
            detail = f"{median(waits):.0%} of the time waiting for them" if waits else ""
            yield Tile("training samples in a second", _format_speed(median(known)), detail)
            return


def _format_speed(speed: float) -> str:
    return format_count(speed) if speed >= 100 else format_number(speed, 3)


def _final_values(report: RunReport, split: str) -> Mapping[str, Any]:
    """The metrics of a split at the end, or when they were last known while the run is going on."""
    known = (submapping(line, split) for line in reversed(report.epochs))
    return submapping(report.summary, split) or next((each for each in known if each), {})


def _sum_finite(values: Iterable[float]) -> float:
    """The sum of the finite ones; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) if finite else math.nan
