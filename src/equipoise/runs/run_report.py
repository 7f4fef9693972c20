"""The page about a run: what its files say, and one solve looked at closely."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core import SourceError, write_atomically
from equipoise.core.json_values import to_json_values
from equipoise.core.named_code import to_short_name
from equipoise.data import BadSampleWarning, DataError, Dataset, read_bad_samples
from equipoise.engine import read_metrics
from equipoise.report import RunReport, ShownSample, SolvePath, Survey, render_report
from equipoise.runs.certificate import CertifiedRun
from equipoise.runs.certified_run import digest_weights
from equipoise.runs.closeup import Trained, show_samples, trace_solves
from equipoise.runs.config import load_config
from equipoise.runs.samples import load_part
from equipoise.runs.saved_run import open_run
from equipoise.runs.survey import survey_samples

__all__ = [
    "BAD_SAMPLES",
    "CERTIFICATE",
    "describe_run",
    "look_at",
    "read_json",
    "report_run",
    "write_certificate",
]

MAX_FIGURE_BYTES = 2_000_000  # of a figure that the page shows
BAD_SAMPLES = "bad_samples.jsonl"  # the file of a run that lists them
CERTIFICATE = "certificate.json"  # what `equipoise certify` found last


def report_run(folder: Path, *, trust: bool = False) -> Path:
    """Write a page about a run, finished or not, into its folder, and return where it is.

    Samples are shown if the data are where they were in training.

    Args:
        folder: Where the run is kept.
        trust: As of `open_run`.
    """
    if (folder / "metrics.jsonl").exists() and not (folder / "config.toml").exists():
        raise SourceError(
            folder,
            "has no config.toml, so it was trained from Python. Write its page there, where its "
            "model and data are known, with equipoise.runs.report_trainer.",
        )
    config = load_config(folder, trust=trust)
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    summary = read_json(folder / "summary.json")
    shown: list[ShownSample] = []
    solves: list[SolvePath] = []
    found: Survey | None = None
    about: Dataset | None = None
    settings = asdict(config)
    if (folder / "model.safetensors").exists():
        run = open_run(folder)
        about = run.about
        trained = Trained(
            run.model,
            run.task,
            run.classes,
            run.transform,
            config.train.evaluate_batch,
            config.train.precision,
        )
        for layer in run.model.equilibria().values():
            # what residuals are measured by
            settings["model"]["options"].setdefault("tolerance", layer.stop.tolerance)
        try:
            samples: Dataset | None = load_part(config.data, None, about.encoding)
        except DataError:
            samples = None
        if samples is not None and len(samples):
            solves, shown, found = look_at(trained, samples)
    environment = read_json(folder / "environment.json") or {}
    report = RunReport(
        title=f"{to_short_name(config.model.name)} on {to_short_name(config.data.name)}",
        subtitle=describe_run(environment, config.data.root),
        config=settings,
        environment=environment,
        steps=[line for line in lines if line.get("kind") == "step"],
        epochs=[line for line in lines if line.get("kind") == "epoch"],
        summary=summary,
        classes=() if about is None else about.classes,
        confusion=_confusion((summary or {}).get("confusion"), folder / "summary.json"),
        samples=shown,
        ignore=None if about is None else about.ignore,
        solves=solves,
        bad_samples=read_bad_samples(folder / BAD_SAMPLES),
        survey=found,
        certificate=_read_certificate(folder),
        figures=_read_figures(folder / "look"),
    )
    path = folder / "report.html"
    write_atomically(path, render_report(report))
    return path


def write_certificate(folder: Path, found: CertifiedRun) -> bool:
    """Keep what is proved of a run beside it, for its page; return whether there is such a run.

    Args:
        folder: Where the run is kept.
        found: What is proved.
    """
    if found.weights is None:
        return False
    values = to_json_values({"weights": found.weights, **found.to_dict()})
    write_atomically(folder / CERTIFICATE, json.dumps(values, indent=1, allow_nan=False) + "\n")
    return True


def _read_certificate(folder: Path) -> dict[str, Any] | None:
    """What `certify` found, if it is about the weights that the run has now."""
    values = read_json(folder / CERTIFICATE)
    if values is None or not (folder / "model.safetensors").is_file():
        return None
    return values if values.get("weights") == digest_weights(folder) else None


def _read_figures(folder: Path) -> list[tuple[bytes, str]]:
    """The PNG files that `equipoise look` made, each with its caption."""
    from PIL import Image

    found = []
    for path in sorted(folder.glob("*.png")):
        if path.stat().st_size > MAX_FIGURE_BYTES:
            continue
        content = path.read_bytes()
        try:
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                caption = str(image.info.get("Description", path.stem))
        except (OSError, ValueError, SyntaxError):  # somebody else's file
            continue
        found.append((content, caption))
    return found


def look_at(
    trained: Trained, samples: Dataset
) -> tuple[list[SolvePath], list[ShownSample], Survey]:
    """Return what a page shows of the samples that a model is scored on.

    Args:
        trained: The model.
        samples: The samples, at least one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadSampleWarning)  # the page lists them
        return (
            trace_solves(trained, samples),
            show_samples(trained, samples),
            survey_samples(trained, samples),
        )


def describe_run(environment: Mapping[str, Any], root: str) -> str:
    """Return when a run was started, and where its data are.

    Args:
        environment: What it ran on.
        root: The folder of its data.
    """
    parts = []
    try:
        started = datetime.fromisoformat(str(environment.get("started")))
        parts.append(f"{started.day} {started:%B %Y, %H:%M} {started.tzname() or ''}".strip())
    except ValueError:  # a folder that was made by hand
        pass
    return ", ".join([*parts, f"data in {root}"] if root else parts)


def _confusion(values: Any, path: Path) -> np.ndarray[Any, Any] | None:
    """The confusion matrix of a summary."""
    if values is None:
        return None
    square = isinstance(values, list) and all(
        isinstance(row, list) and len(row) == len(values) for row in values
    )
    if not square or not all(
        type(count) is int and 0 <= count < 2**63 for row in values for count in row
    ):
        raise SourceError(path, "confusion must be a square matrix of counts.")
    return np.array(values)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, if the file is there.

    Args:
        path: The file.
    """
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(path, f"must be JSON: {error}.") from error
    if not isinstance(values, dict):
        raise SourceError(path, f"must hold a JSON object; got {type(values).__name__}.")
    return values
