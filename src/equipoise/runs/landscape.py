"""The loss landscape of a run: computed by several processes, kept chunk by chunk, resumed."""

from __future__ import annotations

import hashlib
import json
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from equipoise.analysis.direction import (
    Normalization,
    path_plane,
    random_direction,
    weights_of,
)
from equipoise.analysis.landscape import Landscape, PointLoss, grid_axis, measure_points
from equipoise.core import (
    ConvergenceWarning,
    SettingError,
    SourceError,
    choose,
    flush_denormals,
    require_count,
    require_whole,
)
from equipoise.core.interrupt import follow_parent
from equipoise.data import Dataset, fingerprint
from equipoise.engine import evaluate
from equipoise.runs.config import Config
from equipoise.runs.landscape_file import LandscapeFile
from equipoise.runs.network import Network, Source, at_epoch, list_kept_epochs, open_network
from equipoise.runs.own_code import hash_sources

__all__ = ["FoundLandscape", "LandscapeSettings", "find_landscape"]

Directions = Literal["random", "path"]
CHUNKS = 16  # for each process, at least; what is under way is lost when it is killed
MARGIN = 0.15  # of a path's extent, that the plane shows on each side of it
MAX_SEED = 2**63 - 1
PLACES = ("root", "download", "workers", "memory")  # of data, which the samples do not depend on


@dataclass(frozen=True)
class LandscapeSettings:
    """Which landscape.

    Args:
        directions: `random`, as long as the weights (Li et al., 2018), or the two principal
            directions of the training `path`.
        dimensions: 1 for a line, 2 for a plane.
        points: Points along each axis.
        reach: First and last step along each axis; by default -1 and 1, or around the path.
        samples: How many samples the loss is a mean over, at most.
        split: Of which samples, as of `evaluate_run`.
        normalize: As of `random_direction`.
        vectors: As of `random_direction`.
        seed: Of the random directions.
    """

    directions: Directions = "random"
    dimensions: int = 2
    points: int = 51
    reach: tuple[float, float] | None = None
    samples: int = 256
    split: str | None = "train"
    normalize: Normalization = "filter"
    vectors: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        choose("look.directions", self.directions, get_args(Directions))
        choose("look.normalize", self.normalize, get_args(Normalization))
        if self.dimensions not in (1, 2):
            raise SettingError("look.dimensions", "be 1 or 2", self.dimensions)
        grid_axis(*(self.reach or (-1.0, 1.0)), self.points, "look")
        require_count("look.samples", self.samples)
        require_whole("look.seed", self.seed, MAX_SEED)


@dataclass(frozen=True)
class FoundLandscape:
    """A landscape, and where it was looked at.

    Attributes:
        landscape: The losses.
        file: Where they are kept.
        split: The split that the samples are of.
        path: Where the training path goes through the plane, shape (epochs, 2), if that is what
            the directions come from.
        explained: The fraction of the path along each direction, likewise.
    """

    landscape: Landscape
    file: Path
    split: str
    path: np.ndarray | None = None
    explained: np.ndarray | None = None


