"""What all tables have in common: they are read as they are, and then encoded."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import SettingError, require_count
from equipoise.data.bounded_io import check_labels
from equipoise.data.csv_file import MAX_FLOAT
from equipoise.data.dataset import Dataset
from equipoise.data.encoding import (
    Encoding,
    Impute,
    RawTable,
    fit_encoding,
)
from equipoise.data.errors import DataError
from equipoise.data.leak import warn_of_leak
from equipoise.data.reader import Reader
from equipoise.data.rounding import find_lost_digits, warn_of_lost_digits

__all__ = [
    "MAX_FLOAT",
    "RawReader",
    "TableReader",
    "encode_dataset",
    "fit_dataset",
    "make_raw",
]

# Classes, if nobody says how many: a stray label would make a list of names that fills the memory.
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class RawReader(Reader):
    """Reads tables as they are: numbers in float64, NaN where they are missing, and categories."""

    @abstractmethod
    def read_raw(self, folder: Path, split: str) -> Dataset: ...

    def read(self, folder: Path, split: str) -> Dataset:
        raw = self.read_raw(folder, split)
        if raw.raw is None:
            return raw
        learnt = raw
        if split != "train" and any(raw.raw.levels) and self.has(folder, "train"):
            learnt = self.read_raw(folder, "train")
        return encode_dataset(raw, fit_dataset(learnt))


@dataclass(frozen=True)
class TableReader(RawReader):
    """Reads tables of numbers with labels.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
    """

    splits = ("train", "val", "test")
    scored = ("test", "val")
    needs_root = True

    classes: int | None = None

    def __post_init__(self) -> None:
        if self.classes is not None:
            require_count(f"{type(self).__name__}.classes", self.classes)

    def make_dataset(
        self,
        split: str,
        path: Path,
        features: NDArray[Any],
        labels: NDArray[Any],
        labels_path: Path | None = None,
        columns: tuple[str, ...] = (),
    ) -> Dataset:
        """Return features and labels as a data set.

        Args:
            split: The split.
            path: The file of the features.
            features: One row for each sample; as of `make_raw`.
            labels: Whole numbers.
            labels_path: The file of the labels, if it is another one.
            columns: Names of the features, if they have names.
        """
        labels_path = labels_path or path
        x, raw = make_raw(path, features, columns)
        count = self.classes
        if count is None:
            count = max(int(labels.max(initial=0)) + 1, 1)
            if count > MAX_CLASSES:
                raise DataError(
                    labels_path,
                    f"has label {count - 1}; labels above {MAX_CLASSES - 1} need the option "
                    "classes=",
                )
        y = check_labels(labels_path, labels, count, rows=len(x))
        absent = set(range(count)) - set(y.tolist())
        if absent and split == "train" and self.classes is None:
            raise DataError(
                labels_path,
                f"has labels up to {count - 1}, but none is {min(absent)}; number the classes from "
                f"0 on without gaps, or say how many there are by the option classes={count}",
            )
        names = tuple(str(i) for i in range(count))
        return Dataset(
            self.name, split, "arrays", names, x.shape[1:], x, y, columns=columns, raw=raw
        )


def make_raw(
    path: Path, features: NDArray[Any], columns: tuple[str, ...] = ()
) -> tuple[Tensor, RawTable | None]:
    """Return samples in an array, and what is known of them if they are rows of numbers.

    Args:
        path: Where they come from.
        features: The samples; bytes stay bytes, rows of other numbers stay as precise as they are,
            and all else becomes float32.
        columns: Names of the numbers of a row, if they have names.
    """
    if features.dtype == np.uint8 or features.ndim != 2:
        kind = np.uint8 if features.dtype == np.uint8 else np.float32
        return torch.from_numpy(np.array(features, dtype=kind, order="C")), None
    exact = np.float32 if features.dtype in (np.float16, np.float32) else np.float64
    x = torch.from_numpy(np.array(features, dtype=exact, order="C"))
    return x, _plain_table(path, x, columns)


def _plain_table(path: Path, x: Tensor, columns: tuple[str, ...]) -> RawTable:
    titles = columns or tuple(str(i + 1) for i in range(x.shape[1]))
    return RawTable(path, titles, ((),) * len(titles), np.arange(1, len(x) + 1))


def fit_dataset(
    dataset: Dataset, *, standardize: bool = False, impute: Impute = "none"
) -> Encoding | None:
    """Return what becomes of the columns of a table; `None` of data that need no encoding.

    Args:
        dataset: The training rows.
        standardize: As of `fit_encoding`.
        impute: As of `fit_encoding`.
    """
    asked = "standardize" if standardize else "impute" if impute != "none" else ""
    table = dataset.task in ("arrays", "regression") and len(dataset.shape) == 1
    if dataset.x is None or not table:
        if asked:
            raise SettingError(
                f"data.{asked}",
                "be for tables of features",
                standardize if asked == "standardize" else impute,
                got=f"samples of shape {dataset.shape} in {dataset.name!r}",
            )
        return None
    # Rows of floats from a reader of one's own are ready as they are.
    if dataset.raw is None and not asked and dataset.x.dtype != torch.uint8:
        return None
    raw = _about_rows(dataset, dataset.x)
    warn_of_leak(dataset, raw)
    y = dataset.y if dataset.task == "regression" else None
    return fit_encoding(
        dataset.x.numpy(),
        raw,
        None if y is None else y.double().numpy(),
        standardize=standardize,
        impute=impute,
    )


def encode_dataset(dataset: Dataset, encoding: Encoding | None) -> Dataset:
    """Return the rows of a table as a network takes them.

    Numbers to predict stay in their units: the task knows the scale in which they are learnt.

    Args:
        dataset: The table.
        encoding: What becomes of its columns; `None` leaves the data as they are.
    """
    if encoding is None or dataset.x is None:
        return dataset
    raw, y = _about_rows(dataset, dataset.x), dataset.y
    x = torch.from_numpy(encoding.encode(dataset.x.numpy(), raw))
    if dataset.task == "regression" and y is not None and y.dtype == torch.float64:
        if not encoding.targets:
            warn_of_lost_digits(raw.path, y.numpy(), dataset.classes)
        if not (encoding.targets and find_lost_digits(y.numpy())):
            y = y.float()
    return replace(dataset, x=x, y=y, shape=(encoding.width,), raw=None, encoding=encoding)


def _about_rows(dataset: Dataset, x: Tensor) -> RawTable:
    return dataset.raw or _plain_table(Path(dataset.name), x, dataset.columns)
