"""Runs with every combination of some settings, and a table that compares them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib import import_module
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Literal

import torch

from equipoise.core import (
    ConvergenceError,
    ConvergenceWarning,
    SourceError,
    choose,
    interruptible,
    require_count,
    write_atomically,
)
from equipoise.engine import find_metric
from equipoise.engine.progress_line import wrap_line
from equipoise.runs.build import DATA_OPTIONS
from equipoise.runs.config import Config, load_config, same_run
from equipoise.runs.own_code import describe_change, find_changed_code, with_absolute_paths
from equipoise.runs.run import train_run, try_report
from equipoise.runs.sweep_report import report_sweep
from equipoise.runs.sweep_table import columns_of, format_cell

__all__ = ["split_values", "sweep"]

MAX_FOLDER_NAME_LENGTH = 120  # characters of the name of a run's folder
MAX_SHOWN_NAME_LENGTH = 60  # characters of it in a line of 80


def sweep(
    source: str | Path,
    overrides: Sequence[str],
    grid: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    jobs: int = 1,
    pool: Literal["local", "ray"] = "local",
    root: str | None = None,
    trust: bool = False,
) -> list[dict[str, Any]]:
    """Train with every combination of some settings, and return a row for each, the best first.

    Each run has a process and a folder of its own. Runs that are finished are left alone, and those
    that were stopped are resumed, so a sweep can be repeated until it is complete. A run that fails
    does not stop the others. `sweep.csv` holds the rows, and `report.html` compares the runs.

    Args:
        source: As of `load_config`.
        overrides: Settings of all runs.
        grid: Keys of settings, each with the values to try as text.
        folder: Where the runs are kept.
        jobs: How many run at a time; they share the cores.
        pool: `local`, or `ray` for a Ray cluster.
        root: The folder with the data, if it is another one than in the config.
        trust: As of `load_config`.
    """
    require_count("sweep.jobs", jobs)
    choose("sweep.pool", pool, ("local", "ray"))
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    runs: dict[Path, tuple[Config, dict[str, str]]] = {}
    for number, point in enumerate(points):
        settings = [f"{key}={value}" for key, value in point.items()]
        config = load_config(source, [*overrides, *settings], trust=trust)
        if root is not None:
            config = replace(config, data=replace(config.data, root=root))
        config = with_absolute_paths(config)
        run = folder / _safe("-".join([f"{number:03d}", *settings]))
        if (run / "config.toml").exists() and not _same(load_config(run), config):
            raise SourceError(
                run, "holds a run with another config. Choose another folder for this sweep."
            )
        if files := find_changed_code(run, config):
            change = f"{describe_change(files)} since this run began"
            raise SourceError(run, f"{change}. Choose another folder for this sweep.")
        runs[run] = config, point
    folder.mkdir(parents=True, exist_ok=True)
    threads = max(1, torch.get_num_threads() // jobs)
    calls = [(config, run, threads) for run, (config, _) in runs.items()]
    rows: list[dict[str, Any]] = []
    for run, outcome in _run_local(calls, jobs) if pool == "local" else _run_ray(calls, threads):
        rows.append({"run": run.name, **runs[run][1], **outcome})
        name = _shorten(run.name)
        print(wrap_line(f"{len(rows)}/{len(calls)}  {name}: {_describe(outcome)}"), flush=True)
        write_atomically(folder / "sweep.csv", _csv(_sorted(rows)))
    try_report(folder, lambda: report_sweep(folder))
    return _sorted(rows)


def split_values(text: str) -> list[str]:
    """Split a text at its commas, except those within brackets and quotes.

    Args:
        text: What stands after the `=`, such as `1e-3,1e-2` or `[1, 2],[3]`.
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = (
                "" if letter == quote and not (quote == '"' and parts[-1].endswith("\\")) else quote
            )
        elif letter in "\"'" and (depth or not parts[-1].strip()):
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth = max(depth - 1, 0)
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def _train(config: Config, folder: Path, threads: int) -> dict[str, Any]:
    """Train, unless it is done already, and return the row; a failure is a row too."""
    torch.set_num_threads(threads)
    try:
        if (folder / "summary.json").exists():
            summary = json.loads((folder / "summary.json").read_text("utf-8"))
        else:
            with warnings.catch_warnings():
                # The table says how many missed.
                warnings.simplefilter("ignore", ConvergenceWarning)
                summary = train_run(config, folder, resume=True, quiet=True).to_dict()
        split = "validation" if summary["validation"] else "test"
        scores = summary[split]
        return {
            "status": summary["stopped"],
            "split": split,
            "metric": summary["metric"],
            "score": scores[summary["metric"]],
            "loss": scores["loss"],
            "missed": scores["missed"],
            "epochs": summary["epochs"],
            "seconds": round(summary["seconds"], 1),
        }
    except ConvergenceError as error:
        return {"status": "diverged", "reason": str(error)}
    except (ValueError, OSError) as error:
        return {"status": "failed", "reason": str(error)}
    except Exception as error:  # whatever it is, the other runs continue, and the table says so
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def _train_spawned(config: Config, folder: Path, threads: int) -> dict[str, Any]:
    """Train in a process of this sweep, which alone passes signals on.

    Ctrl-C in a terminal tells all processes at once: heard by the run too, it would be its first
    signal and the sweep's SIGTERM its second, which stops without a checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible([signal.SIGTERM]):
        return _train(config, folder, threads)


def _run_local(
    calls: Sequence[tuple[Config, Path, int]], jobs: int
) -> Iterator[tuple[Path, dict[str, Any]]]:
    left = iter(calls)
    running: dict[Future[dict[str, Any]], tuple[Path, ProcessPoolExecutor]] = {}
    try:
        while True:
            for call in itertools.islice(left, jobs - len(running)):
                # A pool for each, so that one that dies takes no other with it; spawned, because
                # threads do not survive a fork.
                executor = ProcessPoolExecutor(1, get_context("spawn"))
                running[executor.submit(_train_spawned, *call)] = call[1], executor
            if not running:
                return
            done = next(as_completed(running))
            run, executor = running.pop(done)
            executor.shutdown()
            if isinstance(done.exception(), BrokenProcessPool):
                yield (
                    run,
                    {
                        "status": "failed",
                        "reason": (
                            "its process died, perhaps for lack of memory; run the sweep again."
                        ),
                    },
                )
            else:
                yield run, done.result()
    finally:
        if running:  # told to stop: each run writes a checkpoint first
            for child in active_children():
                child.terminate()
        for _, executor in running.values():
            executor.shutdown(cancel_futures=True)


def _run_ray(
    calls: Sequence[tuple[Config, Path, int]], threads: int
) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise ImportError("A sweep on Ray needs ray. Install it with: pip install ray") from error
    ray.init(ignore_reinit_error=True)
    remote = ray.remote(num_cpus=threads)(_train)
    waiting = {remote.remote(config, run.absolute(), count): run for config, run, count in calls}
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        try:
            outcome = ray.get(done)
        except ray.exceptions.RayError as error:
            reason = (
                f"Ray could not run it ({str(error).strip().splitlines()[0]}); run the sweep again."
            )
            outcome = {"status": "failed", "reason": reason}
        yield waiting.pop(done), outcome


def _same(kept: Config, config: Config) -> bool:
    """Whether a run in a folder has this config, except for what a run takes from its data."""
    options = {
        **{key: value for key, value in kept.model.options.items() if key in DATA_OPTIONS},
        **config.model.options,
    }
    name = kept.task.name if config.task.name == "auto" else config.task.name
    return same_run(
        kept,
        replace(
            config,
            model=replace(config.model, options=options),
            task=replace(config.task, name=name),
        ),
    )


def _sorted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best row first, those without a score last."""

    def rank(row: dict[str, Any]) -> tuple[bool, float, str]:
        score = row.get("score")
        if score is None or math.isnan(score):
            return True, 0.0, row["run"]
        higher = find_metric(row["metric"]).higher_is_better
        return False, -score if higher else score, row["run"]

    return sorted(rows, key=rank)


def _describe(outcome: Mapping[str, Any]) -> str:
    if "reason" in outcome:
        return f"{outcome['status']}: {outcome['reason']}"
    return f"{outcome['split']} {outcome['metric']} {format_cell(outcome['score'])}"


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _shorten(name: str) -> str:
    """The name of a run to show; it begins with the number of the run."""
    most = MAX_SHOWN_NAME_LENGTH
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _safe(name: str) -> str:
    return re.sub(r"[^\w.=+-]", "_", name, flags=re.ASCII)[:MAX_FOLDER_NAME_LENGTH]
