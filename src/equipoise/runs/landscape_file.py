"""A landscape that is kept chunk by chunk, each time whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.analysis.landscape import PointLoss
from equipoise.engine import CheckpointError, read_checkpoint, write_checkpoint

__all__ = ["LandscapeFile"]

FORMAT = 1  # of the file; one of another format is computed anew


@dataclass
class LandscapeFile:
    """A landscape as far as it is computed, and the file that keeps it.

    Attributes:
        file: Where.
        identity: All that the numbers depend on.
        loss: Of each point; see `Landscape`.
        missed: Likewise.
        nonfinite: Likewise.
        done: Which points are computed.
    """

    file: Path
    identity: dict[str, object]
    loss: np.ndarray
    missed: np.ndarray
    nonfinite: np.ndarray
    done: np.ndarray

    @classmethod
    def open(
        cls, folder: Path, settings: Mapping[str, Any], digest: str, points: int
    ) -> LandscapeFile:
        """Return what is there of a landscape; its file is named by all that it depends on.

        Args:
            folder: Where it is.
            settings: Which landscape, as plain values.
            digest: Checksums of the network with its weights, of the samples, and of the grid.
            points: How many points it has.
        """
        identity = {
            "format": FORMAT,
            "settings": json.loads(json.dumps(settings)),
            "digest": digest,
            "equipoise": version("equipoise"),
            "torch": torch.__version__,
        }
        name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
        kept = cls(
            folder / f"landscape-{name}.safetensors",
            identity,
            np.full(points, np.nan),
            np.zeros(points, np.int64),
            np.zeros(points, np.int64),
            np.zeros(points, bool),
        )
        if kept.file.exists():
            kept._read()
        return kept

    def _read(self) -> None:
        tensors, state = read_checkpoint(self.file)
        own = self._tensors()
        if state != self.identity or {name: one.shape for name, one in tensors.items()} != {
            name: one.shape for name, one in own.items()
        }:
            raise CheckpointError(self.file, "holds another landscape. Remove it")
        for name in own:
            getattr(self, name)[:] = tensors[name].numpy()

    def _tensors(self) -> dict[str, Tensor]:
        names = ("loss", "missed", "nonfinite", "done")
        return {name: torch.from_numpy(getattr(self, name)) for name in names}

    def add(self, chunk: np.ndarray, found: Sequence[PointLoss]) -> None:
        """Keep the losses of some points.

        Args:
            chunk: Their numbers.
            found: What was measured there.
        """
        self.loss[chunk], self.missed[chunk], self.nonfinite[chunk] = zip(*found, strict=True)
        self.done[chunk] = True
        write_checkpoint(self.file, self._tensors(), self.identity)
