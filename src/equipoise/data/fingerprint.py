"""A short name for the content of a data set, by which a changed one is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, uint8

from equipoise.data.dataset import Dataset

__all__ = ["fingerprint"]

MAX_BYTES = 2**24  # of a tensor that is read whole; of a longer one, so many pieces are
PIECES, PIECE_BYTES = 1024, 4096
MAX_FILES = 100_000  # whose sizes are looked at
READ_FILES = 64  # of which some bytes are


def fingerprint(dataset: Dataset) -> str:
    """Return a checksum of the classes, the number of samples and a sample of their content.

    It takes no longer for large data sets: of long tensors it reads pieces, and of files their
    names, their sizes, and the beginnings and ends of some. So it finds data that were exchanged,
    lost, added or sorted anew, but not every changed byte. Where the data are kept does not matter.

    Args:
        dataset: The data set.
    """
    digest = hashlib.sha256(json.dumps([len(dataset), dataset.classes]).encode())
    for tensor in (dataset.x, dataset.y):
        if tensor is not None:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            for piece in _pieces(tensor):
                digest.update(piece)
    files = _spread(dataset.files, MAX_FILES)
    for sample in files:
        digest.update(json.dumps([_about(path) for path in sample]).encode())
    for sample in _spread(files, READ_FILES):
        for path in sample:
            digest.update(_ends(path))
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().data
    if len(content) <= MAX_BYTES:
        yield content
        return
    for number in range(PIECES):
        start = number * (len(content) - PIECE_BYTES) // (PIECES - 1)
        yield content[start : start + PIECE_BYTES]


def _spread(samples: tuple[tuple[Path, ...], ...], count: int) -> tuple[tuple[Path, ...], ...]:
    """Some of the samples, evenly spread."""
    return samples[:: max(1, -(-len(samples) // count))]


def _about(path: Path) -> list[object]:
    """The class, the name and the size of a file."""
    try:
        return [path.parent.name, path.name, path.stat().st_size]
    except OSError:  # whoever reads it will say so
        return [path.parent.name, path.name, None]


def _ends(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            start = file.read(PIECE_BYTES)
            file.seek(max(path.stat().st_size - PIECE_BYTES, 0))
            return start + file.read(PIECE_BYTES)
    except OSError:
        return b""
