"""The page about a sweep, made of the files in its folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.core import SourceError, stop_if_requested, write_atomically
from equipoise.core.named_code import to_short_name
from equipoise.engine import read_metrics
from equipoise.report import SweepReport, SweptRun, render_sweep
from equipoise.runs.config import load_config
from equipoise.runs.run_report import describe_run, read_json

__all__ = ["is_sweep", "report_sweep"]

TABLE = "sweep.csv"


def is_sweep(folder: Path) -> bool:
    """Return whether a folder holds a sweep.

    Args:
        folder: The folder.
    """
    return (folder / TABLE).is_file()


def report_sweep(folder: Path, *, trust: bool = False) -> Path:
    """Write a page about a sweep, complete or not, into its folder, and return where it is.

    Args:
        folder: Where the sweep is kept.
        trust: Whether to run the code that its runs name, whoever made them; see `load_config`.
    """
    rows = _read_table(folder / TABLE)
    runs = [_read_run(folder, row) for row in rows]
    report = SweepReport(
        f"Sweep {folder.absolute().name}", _subtitle(folder, runs, trust=trust), runs
    )
    path = folder / "report.html"
    write_atomically(path, render_sweep(report))
    return path


def _read_table(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval=""))
    except (ValueError, csv.Error) as error:
        raise SourceError(path, f"must be a table: {error}.") from error
    # A name with folders in it would lead out of the sweep.
    if any(None in row or Path(row.get("run", "")).name != row.get("run") for row in rows):
        raise SourceError(path, "must name a folder of the sweep in the column 'run' of each row.")
    return rows


def _read_run(folder: Path, row: Mapping[str, str]) -> SweptRun:
    stop_if_requested()
    try:
        lines: list[dict[str, Any]] = read_metrics(folder / row["run"] / "metrics.jsonl")
    except (OSError, SourceError):  # it failed before its first step, or its log is damaged
        lines = []
    return SweptRun(
        row["run"],
        # the keys of settings are those with a section
        {key: value for key, value in row.items() if "." in key and value},
        status=row.get("status", ""),
        split=row.get("split") or "test",
        metric=row.get("metric", ""),
        score=_number(row.get("score")),
        loss=_number(row.get("loss")),
        seconds=_number(row.get("seconds")),
        reason=row.get("reason", ""),
        epochs=[line for line in lines if line.get("kind") == "epoch"],
    )


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _subtitle(folder: Path, runs: list[SweptRun], *, trust: bool) -> str:
    """What was trained on what, and when the first of the runs began."""
    for name in sorted(run.name for run in runs):
        try:
            config = load_config(folder / name, trust=trust)
            environment = read_json(folder / name / "environment.json") or {}
        except ValueError:  # one that failed before it wrote them
            continue
        about = describe_run(environment, config.data.root)
        return ", ".join(
            filter(
                None,
                [f"{to_short_name(config.model.name)} on {to_short_name(config.data.name)}", about],
            )
        )
    return ""
