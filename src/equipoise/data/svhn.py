"""SVHN, and the MATLAB files (version 5) that it is published in."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.data.bounded_io import (
    check_labels,
    count_entries,
    data_errors_of,
    find_file,
    require_room,
)
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.fetch import Download
from equipoise.data.reader import DATASETS, Reader

__all__ = ["SVHN", "read_mat"]

_DTYPES = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
# Array classes double, single and the integers; the others are cells, structures, text, objects.
_NUMERIC = range(6, 16)
_MATRIX, _COMPRESSED = 14, 15
_CHUNK = 2**20


class _Element:
    """One top-level element, decompressed only as far as it is read."""

    def __init__(self, path: Path, content: memoryview, order: str, packed: bool) -> None:
        self.path, self.content, self.order, self.packed = path, content, order, packed
        self.rest = zlib.decompressobj() if packed else None
        self.position = 0

    def read(self, count: int) -> bytearray:
        """Return the next `count` bytes."""
        require_room(self.path, count, len(self.content), packed=self.packed)
        if self.rest is None:
            found = bytearray(self.content[self.position : self.position + count])
            self.position += count
        else:
            found = bytearray()
            while len(found) < count:
                chunk = self.rest.unconsumed_tail or self._next()
                piece = self.rest.decompress(chunk, count - len(found))
                if not piece and not chunk:
                    break
                found += piece
        if len(found) < count:
            raise DataError(self.path, f"is truncated: {count} bytes expected, {len(found)} found")
        return found

    def _next(self) -> memoryview:
        start, self.position = self.position, self.position + _CHUNK
        return self.content[start : self.position]

    def tag(self) -> tuple[int, int, bytearray | None]:
        """Return the type and size of the next field, and its bytes if the tag holds them."""
        head = self.read(8)
        kind, size = struct.unpack(f"{self.order}2I", head)
        if kind >> 16:
            return kind & 0xFFFF, min(kind >> 16, 4), head[4 : 4 + min(kind >> 16, 4)]
        return kind, size, None

    def field(self, limit: int) -> tuple[int, bytearray]:
        """Return the type and the bytes of the next field, which must be small."""
        kind, size, small = self.tag()
        if small is not None:
            return kind, small
        if size > limit:
            raise DataError(
                self.path, f"is not a plain array: a field of its header has {size} bytes"
            )
        return kind, self.read(size + -size % 8)[:size]


def read_mat(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Return some of the real arrays in a MATLAB file (MathWorks, *MAT-File Format*, version 5).

    Args:
        path: The file.
        names: Which arrays; a missing one is an error.
    """
    with data_errors_of(path):
        size = path.stat().st_size
        require_room(path, size, size, packed=False)
        content = memoryview(path.read_bytes())
        mark = bytes(content[126:128])
        if mark not in (b"IM", b"MI"):
            raise DataError(path, "is not a MATLAB file of version 5")
        order = "<" if mark == b"IM" else ">"
        position = 128
        found: dict[str, NDArray[Any]] = {}
        while position < size and len(found) < len(names):
            kind, length = struct.unpack(
                f"{order}2I", bytes(content[position : position + 8]).ljust(8)
            )
            position += 8
            if length > size - position:
                raise DataError(
                    path, f"is truncated: {length} bytes expected, {size - position} found"
                )
            body, position = content[position : position + length], position + length
            if kind in (_MATRIX, _COMPRESSED):
                element = _Element(path, body, order, kind == _COMPRESSED)
                if kind == _COMPRESSED and element.tag()[0] != _MATRIX:
                    continue
                found.update(_matrix(element, names))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(path, f"has no numeric array {absent[0]!r}")
    return found


def _matrix(element: _Element, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    flags = struct.unpack(f"{element.order}2I", element.field(8)[1])[0]
    dimensions = element.field(256)[1]
    name = element.field(256)[1].decode("latin1")
    if name not in names:
        return {}
    path = element.path
    if flags & 0xFF not in _NUMERIC or flags & 0x800:
        raise DataError(path, f"has an array {name!r} that is not of real numbers")
    shape = struct.unpack(f"{element.order}{len(dimensions) // 4}i", dimensions)
    kind, size, small = element.tag()
    if kind not in _DTYPES:
        raise DataError(path, f"has an array {name!r} of an unknown type {kind}")
    dtype = np.dtype(element.order + _DTYPES[kind])
    if min(shape) < 0 or count_entries(shape) * dtype.itemsize != size:
        raise DataError(
            path,
            f"has an array {name!r} whose shape {'x'.join(map(str, shape))} does not fit its "
            f"{size} bytes",
        )
    values = element.read(size) if small is None else small
    return {name: np.frombuffer(values, dtype=dtype).reshape(shape, order="F")}


def _published(split: str, digest: str, limit: int) -> tuple[Download, ...]:
    file = f"{split}_32x32.mat"
    return (
        Download(file, f"http://ufldl.stanford.edu/housenumbers/{file}", f"md5:{digest}", limit),
    )


@final
@DATASETS.register("svhn")
@dataclass(frozen=True)
class SVHN(Reader):
    """Digits of house numbers, 32 x 32 (Netzer et al., 2011): 73,257 to train, 26,032 to test."""

    name = "svhn"
    summary = "House numbers in streets, 73,257 + 26,032 colour images of 32 x 32 (MATLAB files)."
    downloads = {  # noqa: RUF012
        "train": _published("train", "e26dedcc434d2e4c54c9b2d4a06d8373", 200_000_000),
        "test": _published("test", "eb5a983be6a315427106f1b164d9cef3", 70_000_000),
    }

    def read(self, folder: Path, split: str) -> Dataset:
        path = find_file(folder, f"{split}_32x32.mat")
        if path is None:
            raise self.missing(folder, f"{split}_32x32.mat")
        arrays = read_mat(path, "X", "y")
        pixels, labels = arrays["X"], arrays["y"]
        if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
            raise DataError(
                path,
                "must hold X of shape 32x32x3xN in bytes; got "
                f"{'x'.join(map(str, pixels.shape))} of {pixels.dtype}",
            )
        if not np.isin(labels, np.arange(1, 11)).all():
            wrong = labels[~np.isin(labels, np.arange(1, 11))][0]
            raise DataError(
                path, f"has label {wrong}; labels must be 1 to 10, where 10 is the digit 0"
            )
        y = check_labels(path, labels.astype(np.int64) % 10, 10, rows=pixels.shape[3])
        x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
        return Dataset(self.name, split, "classification", tuple("0123456789"), (3, 32, 32), x, y)
