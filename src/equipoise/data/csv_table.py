"""Tables of numbers with labels in CSV files."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from equipoise.data.bounded_io import data_errors_of, find_file, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import DATASETS
from equipoise.data.table import MAX_FLOAT, TableReader

__all__ = ["CSV", "read_csv"]


@final
@DATASETS.register("csv")
@dataclass(frozen=True)
class CSV(TableReader):
    """Rows of features and a whole-number label, in `train.csv`, `val.csv` and `test.csv`.

    The folder may also be a single file, all of whose rows are training samples.

    The first row names the columns if one of its cells is not a number.

    Args:
        classes: How many classes there are; by default one more than the largest label of the
            split.
        label: The name of the label's column; by default it is the last one.
    """

    name = "csv"
    summary = "Tables of numbers with a column of labels (train.csv, val.csv, test.csv)."

    label: str | None = None

    def has(self, folder: Path, split: str) -> bool:
        return self._find(folder, split) is not None

    def _find(self, folder: Path, split: str) -> Path | None:
        """The file of a split; all of a single file is for training."""
        if folder.is_file():
            return folder if split == "train" else None
        return find_file(folder, f"{split}.csv")

    def read(self, folder: Path, split: str) -> Dataset:
        path = self._find(folder, split)
        if path is None:
            raise self.missing(folder, f"{split}.csv")
        features, labels, columns = read_csv(path, self.label)
        return self.make_dataset(split, path, features, labels, columns=columns)


def read_csv(
    path: Path, label: str | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[str, ...]]:
    """Return the features of a CSV file, (rows, columns - 1), its labels, and the features' names.

    There are no names in a file whose first row holds numbers.

    Args:
        path: The file, in UTF-8.
        label: The name of the label's column; by default it is the last one.
    """
    content = read_file(path)
    with data_errors_of(path):
        text = content.decode("utf-8-sig")
        rows = [
            (i, row)
            for i, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1)
            if row
        ]
    if not rows:
        raise DataError(path, "is empty")
    titles = [cell.strip() for cell in rows[0][1]]
    named = any(cell and _number(cell) is None for cell in titles)
    if named:
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
    column = len(titles) - 1 if label is None else titles.index(label)
    for number, row in rows:
        if len(row) != len(titles):
            raise DataError(path, f"has {len(row)} columns in row {number}; {len(titles)} expected")
    try:
        values = np.array([row for _, row in rows], dtype=np.float64)
    except ValueError:
        values = np.full((1, 1), np.nan)  # the slow search below says where
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
    labels = values[:, column]
    wrong = np.flatnonzero((labels != np.round(labels)) | (np.abs(labels) > 2**53))
    if len(wrong):
        number, row = rows[wrong[0]]
        raise DataError(
            path,
            f"row {number}, column {titles[column]!r} is {row[column]!r}; labels must be whole "
            "numbers",
        )
    features = np.delete(values, column, axis=1).astype(np.float32)
    columns = (*titles[:column], *titles[column + 1 :]) if named else ()
    return features, labels.astype(np.int64), columns


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
