"""Arrays with labels in NumPy's own formats."""

from __future__ import annotations

import io
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import SettingError, require_flag
from equipoise.data.bounded_io import (
    check_member,
    count_entries,
    data_errors_of,
    find_file,
    require_room,
)
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.image_depth import ImageWarning
from equipoise.data.reader import DATASETS
from equipoise.data.table import MAX_FLOAT, TableReader, make_raw

__all__ = ["NPY", "NPZ", "read_npy"]


@dataclass(frozen=True)
class NumpyReader(TableReader):
    """Reads arrays of samples and of labels, or of numbers to predict."""

    targets: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_flag(f"{type(self).__name__}.targets", self.targets)
        if self.targets and self.classes is not None:
            rule = "be left out where targets are numbers"
            raise SettingError(f"{type(self).__name__}.classes", rule, self.classes)

    def _make(self, split: str, paths: list[Path], arrays: list[NDArray[Any]]) -> Dataset:
        """The data set of the samples and the labels or targets in two files, or in one."""
        x = _features(paths[0], arrays[0], or_missing=arrays[0].ndim == 2)
        if x.ndim == 4 and x.dtype.kind in "iu" and x.dtype != np.uint8:
            warnings.warn(
                f"{paths[0]}: holds images of {x.dtype}, which are taken as they are; image files, "
                "and images of uint8, become numbers from 0 to 1",
                ImageWarning,
                stacklevel=2,
            )
        if not self.targets:
            labels = _labels(paths[1], arrays[1])
            return self.make_dataset(split, paths[0], x, labels, labels_path=paths[1])
        y = _features(paths[1], arrays[1])
        if y.ndim > 2 or len(y) != len(x):
            raise DataError(
                paths[1],
                f"must hold one or more numbers for each of {len(x)} rows; got shape {y.shape}",
            )
        targets = torch.from_numpy(y.reshape(len(y), -1).astype(np.float64))
        count = targets.shape[1]
        samples, raw = make_raw(paths[0], x)
        return Dataset(
            self.name,
            split,
            "regression",
            tuple(f"y{i}" for i in range(count)) if count > 1 else ("y",),
            x.shape[1:],
            samples,
            targets if raw else targets.float(),
            raw=raw,
        )


@final
@DATASETS.register("npz")
@dataclass(frozen=True)
class NPZ(NumpyReader):
    """Arrays in `train.npz`, `val.npz`, `test.npz`, one sample in each row.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
        targets: Whether y holds numbers to predict, one or several for each row, and no labels; the
            task is then a regression.
        features: The name of the array of samples; bytes stay bytes.
        labels: The name of the array of labels or targets.
    """

    name = "npz"
    summary = "NumPy archives with arrays x and y (train.npz, val.npz, test.npz)."

    features: str = "x"
    labels: str = "y"

    def has(self, folder: Path, split: str) -> bool:
        return (folder / f"{split}.npz").is_file()

    def read_raw(self, folder: Path, split: str) -> Dataset:
        path = find_file(folder, f"{split}.npz")
        if path is None:
            raise self.missing(folder, f"{split}.npz")
        with data_errors_of(path), zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
            for member in members:
                check_member(path, member)
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
        return self._make(split, [path, path], arrays)


@final
@DATASETS.register("npy")
@dataclass(frozen=True)
class NPY(NumpyReader):
    """Arrays in `train_x.npy` and `train_y.npy`, and so on, one sample in each row.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
        targets: Whether y holds numbers to predict, one or several for each row, and no labels; the
            task is then a regression.
    """

    name = "npy"
    summary = "NumPy arrays (train_x.npy and train_y.npy, and so on)."

    def has(self, folder: Path, split: str) -> bool:
        return (folder / f"{split}_x.npy").is_file()

    def read_raw(self, folder: Path, split: str) -> Dataset:
        paths = [folder / f"{split}_{key}.npy" for key in "xy"]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise self.missing(folder, *absent)
        arrays = []
        for path in paths:
            with data_errors_of(path), path.open("rb") as stream:
                arrays.append(read_npy(path, stream, path.stat().st_size))
        return self._make(split, paths, arrays)


def read_npy(path: Path, stream: IO[bytes], size: int) -> NDArray[Any]:
    """Return an array in NumPy's format, if it holds numbers and is as long as its header says.

    Args:
        path: The file that it comes from, for messages.
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
    # It is parsed as Python, and what is raised may show objects with their addresses.
    except Exception as error:
        raise DataError(path, "cannot be read: its header is damaged") from error
    if dtype.kind not in "biuf":
        raise DataError(
            path,
            f"holds {'Python objects, which could run code' if dtype.hasobject else dtype}; "
            "it must hold numbers",
        )
    need = count_entries(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or need != size - header.tell():
        raise DataError(path, f"is truncated: {need} bytes expected, {size - header.tell()} found")
    body = start[header.tell() :] + stream.read(size - len(start))
    if len(body) != need:
        raise DataError(path, f"is truncated: {need} bytes expected, {len(body)} found")
    return np.frombuffer(body, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _features(path: Path, values: NDArray[Any], *, or_missing: bool = False) -> NDArray[Any]:
    """Numbers that float32 can hold; where they may be missing, NaN says so."""
    if not values.ndim or not values.size:
        raise DataError(path, "holds no samples")
    if values.dtype == np.float16:  # in which the largest float32 is infinite
        values = values.astype(np.float32)
    wrong = (
        np.argwhere(~(np.abs(values) <= MAX_FLOAT) & ~(or_missing & np.isnan(values)))
        if values.dtype.kind == "f"
        else np.empty((0, values.ndim))
    )
    if len(wrong):
        row, *columns = (int(i) + 1 for i in wrong[0])
        raise DataError(
            path,
            f"row {row}, column {', '.join(map(str, columns)) or 1} is not a finite "
            "number in float32",
        )
    return values


def _labels(path: Path, values: NDArray[Any]) -> NDArray[np.int64]:
    if values.ndim != 1 and (values.ndim != 2 or values.shape[1] != 1):
        raise DataError(
            path,
            f"must hold one label for each row; got shape {values.shape} (numbers to predict need "
            "the option targets=true)",
        )
    flat = values.ravel()
    if flat.dtype.kind == "f":
        wrong = np.flatnonzero(
            ~np.isfinite(flat) | (flat != np.round(flat)) | (np.abs(flat) > 2**53)
        )
        if len(wrong):
            raise DataError(
                path,
                f"row {wrong[0] + 1} has label {flat[wrong[0]]}; labels must be whole numbers "
                "(numbers to predict need the option targets=true)",
            )
    if flat.dtype == np.uint64 and (flat > 2**53).any():
        raise DataError(path, f"has label {flat.max()}, which is out of range")
    return flat.astype(np.int64)
