"""Tables of numbers with labels: CSV files and NumPy's own."""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import require_count
from equipoise.data.bounded_io import check_labels, first, read_file, reading, require_room, volume
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import DATASETS, Reader

__all__ = ["CSV", "NPY", "NPZ", "read_csv", "read_npy"]

MAX_FLOAT = float(np.finfo(np.float32).max)
# Classes, if nobody says how many: a stray label would make a list of names that fills the memory.
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class _Table(Reader):
    splits = ("train", "val", "test")
    needs_root = True

    classes: int | None = None

    def __post_init__(self) -> None:
        if self.classes is not None:
            require_count(f"{type(self).__name__}.classes", self.classes)

    def _dataset(
        self,
        split: str,
        path: Path,
        features: NDArray[Any],
        labels: NDArray[Any],
        beside: Path | None = None,
    ) -> Dataset:
        beside = beside or path
        x = np.ascontiguousarray(
            features, dtype=np.uint8 if features.dtype == np.uint8 else np.float32
        )
        count = self.classes
        if count is None:
            count = max(int(labels.max(initial=0)) + 1, 1)
            if count > MAX_CLASSES:
                raise DataError(
                    beside,
                    f"has label {count - 1}; labels above {MAX_CLASSES - 1} must be announced "
                    "by classes=",
                )
        y = check_labels(beside, labels, count, rows=len(x))
        names = tuple(str(i) for i in range(count))
        return Dataset(
            self.name, split, "arrays", names, x.shape[1:], torch.from_numpy(x.copy()), y
        )


@final
@DATASETS.register("csv")
@dataclass(frozen=True)
class CSV(_Table):
    """Numbers in `train.csv`, `val.csv`, `test.csv`: one sample in each row, features and a whole number as its label.

    The first row may name the columns: it does if one of its cells is not a number.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
        label: The name of the label's column; by default it is the last one.
    """

    name = "csv"
    summary = "Tables of numbers with a column of labels (train.csv, val.csv, test.csv)."

    label: str | None = None

    def read(self, folder: Path, split: str) -> Dataset:
        path = first(folder, f"{split}.csv")
        if path is None:
            raise self.missing(folder, f"{split}.csv")
        features, labels = read_csv(path, self.label)
        return self._dataset(split, path, features, labels)


