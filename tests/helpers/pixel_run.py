"""Small runs that segment images of random pixels, many of which do not count."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task, read_metrics
from equipoise.engine.progress import SilentProgress

IGNORE = 255
TIMES = ("seconds", "samples_per_second", "loading_fraction")


def pixels(count: int = 20, seed: int = 0) -> Dataset:
    """Images of three classes of pixels; how many pixels count differs greatly from image to image.

    Args:
        count: How many images.
        seed: Of their pixels.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 3, 3, generator=random, dtype=torch.float64)
    y = x.sum(1).mul(2).long().clamp(-1, 1) + 1
    y[torch.rand(y.shape, generator=random) < torch.linspace(0, 1, count).view(-1, 1, 1)] = IGNORE
    y[-1] = IGNORE
    return Dataset(
        "pixels", "train", "segmentation", ("a", "b", "c"), (2, 3, 3), x, y, ignore=IGNORE
    )


class StopAt(SilentProgress):
    """Tells the own process to stop at one step, as a scheduler does."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, step: int, epoch: int, values: Any) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def make(
    folder: Path | None = None,
    *,
    data: Dataset | None = None,
    stop_at: int = 0,
    dropout: float = 0.0,
    held_out: bool = False,
    **settings: Any,
) -> Trainer:
    """Return a trainer of a small network in float64: three epochs of four steps.

    Args:
        folder: Where the run is kept, if anywhere.
        data: What it learns from and is scored on.
        stop_at: The step at which it is told to stop; 0 never.
        dropout: Of its network.
        held_out: Whether what is scored counts as held out.
        settings: Of `TrainConfig`.
    """
    torch.manual_seed(0)
    data = data or pixels()
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Dropout(dropout), nn.Conv2d(4, 3, 1)
    )
    return Trainer(
        model.double(),
        make_task("auto", data),
        data,
        data,
        held_out=held_out,
        settings=TrainConfig(**{"epochs": 3, "batch": 6, "log_every": 1, **settings}),
        optimizer=OptimizerConfig("sgd", 0.5),
        folder=folder,
        progress=StopAt(stop_at),
    )


def weights(trainer: Trainer) -> Tensor:
    """Return all weights of a model as one vector."""
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, without what depends on time."""
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in read_metrics(folder / "metrics.jsonl")
    ]
