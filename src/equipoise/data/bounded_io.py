"""Reading untrusted files: bounded in memory, and every failure a `DataError` with the path."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.errors import DataError

__all__ = [
    "MAX_BYTES",
    "MAX_DEFLATE_RATIO",
    "check_labels",
    "check_member",
    "count_entries",
    "data_errors_of",
    "find_file",
    "open_file",
    "read_exactly",
    "read_file",
    "require_room",
]

MAX_BYTES = 2**32  # of one file, unpacked; the largest published one (SVHN's extra set) has 1.6 GB
MAX_DEFLATE_RATIO = 1040  # deflate compresses by 1032 : 1 at most


Stream = BufferedReader | gzip.GzipFile


@contextmanager
def data_errors_of(path: Path | str) -> Iterator[None]:
    """Turn whatever is raised within a `with` block into a `DataError` about `path`."""
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
    # Parsers of untrusted bytes raise anything: struct.error, SyntaxError, KeyError, ...
    except Exception as error:
        raise DataError(path, f"cannot be read ({str(error) or type(error).__name__})") from error


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that exists."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


@contextmanager
def open_file(path: Path) -> Iterator[Stream]:
    """Open a file for reading, unpacked if its name ends in `.gz`."""
    with data_errors_of(path), path.open("rb") as raw:
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
    """Raise, before anything is allocated, if a file cannot hold what its header declares.

    Args:
        path: The file.
        need: Bytes that the header declares.
        stored: Bytes of the file.
        packed: Whether they are compressed.
    """
    if need > (stored * MAX_DEFLATE_RATIO if packed else stored):
        raise DataError(
            path, f"is truncated: its header declares {need} bytes, more than the file can hold"
        )
    if need > MAX_BYTES:
        raise DataError(path, f"declares {need} bytes; the limit is {MAX_BYTES}")


def read_exactly(path: Path | str, stream: Stream, need: int) -> NDArray[np.uint8]:
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
    """Return all bytes of a file."""
    with data_errors_of(path):
        size = path.stat().st_size
        require_room(path, size, size, packed=False)
        return path.read_bytes()


def check_member(path: Path | str, name: str) -> PurePosixPath:
    """Return the name of an archive's member, or raise if it points out of the archive."""
    member = PurePosixPath(name)
    if member.is_absolute() or ".." in member.parts or "\\" in name:
        raise DataError(path, f"has a member {name!r} that points out of the archive")
    return member


def check_labels(
    path: Path | str, labels: NDArray[Any] | Sequence[int], count: int, rows: int | None = None
) -> Tensor:
    """Return labels as int64, or raise unless there is one in `0 ... count - 1` for each sample.

    Args:
        path: The file that they come from.
        labels: Whole numbers.
        count: How many classes there are.
        rows: How many samples there are, if known.
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


def count_entries(shape: Sequence[int]) -> int:
    """Return the number of entries of an array, exact however large."""
    return math.prod(int(n) for n in shape)