def read_csv(path: Path, label: str | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the features, shape (rows, columns - 1), and the labels of a CSV file.

    Args:
        path: The file, in UTF-8.
        label: The name of the label's column; by default it is the last one.
    """
    content = read_file(path)
    with reading(path):
        text = content.decode("utf-8-sig")
        rows = [
            (i, row)
            for i, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1)
            if row
        ]
    if not rows:
        raise DataError(path, "is empty")
    titles = [cell.strip() for cell in rows[0][1]]
    if any(cell and _number(cell) is None for cell in titles):
        rows = rows[1:]
    elif label is not None:
        raise DataError(
            path, f"has no first row with names of columns, so none is called {label!r}"
        )
    else:
        titles = [str(i + 1) for i in range(len(titles))]
    if label is not None and label not in titles:
        raise DataError(path, f"has no column {label!r}; its columns are {', '.join(titles[:20])}")
    if not rows or len(titles) < 2:
        raise DataError(path, "must have a column of features, one of labels, and a row of numbers")
    place = len(titles) - 1 if label is None else titles.index(label)
    for number, row in rows:
        if len(row) != len(titles):
            raise DataError(path, f"has {len(row)} columns in row {number}; {len(titles)} expected")
    try:
        values = np.array([row for _, row in rows], dtype=np.float64)
    except ValueError:
        values = np.full((1, 1), np.nan)  # the slow look below will say where
    if not (np.abs(values) <= MAX_FLOAT).all() or "_" in text:  # Python reads 1_000 as a number
        for number, row in rows:
            for title, cell in zip(titles, row, strict=True):
                value = _number(cell)
                if value is None or not abs(value) <= MAX_FLOAT:
                    what = (
                        f"is {cell.strip()!r}, not a finite number in float32"
                        if cell.strip()
                        else "is missing"
                    )
                    raise DataError(path, f"row {number}, column {title!r} {what}")
    labels = values[:, place]
    wrong = np.flatnonzero((labels != np.round(labels)) | (np.abs(labels) > 2**53))
    if len(wrong):
        number, row = rows[wrong[0]]
        raise DataError(
            path,
            f"row {number}, column {titles[place]!r} is {row[place]!r}; labels must be whole "
            "numbers",
        )
    return np.delete(values, place, axis=1).astype(np.float32), labels.astype(np.int64)


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


@final
@DATASETS.register("npz")
@dataclass(frozen=True)
class NPZ(_Table):
    """Arrays in `train.npz`, `val.npz`, `test.npz`, one sample in each row.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
        features: The name of the array of samples; bytes stay bytes, other numbers become float32.
        labels: The name of the array of labels.
    """

    name = "npz"
    summary = "NumPy archives with arrays x and y (train.npz, val.npz, test.npz)."

    features: str = "x"
    labels: str = "y"

    def read(self, folder: Path, split: str) -> Dataset:
        path = first(folder, f"{split}.npz")
        if path is None:
            raise self.missing(folder, f"{split}.npz")
        with reading(path), zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            for member in members:
                name = PurePosixPath(member)
                if name.is_absolute() or ".." in name.parts or "\\" in member:
                    raise DataError(path, f"has a member {member!r} that points out of the archive")
            arrays = []
            for key in (self.features, self.labels):
                found = members.get(f"{key}.npy")
                if found is None:
                    raise DataError(
                        path, f"has no array {key!r}; it has {', '.join(sorted(members)) or 'none'}"
                    )
                require_room(path, found.file_size, path.stat().st_size, packed=True)
                with archive.open(found) as stream:
                    arrays.append(read_npy(path, stream, found.file_size))
        return self._dataset(split, path, _features(path, arrays[0]), _labels(path, arrays[1]))


@final
@DATASETS.register("npy")
@dataclass(frozen=True)
class NPY(_Table):
    """Arrays in `train_x.npy` and `train_y.npy`, and so on, one sample in each row.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
    """

    name = "npy"
    summary = "NumPy arrays (train_x.npy and train_y.npy, and so on)."

    def read(self, folder: Path, split: str) -> Dataset:
        paths = [folder / f"{split}_{key}.npy" for key in "xy"]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise self.missing(folder, *absent)
        arrays = []
        for path in paths:
            with reading(path), path.open("rb") as stream:
                arrays.append(read_npy(path, stream, path.stat().st_size))
        return self._dataset(
            split,
            paths[0],
            _features(paths[0], arrays[0]),
            _labels(paths[1], arrays[1]),
            beside=paths[1],
        )


def read_npy(path: Path, stream: IO[bytes], size: int) -> NDArray[Any]:
    """Return an array in NumPy's format, if it holds numbers and is as long as its header says.

    Args:
        path: Where it comes from, for messages.
        stream: The bytes.
        size: How many there are.
    """
    start = stream.read(min(size, 2**14))
    header = io.BytesIO(start)
    if start[:6] != b"\x93NUMPY":
        raise DataError(path, "is not an array in NumPy's format")
    version = np.lib.format.read_magic(header)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise DataError(
            path,
            f"is in version {version[0]}.{version[1]} of NumPy's format; 1.0 and 2.0 are known",
        )
    try:
        shape, fortran, dtype = readers[version](header)
    except (
        Exception
    ) as error:  # it is parsed as Python, and what is raised may show objects with their addresses
        raise DataError(path, "cannot be read: its header is damaged") from error
    if dtype.kind not in "biuf":
        raise DataError(
            path,
            f"holds {'Python objects, which could run code' if dtype.hasobject else dtype}; "
            "it must hold numbers",
        )
    need = volume(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or need != size - header.tell():
        raise DataError(path, f"is truncated: {need} bytes expected, {size - header.tell()} found")
    body = start[header.tell() :] + stream.read(size - len(start))
    if len(body) != need:
        raise DataError(path, f"is truncated: {need} bytes expected, {len(body)} found")
    return np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _features(path: Path, values: NDArray[Any]) -> NDArray[Any]:
    if not values.ndim or not values.size:
        raise DataError(path, "holds no samples")
    wrong = (
        np.argwhere(~(np.abs(values) <= MAX_FLOAT))
        if values.dtype.kind == "f"
        else np.empty((0, values.ndim))
    )
    if len(wrong):
        place = [int(i) + 1 for i in wrong[0]]
        raise DataError(
            path,
            f"row {place[0]}, column {', '.join(map(str, place[1:])) or 1} is not a finite "
            "number in float32",
        )
    return values


def _labels(path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
    if values.ndim != 1 and (values.ndim != 2 or values.shape[1] != 1):
        raise DataError(path, f"must hold one label for each row; got shape {values.shape}")
    flat = values.ravel()
    if flat.dtype.kind == "f":
        wrong = np.flatnonzero(
            ~np.isfinite(flat) | (flat != np.round(flat)) | (np.abs(flat) > 2**53)
        )
        if len(wrong):
            raise DataError(
                path, f"row {wrong[0] + 1} has label {flat[wrong[0]]}; labels must be whole numbers"
            )
    if flat.dtype == np.uint64 and (flat > 2**53).any():
        raise DataError(path, f"has label {flat.max()}, which is out of range")
    return flat.astype(np.int64)
