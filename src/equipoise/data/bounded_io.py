"""Bytes from files that nobody has looked at: bounded in memory, and every failure a `DataError` that names the file."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.errors import DataError

__all__ = [
    "DEFLATE",
    "LIMIT",
    "check_labels",
    "fill",
    "first",
    "open_file",
    "read_file",
    "reading",
    "require_room",
    "volume",
]

LIMIT = (
    2**32
)  # bytes that one file may hold when unpacked; the largest published one (SVHN's extra part) holds 1.6 GB
DEFLATE = 1040  # deflate cannot make data smaller by more than 1032 : 1


Stream = BufferedReader | gzip.GzipFile


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn whatever a parser raises within a `with` block into a `DataError` about `path`."""
    try:
        yield
    except (DataError, ImportError):
        raise
    except EOFError as error:
        raise DataError(path, "is truncated") from error
    except zlib.error as error:
        raise DataError(path, f"holds damaged compressed data ({error})") from error
    except MemoryError as error:
        raise DataError(path, "declares more data than fits in memory") from error
    except Exception as error:  # parsers of strangers' bytes raise anything: struct.error, SyntaxError, KeyError, ...
        raise DataError(path, f"cannot be read ({str(error) or type(error).__name__})") from error


def first(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that exists."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


@contextmanager
def open_file(path: Path) -> Iterator[Stream]:
    """Open a file for reading, unpacked if its name ends in `.gz`."""
    with reading(path), path.open("rb") as raw:
        if path.suffix != ".gz":
            yield raw
            return
        start = raw.read(64)
        raw.seek(0)
        if start[:2] != b"\x1f\x8b":
            what = "a web page, not" if start.lstrip()[:1] == b"<" else "not"
            raise DataError(path, f"is {what} gzip data; download it again")
        with gzip.open(raw) as stream:
            yield stream


def require_room(path: Path | str, need: int, stored: int, *, packed: bool) -> None:
    """Raise if a header declares more bytes than `stored` bytes of a file can hold, before anything is allocated."""
    if need > (stored * DEFLATE if packed else stored):
        raise DataError(
            path, f"is truncated: its header declares {need} bytes, more than the file can hold"
        )
    if need > LIMIT:
        raise DataError(path, f"declares {need} bytes; the limit is {LIMIT}")


def fill(path: Path | str, stream: Stream, need: int) -> NDArray[np.uint8]:
    """Read exactly `need` bytes into a new array."""
    array = np.empty(need, dtype=np.uint8)
    view, done = memoryview(array.data), 0
    while done < need:
        got = stream.readinto(view[done:])
        if not got:
            raise DataError(path, f"is truncated: {need} bytes expected, {done} found")
        done += got
    return array


def read_file(path: Path) -> bytes:
    """Return all bytes of a file that is not packed."""
    with reading(path):
        size = path.stat().st_size
        require_room(path, size, size, packed=False)
        return path.read_bytes()


def check_labels(
    path: Path | str, labels: NDArray[Any] | Sequence[int], count: int, rows: int | None = None
) -> Tensor:
    """Return labels as int64 if they are as many as there are samples and all lie in `0 ... count - 1`.

    Args:
        path: Where they come from.
        labels: Whole numbers.
        count: How many classes there are.
        rows: How many samples there are, if that is known from elsewhere.
    """
    values = np.asarray(labels, dtype=np.int64).ravel()
    if not len(values):
        raise DataError(path, "holds no samples")
    if rows is not None and len(values) != rows:
        raise DataError(path, f"holds {len(values)} labels for {rows} samples")
    wrong = np.flatnonzero((values < 0) | (values >= count))
    if len(wrong):
        raise DataError(
            path,
            f"has label {values[wrong[0]]} in row {wrong[0] + 1}; labels must be 0 to {count - 1}",
        )
    return torch.from_numpy(values.copy())


def volume(shape: Sequence[int]) -> int:
    """Return the number of entries of an array, exactly however large."""
    return math.prod(int(n) for n in shape)
