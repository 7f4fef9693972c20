"""Figures of solves: trajectories, residuals, and eigenvalues at equilibria."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.analysis import Trajectory, jacobian_eigenvalues, trace_solve
from equipoise.analysis.trajectory import Components
from equipoise.core import SettingError, SourceError, require_count, require_positive
from equipoise.data import Dataset
from equipoise.engine.tasks import LabelAnswer
from equipoise.layers import Equilibrium
from equipoise.layers.options import CallOptions
from equipoise.plots import plot_residuals, plot_spectrum, plot_trajectories, save_figure
from equipoise.runs.closeup import Trained, find_layer_inputs
from equipoise.runs.look import Look, require_panels
from equipoise.runs.network import Network, Source, at_epoch, list_kept_epochs, open_network

__all__ = ["SolveSettings", "look_spectrum", "look_trajectory", "open_panels"]

SOME = 6  # epochs that are looked at where all are asked for
MAX_NUMBERS = 200_000_000  # of the iterates of one solve


@dataclass(frozen=True)
class SolveSettings:
    """Which solves to look at.

    Args:
        samples: How many samples, evenly spread over the split.
        split: Of which samples, as of `evaluate_run`; by default those that the run scores.
        epochs: After which epochs, of those whose weights were kept; `None` looks at the weights to
            use, and an empty list at up to six of those epochs.
        solvers: Whose steps; by default the layer's own solver.
        steps: Steps at most; by default the layer's own number.
        tolerance: Where a solve ends; by default at the layer's own tolerance.
        layer: The name of the equilibrium, where there are several; by default the first.
        components: As of `project_paths`.
    """

    samples: int = 64
    split: str | None = None
    epochs: Sequence[int] | None = None
    solvers: Sequence[str] = ()
    steps: int | None = None
    tolerance: float | None = None
    layer: str | None = None
    components: Components = "iterates"

    def __post_init__(self) -> None:
        require_count("look.samples", self.samples)
        if self.steps is not None:
            require_count("look.steps", self.steps)
        if self.tolerance is not None:
            require_positive("look.tolerance", self.tolerance)


def look_trajectory(sources: Sequence[Source], settings: SolveSettings, folder: Path) -> Look:
    """Draw the iterates of solves in the plane of their principal components, and their residuals.

    Args:
        sources: The networks, each in a panel of its own, or in one for each epoch.
        settings: Which solves.
        folder: Where to write.
    """
    solves: dict[str, dict[str, Trajectory]] = {}
    tolerances: set[float] = set()
    for panel in open_panels(sources, settings):
        layer, given = _layer_inputs(panel, settings.layer)
        tolerances.add(settings.tolerance or layer.stop.tolerance)
        found = [_trace(layer, given, settings, name) for name in settings.solvers or (None,)]
        solves[panel.title] = {one.solver: one for one in found}
    paths = {title: next(iter(found.values())) for title, found in solves.items()}
    same = len({one.state.shape[2] for one in paths.values()}) == 1
    about = f"{len(panel.samples)} samples of {panel.samples.split!r}"
    whose = "all of them" if settings.components == "iterates" else "their ends"
    shared = ", the same in all panels" if same and len(paths) > 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    files = save_figure(
        plot_trajectories(
            paths,
            _labels(panel),
            panel.network.run.classes,
            common=same,
            components=settings.components,
        ),
        folder / "trajectory",
        f"Iterates of {', '.join(sorted({one.solver for one in paths.values()}))} for {about} in "
        f"the plane of the first two principal components of {whose}{shared}. Grey rings: where "
        "solves "
        "start; markers: where they end, hollow if the equilibrium was not reached.",
    )
    files += save_figure(
        plot_residuals(solves, tolerances.pop() if len(tolerances) == 1 else None),
        folder / "residual",
        f"Relative residual of {about} at each step: the median, and a band from the tenth to the "
        "ninetieth percentile. The long dashes mark the tolerance.",
    )
    lines = [
        f"{title}, {name}: {_describe(one)}"
        for title, found in solves.items()
        for name, one in found.items()
    ]
    values = {
        title: {name: _summarize(one) for name, one in found.items()}
        for title, found in solves.items()
    }
    return Look(files, lines, values)


def _trace(
    layer: Equilibrium, given: Tensor, settings: SolveSettings, solver: str | None
) -> Trajectory:
    options: CallOptions = {}
    if settings.tolerance is not None:
        options["tolerance"] = settings.tolerance
    if settings.steps is not None:
        options["max_steps"] = settings.steps
    if solver is not None:
        options["solver"] = solver
    numbers = given.numel() * (options.get("max_steps", layer.stop.max_steps) + 1)
    if numbers > MAX_NUMBERS:
        raise SettingError(
            "look.samples",
            f"be so few that the iterates have at most {MAX_NUMBERS:,} numbers",
            settings.samples,
            "Lower --samples or --steps.",
            got=f"{len(given)}, which may have {numbers:,}",
        )
    return trace_solve(layer, given, **options)


def _summarize(one: Trajectory) -> dict[str, Any]:
    return {
        "samples": len(one.status),
        "unsolved": one.missed,
        "median_steps": float(np.median(one.steps)),
        "median_residual": float(np.median(one.residual[-1])),
        "median_length": float(np.median(one.lengths)),
    }


def _describe(one: Trajectory) -> str:
    found = _summarize(one)
    ended = f"{one.missed} of {len(one.status)} samples unsolved" if one.missed else "all solved"
    return (
        f"{ended}; median {found['median_steps']:.0f} steps, residual "
        f"{found['median_residual']:.1e}, length of the path {found['median_length']:.3g}"
    )


def look_spectrum(
    sources: Sequence[Source], settings: SolveSettings, folder: Path, *, products: int = 60
) -> Look:
    """Draw the eigenvalues of the step's Jacobian at equilibria.

    Args:
        sources: The networks, each in a panel of its own, or in one for each epoch.
        settings: Which equilibria, solved by the first of its solvers.
        folder: Where to write.
        products: As of `jacobian_eigenvalues`.
    """
    spectra: dict[str, np.ndarray] = {}
    solved: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    lines: list[str] = []
    whole = True
    for panel in open_panels(sources, settings):
        layer, given = _layer_inputs(panel, settings.layer)
        _trace(layer, given, settings, settings.solvers[0] if settings.solvers else None)
        assert layer.last is not None
        found = jacobian_eigenvalues(
            layer.map(given),
            layer.last.value,
            products=products,
            generator=torch.Generator(given.device).manual_seed(0),
        )
        title, whole = panel.title, whole and found.whole
        spectra[title] = found.value.cpu().numpy()
        solved[title] = layer.last.converged.cpu().numpy()
        known = spectra[title][np.isfinite(spectra[title]).any(axis=1)]
        if not len(known):
            raise SourceError(title, "has a Jacobian that is not finite at any of these samples.")
        radius = np.nanmax(np.abs(known), axis=1)
        missed = int((~solved[title]).sum())
        values[title] = {
            "radius": radius.tolist(),
            "unsolved": missed,
            "all_eigenvalues": found.whole,
        }
        lines.append(
            f"{title}: spectral radius {radius.min():.4g} to {radius.max():.4g} at {len(radius)} "
            f"samples{f', {missed} of them unsolved' if missed else ''}"
        )
    kind = "All eigenvalues" if whole else f"Outline of the spectrum, {products} Ritz values each,"
    caption = (
        f"{kind} of the step's Jacobian at the equilibria of {len(panel.samples)} samples of "
        f"{panel.samples.split!r}. Plain iteration converges near an equilibrium whose eigenvalues "
        "are all inside the unit circle (dashed)."
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = save_figure(plot_spectrum(spectra, solved), folder / "spectrum", caption)
    return Look(files, lines, values)


class Panel(NamedTuple):
    """One network at one epoch, with the samples to look at.

    Attributes:
        title: What it is called.
        network: The network.
        samples: The samples.
        x: The same as the model sees them.
    """

    title: str
    network: Network
    samples: Dataset
    x: Tensor


def open_panels(sources: Sequence[Source], settings: SolveSettings) -> Iterator[Panel]:
    """Yield each network with the weights of each epoch that is asked for.

    Args:
        sources: The networks.
        settings: Which samples and epochs.
    """
    count = 0
    for source in sources:
        network = open_network(source)
        samples = network.samples(settings.split, settings.samples)
        run = network.run
        trained = Trained(run.model, run.task, run.classes, run.transform)
        x, _ = trained.prepare(*samples.gather(range(len(samples))), 0)
        for epoch in _epochs(source, settings.epochs):
            count += 1
            require_panels(count)
            when = "" if epoch is None else f"after epoch {epoch}" if epoch else "before training"
            title = when if len(sources) == 1 and when else f"{source.title} {when}".strip()
            with at_epoch(network, epoch):
                yield Panel(title, network, samples, x)


def _epochs(source: Source, asked: Sequence[int] | None) -> Sequence[int | None]:
    if asked is None:
        return [None]
    if asked or source.folder is None:
        return asked or [None]
    known = list_kept_epochs(source.folder)
    if not known:
        raise SourceError(
            source.name,
            "must have kept the weights of its epochs; it has none. Train it with "
            "train.weights_every=1.",
        )
    # evenly spaced in the logarithm, since most happens early
    places = np.geomspace(1, len(known), min(SOME, len(known))) - 1
    return sorted({known[round(place)] for place in places})


def _layer_inputs(panel: Panel, name: str | None) -> tuple[Equilibrium, Tensor]:
    """The equilibrium to look at, and what the model gives it."""
    name, layer = panel.network.layer(name)
    inputs = find_layer_inputs(panel.network.run.model, panel.x)
    if name not in inputs:
        raise SettingError("look.layer", "be an equilibrium that the model uses", name)
    return layer, inputs[name]


def _labels(panel: Panel) -> np.ndarray | None:
    """The class of each sample, where the task has such."""
    targets = panel.samples.y
    if targets is None or not issubclass(panel.network.run.task.answer_type, LabelAnswer):
        return None
    return targets.numpy() if targets.dim() == 1 else None