def find_landscape(
    source: Source,
    settings: LandscapeSettings,
    folder: Path,
    *,
    processes: int = 1,
    on_points: Callable[[int, int], None] | None = None,
) -> FoundLandscape:
    """Return the loss of a network over a grid of weights, and keep it.

    Each point is computed by itself, on one thread, so that the numbers are the same bit for bit
    however many processes share them. What is there already is not computed again: after a
    `kill -9`, at most the chunks that were under way are.

    Args:
        source: The network.
        settings: Which landscape.
        folder: Where it is kept; other landscapes may be there too.
        processes: How many compute at a time.
        on_points: Called with how many points are there, and how many there will be.
    """
    require_count("look.processes", processes)
    worker = _Worker(source, settings)
    path, explained = None, None
    if settings.directions == "path":
        plane = path_plane(_read_path(worker.network), weights_of(worker.model))
        worker.directions = list(plane.directions)[: settings.dimensions]
        path, explained = plane.coordinates, plane.explained
    else:
        worker.directions = _draw(worker.network, settings)
    x, y = _axes(settings, path)
    points = [(a, b)[: settings.dimensions] for b in y for a in x]
    folder.mkdir(parents=True, exist_ok=True)
    grid = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    digest = f"{worker.digest()} {grid}"
    kept = LandscapeFile.open(folder, asdict(settings), digest, len(points))
    left = np.flatnonzero(~kept.done)
    size = max(1, min(len(x), len(points) // (CHUNKS * processes)))
    chunks = [left[start : start + size] for start in range(0, len(left), size)]
    if on_points is not None:
        on_points(int(kept.done.sum()), len(points))
    for chunk, found in _compute(worker, points, chunks, processes):
        kept.add(chunk, found)
        if on_points is not None:
            on_points(int(kept.done.sum()), len(points))
    shape = (len(y), len(x))
    landscape = Landscape(
        x,
        y,
        kept.loss.reshape(shape),
        kept.missed.reshape(shape),
        kept.nonfinite.reshape(shape),
        len(worker.dataset),
    )
    return FoundLandscape(landscape, kept.file, worker.dataset.split, path, explained)


def _axes(settings: LandscapeSettings, path: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    reaches = [settings.reach or (-1.0, 1.0)] * 2
    if path is not None and settings.reach is None:
        low, high = np.minimum(path.min(0), 0.0), np.maximum(path.max(0), 0.0)
        margin = MARGIN * (high - low)
        axes = [
            _axis_through_zero(float(a), float(b), settings.points)
            for a, b in zip(low - margin, high + margin, strict=True)
        ]
        return axes[0], axes[1] if settings.dimensions == 2 else np.zeros(1)
    x, y = (grid_axis(*reach, settings.points, "look") for reach in reaches)
    return x, y if settings.dimensions == 2 else np.zeros(1)


def _axis_through_zero(low: float, high: float, points: int) -> np.ndarray:
    """Evenly spaced steps from about `low` to about `high`, one of which is zero: the weights."""
    gap = (high - low) / (points - 1)
    axis: np.ndarray = gap * (np.arange(points) - round(-low / gap))
    return axis


def _read_path(network: Network) -> list[dict[str, Tensor]]:
    """The weights of a run after each epoch that it kept them of."""
    folder = network.source.folder
    epochs = [] if folder is None else list_kept_epochs(folder)
    if len(epochs) < 3:
        raise SourceError(
            network.source.name,
            f"must have kept its weights after at least 3 epochs, to draw its path; it has "
            f"{len(epochs)}. Train it with train.weights_every=1.",
        )
    path = []
    for epoch in epochs:
        with at_epoch(network, epoch):
            path.append(weights_of(network.run.model))
    return path


def _draw(network: Network, settings: LandscapeSettings) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(settings.seed)
    return [
        random_direction(
            weights_of(network.run.model),
            normalize=settings.normalize,
            vectors=settings.vectors,
            generator=generator,
        )
        for _ in range(settings.dimensions)
    ]


class _Worker:
    """Measures points; one in each process."""

    def __init__(self, source: Source, settings: LandscapeSettings) -> None:
        self.source, self.settings = source, settings
        self.network = open_network(source)
        self.model = self.network.run.model
        self.dataset: Dataset = self.network.samples(settings.split, settings.samples)
        self.directions: list[dict[str, Tensor]] = []

    def digest(self) -> str:
        """A checksum of all that the losses depend on but the settings."""
        found = hashlib.sha256(fingerprint(self.dataset).encode())
        for weights in (self.model.state_dict(), *self.directions):
            for name, tensor in weights.items():
                found.update(name.encode())
                found.update(
                    tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                )
        found.update(_describe_loss(self.network.run.config).encode())
        return found.hexdigest()

    def measure(self, points: Sequence[Sequence[float]]) -> list[PointLoss]:
        """Return the losses at some points."""
        with _one_thread(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # they are counted
            return list(measure_points(self.model, self._score, self.directions, points))

    def _score(self) -> PointLoss:
        run = self.network.run
        found = evaluate(
            self.model,
            run.task,
            self.dataset,
            batch=run.config.train.evaluate_batch,
            transform=run.transform,
            precision=run.config.train.precision,
        )
        broken = max(found.nonfinite, found.status.get("NONFINITE", 0))
        loss = found.metrics["loss"]
        return PointLoss(np.nan if broken or loss is None else loss, found.missed, broken)


def _describe_loss(config: Config) -> str:
    """All of a config that the loss of given weights at given samples depends on, as text."""
    data = asdict(config.data)
    for name in PLACES:
        del data[name]
    about = {
        "model": asdict(config.model),
        "data": data,
        "task": asdict(config.task),
        "precision": config.train.precision,
        "batch": config.train.evaluate_batch,
        "sources": hash_sources(config),
    }
    return json.dumps(about, sort_keys=True, default=str)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, whose sums are always rounded in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with flush_denormals():
            yield
    finally:
        torch.set_num_threads(threads)


_worker: _Worker | None = None  # of a process that was started to measure


def _start(
    source: Source,
    settings: LandscapeSettings,
    directions: Sequence[dict[str, np.ndarray]],
    digest: str,
) -> None:
    global _worker
    follow_parent((signal.SIGINT,))
    worker = _Worker(source, settings)
    device = next((weight.device for weight in worker.model.parameters()), torch.device("cpu"))
    worker.directions = [
        {name: torch.from_numpy(value).to(device) for name, value in one.items()}
        for one in directions
    ]
    _worker = worker if worker.digest() == digest else None


def _measure(points: Sequence[Sequence[float]]) -> list[PointLoss] | None:
    return None if _worker is None else _worker.measure(points)


def _compute(
    worker: _Worker,
    points: Sequence[Sequence[float]],
    chunks: Sequence[np.ndarray],
    processes: int,
) -> Iterator[tuple[np.ndarray, list[PointLoss]]]:
    """Yield chunks as they are there."""
    if min(processes, len(chunks)) < 2:
        for chunk in chunks:
            yield chunk, worker.measure([points[place] for place in chunk])
        return
    plain = [
        {name: value.cpu().numpy() for name, value in one.items()} for one in worker.directions
    ]
    arguments = (worker.source, worker.settings, plain, worker.digest())
    # Spawned, because threads do not survive a fork.
    pool = ProcessPoolExecutor(
        min(processes, len(chunks)), get_context("spawn"), initializer=_start, initargs=arguments
    )
    over = False
    try:
        waiting = {
            pool.submit(_measure, [points[place] for place in chunk]): chunk for chunk in chunks
        }
        for done in as_completed(waiting):
            found = done.result()
            if found is None:
                raise SourceError(
                    worker.source.name, "has changed meanwhile. Try again when it is trained."
                )
            yield waiting[done], found
        over = True
    except BrokenProcessPool as error:
        raise SourceError(
            worker.source.name,
            "lost a process that computes its landscape, perhaps for lack of memory; what is done "
            "is kept. Try again with --processes 1.",
        ) from error
    finally:
        if not over:
            for child in active_children():
                child.terminate()
        pool.shutdown(cancel_futures=True)
