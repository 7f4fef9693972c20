"""The page about a run: what its files say, and one solve looked at closely."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.analysis import certify, objective
from equipoise.core import SourceError, stop_if_requested, write_atomically
from equipoise.data import BadSampleWarning, DataError, Dataset, read_bad_samples
from equipoise.engine import read_metrics
from equipoise.layers import Equilibrium
from equipoise.models import Model
from equipoise.report import RunReport, ShownSample, SolvePath, render_report
from equipoise.runs.config import load_config
from equipoise.runs.samples import load_part
from equipoise.runs.saved_run import Run, open_run

__all__ = ["BAD_SAMPLES", "read_json", "report_run"]

BAD_SAMPLES = "bad_samples.jsonl"  # the file of a run that lists them
EXACT = 1e-6  # to what the solve on the page is made, so that its path can be seen
MAX_SIDE = 512  # pixels of an image on the page, at most


def report_run(folder: Path) -> Path:
    """Write a page about a run, finished or not, into its folder, and return where it is.

    Samples are shown if the data are where they were in training.

    Args:
        folder: Where the run is kept.
    """
    config = load_config(folder)
    lines = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    summary = read_json(folder / "summary.json")
    shown: list[ShownSample] = []
    solves: list[SolvePath] = []
    about: Dataset | None = None
    settings = asdict(config)
    if (folder / "model.safetensors").exists():
        run = open_run(folder)
        about = run.about
        for layer in run.model.equilibria().values():
            # what residuals are measured by
            settings["model"]["options"].setdefault("tolerance", layer.stop.tolerance)
        try:
            samples: Dataset | None = load_part(config.data, None)
        except DataError:
            samples = None
        if samples is not None and len(samples):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", BadSampleWarning)  # the page lists them
                solves = _solves(run, samples)
                shown = _shown_samples(run, samples)
    report = RunReport(
        title=f"{config.model.name} on {config.data.name}",
        config=settings,
        environment=read_json(folder / "environment.json") or {},
        steps=[line for line in lines if line.get("kind") == "step"],
        epochs=[line for line in lines if line.get("kind") == "epoch"],
        summary=summary,
        classes=() if about is None else about.classes,
        confusion=_confusion((summary or {}).get("confusion"), folder / "summary.json"),
        samples=shown,
        ignore=None if about is None else about.ignore,
        solves=solves,
        bad_samples=read_bad_samples(folder / BAD_SAMPLES),
    )
    path = folder / "report.html"
    write_atomically(path, render_report(report))
    return path


def _solves(run: Run, samples: Dataset) -> list[SolvePath]:
    """Each equilibrium of the first sample, solved by plain steps and more exactly than trained."""
    x, _ = _sample(run, samples, 0)
    raw, _ = samples.gather([0], replace_bad=True)
    inputs = _equilibrium_inputs(run.model, x)
    return [
        replace(
            _solve(layer, features), image=_pixels(raw[0]), name=name if len(inputs) > 1 else ""
        )
        for name, (layer, features) in inputs.items()
    ]


def _solve(layer: Equilibrium, features: Tensor) -> SolvePath:
    stop_if_requested()
    exact = Equilibrium(
        layer.cell, "fixed_point", tolerance=EXACT, max_steps=500, on_failure="ignore"
    )
    with torch.no_grad():
        exact(features, trace=True)
    assert exact.last is not None
    assert exact.last.trace is not None
    value: list[float] | None = None
    try:
        problem = objective(exact, features)
        description = problem.describe()
        descent = problem.descent(exact.last.trace)
        if descent is not None:
            path = descent.value[:, 0]
            value = (path[:-1] - path[-1]).tolist()  # the last counts as the minimum
    except ValueError as error:  # layers that solve no problem that one can write down say so
        description = str(error)
    try:
        found = certify(layer, strict=False)
        certificate = str(found) if found.holds else f"{found}\n{found.remedy}".strip()
    except (ValueError, ArithmeticError) as error:  # weights that are not finite
        certificate = str(error)
    return SolvePath(exact.last.trace.residual[:, 0].tolist(), value, description, certificate)


def _equilibrium_inputs(model: Model, x: Tensor) -> dict[str, tuple[Equilibrium, Tensor]]:
    """Each equilibrium layer of a model with what it is given when the model gets `x`."""
    found: dict[str, tuple[Equilibrium, Tensor]] = {}

    def listen(name: str, layer: Equilibrium) -> RemovableHandle:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.setdefault(name, (layer, inputs[0]))

        return layer.register_forward_pre_hook(keep)

    handles = [listen(name, layer) for name, layer in model.equilibria().items()]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _shown_samples(run: Run, samples: Dataset) -> list[ShownSample]:
    """The samples that the task shows: what the model saw of them, and what it made of that."""
    count = min(run.task.shown_samples, len(samples))
    shown = []
    for number in range(0, len(samples), len(samples) // count)[:count] if count else ():
        stop_if_requested()
        x, target = _sample(run, samples, number)
        with torch.no_grad():
            output = run.model(x).cpu()
        panels = run.task.illustrate(output[0], target[0])
        if x.dim() == 4 and panels:
            size = next(iter(panels.values())).shape[-2:]
            seen = nn.functional.interpolate(x.cpu().float(), tuple(size))[0]
            panels = {"image": seen, **panels}
        found = {name: _panel(panel) for name, panel in panels.items()}
        if found and all(panel is not None for panel in found.values()):
            shown.append(ShownSample({k: v for k, v in found.items() if v is not None}))
    return shown


def _sample(run: Run, samples: Dataset, number: int) -> tuple[Tensor, Tensor]:
    """A batch of one sample as the model sees it, and its target."""
    x, target = samples.gather([number], replace_bad=True)
    if run.transform is not None:
        x, target = run.transform(x, target, generator=torch.Generator().manual_seed(number))
    weight = next(run.model.parameters(), None)
    return x if weight is None else x.to(weight.device), target


def _panel(values: Tensor) -> np.ndarray[Any, Any] | None:
    """A mask, or an image in colour, thinned to what a page can show; None if it is neither."""
    every = -(-max(values.shape[-2:]) // MAX_SIDE) if values.dim() >= 2 else 1
    if values.dim() == 2:
        return values.numpy()[::every, ::every]
    image = _pixels(values)
    if image is None:
        return None
    image = image if image.ndim == 3 else image[..., None]
    return np.broadcast_to(image, (*image.shape[:2], 3))[::every, ::every]


def _pixels(x: Tensor) -> np.ndarray[Any, Any] | None:
    """A sample as height x width (x 3), if it is an image."""
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        return None
    pixels = x.permute(1, 2, 0).numpy()
    return np.ascontiguousarray(pixels[..., 0] if x.shape[0] == 1 else pixels)


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
