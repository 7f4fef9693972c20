"""Tables in CSV files: features that are numbers, and a class or numbers to predict."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import SettingError
from equipoise.data.bounded_io import data_errors_of, find_file, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.label_names import label_name, list_label_names, parse_number
from equipoise.data.reader import DATASETS
from equipoise.data.table import MAX_FLOAT, TableReader

__all__ = ["CSV", "CsvFile", "has_titles", "open_csv"]


@final
@DATASETS.register("csv")
@dataclass(frozen=True)
class CSV(TableReader):
    """Rows of features and a label, in `train.csv`, `val.csv` and `test.csv`.

    The folder may also be a single file, all of whose rows are training samples. The first row
    names the columns if one of its cells is not a number; a text in the last column alone is taken
    for a label, if all labels are texts. Labels are whole numbers or texts; if one is a text, all
    are. Classes are the different labels of the training file, numbers in their order and texts in
    that of the alphabet. With `targets`, the data are a regression.

    Args:
        classes: How many classes there are: labels that are numbers are then those of classes, from
            0 on. By default as many as there are different labels.
        label: The name of the label's column; by default it is the last one.
        targets: Names of columns of numbers to predict, in place of a label.
        columns: Names of the columns of features; by default all others.
        labels: The classes, if they are not those of the training file but of a trained model.
    """

    name = "csv"
    summary = "Tables of numbers with a column of labels (train.csv, val.csv, test.csv)."

    label: str | None = None
    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("targets", "columns", "labels"):
            names, what = getattr(self, key), "class" if key == "labels" else "column"
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                plural = "classes" if key == "labels" else "columns"
                raise SettingError(f"CSV.{key}", f"be a list of names of {plural}", names)
            if len(set(names)) < len(names):
                raise SettingError(f"CSV.{key}", f"name each {what} once", list(names))
        if self.targets and (self.label is not None or self.classes is not None):
            raise SettingError(
                "CSV.targets",
                "be left out where there is a label",
                list(self.targets),
                "Targets are for regression, a label or classes for classification.",
            )
        both = [name for name in self.columns if name in (*self.targets, self.label)]
        if both:
            raise SettingError("CSV.columns", "not name what is to be predicted", both[0])

    @classmethod
    def as_trained(cls, about: Dataset) -> dict[str, Any]:
        return {} if about.task == "regression" else {"labels": about.classes}

    def has(self, folder: Path, split: str) -> bool:
        return self._find(folder, split) is not None

    def read(self, folder: Path, split: str) -> Dataset:
        path = self._find(folder, split)
        if path is None:
            raise self.missing(folder, f"{split}.csv")
        file = open_csv(path)
        wanted = [file.find(name) for name in self.targets] or [self._find_label(file)]
        kept = [file.find(name) for name in self.columns] or [
            i for i in range(len(file.titles)) if i not in wanted
        ]
        if not kept:
            raise DataError(path, "must have a column of features beside what is to be predicted")
        features = file.numbers(kept)
        columns = tuple(file.titles[i] for i in kept) if file.named else ()
        if self.targets:
            return Dataset(
                self.name,
                split,
                "regression",
                self.targets,
                features.shape[1:],
                torch.from_numpy(features),
                torch.from_numpy(file.numbers(wanted)),
                columns=columns,
            )
        train = self._find(folder, "train")
        learnt = file if train in (None, path) else open_csv(train)
        y, names = self._number(file, wanted[0], learnt)
        x = torch.from_numpy(features)
        return Dataset(self.name, split, "arrays", names, x.shape[1:], x, y, columns=columns)

    def _find(self, folder: Path, split: str) -> Path | None:
        """The file of a split; all of a single file is for training."""
        if folder.is_file():
            return folder if split == "train" else None
        return find_file(folder, f"{split}.csv")

    def _find_label(self, file: CsvFile) -> int:
        return len(file.titles) - 1 if self.label is None else file.find(self.label)

    def _number(
        self, file: CsvFile, column: int, learnt: CsvFile
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The class of each row, and the names of all classes, those of the training file."""
        own = file.texts(column)
        # A file of some classes of a trained model says nothing about the others.
        y = _positions(self.labels, own)
        if self.labels and -1 not in y:
            return torch.tensor(y), self.labels
        names = list_label_names({*learnt.texts(self._find_label(learnt))} - {""})
        if not names:
            learnt.require_labels(self._find_label(learnt))
        numeric = all(parse_number(name) is not None for name in names)
        if self.classes is not None and numeric:
            names = tuple(str(i) for i in range(self.classes))
        elif self.classes not in (None, len(names)):
            raise DataError(
                learnt.path,
                f"has {len(names)} different labels; the option classes says {self.classes}",
            )
        y = _positions(names, own)
        if -1 in y:
            row, label = file.rows[y.index(-1)][0], own[y.index(-1)]
            what = f"{label!r}, a label that the training file does not have"
            if self.classes is not None and numeric:
                what = f"{label!r}; labels must be 0 to {self.classes - 1}"
            raise DataError(
                file.path,
                f"row {row}, column {file.titles[column]!r} is {what if label else 'empty'}",
            )
        return torch.tensor(y), names


def _positions(names: tuple[str, ...], labels: list[str]) -> list[int]:
    """The class of each label, or -1: a text is written as its name, a number may be otherwise."""
    numbers = {name: i for i, name in enumerate(names)}
    return [numbers.get(label, numbers.get(label_name(label), -1)) for label in labels]


@dataclass(frozen=True)
class CsvFile:
    """The cells of a CSV file, all rows of one length.

    Attributes:
        path: The file.
        titles: Names of the columns; their numbers from 1 on if they have none.
        named: Whether the file names its columns.
        rows: The cells of each row, with the number of the row in the file.
    """

    path: Path
    titles: tuple[str, ...]
    named: bool
    rows: tuple[tuple[int, tuple[str, ...]], ...]

    def find(self, name: str) -> int:
        """Return the position of a column, by its name."""
        if not self.named:
            raise DataError(
                self.path, f"has no first row with names of columns, so none is called {name!r}"
            )
        if name not in self.titles:
            raise DataError(
                self.path, f"has no column {name!r}; its columns are {', '.join(self.titles[:20])}"
            )
        if self.titles.count(name) > 1:
            raise DataError(self.path, f"has several columns {name!r}")
        return self.titles.index(name)

    def numbers(self, columns: Sequence[int]) -> NDArray[np.float32]:
        """Return some columns as numbers, (rows, columns), or raise if one is none."""
        return self._values(columns).astype(np.float32)

    def _values(self, columns: Sequence[int]) -> NDArray[np.float64]:
        cells = [[row[i] for i in columns] for _, row in self.rows]
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = np.full((1, 1), np.nan)  # the slow search below says where
        # Python reads 1_000 as a number.
        if (np.abs(values) <= MAX_FLOAT).all() and not any("_" in "".join(row) for row in cells):
            return values
        for (number, _), row in zip(self.rows, cells, strict=True):
            for i, cell in zip(columns, row, strict=True):
                value = parse_number(cell)
                if value is None or not abs(value) <= MAX_FLOAT:
                    what = (
                        f"is {cell.strip()!r}, not a finite number in float32"
                        if cell.strip()
                        else "is missing"
                    )
                    raise DataError(self.path, f"row {number}, column {self.titles[i]!r} {what}")
        return values

    def texts(self, column: int) -> list[str]:
        """Return the cells of a column, without spaces around them."""
        return [row[column].strip() for _, row in self.rows]

    def require_labels(self, column: int) -> None:
        """Raise about the first cell of a column that is no whole number."""
        values = self._values([column])[:, 0]
        number, row = self.rows[np.flatnonzero(values != np.round(values))[0]]
        remedy = f"; to predict numbers, name the column in targets: ['{self.titles[column]}']"
        raise DataError(
            self.path,
            f"row {number}, column {self.titles[column]!r} is {row[column]!r}; labels must be "
            f"whole numbers or texts{remedy if self.named else ''}",
        )


def open_csv(path: Path) -> CsvFile:
    """Return the cells of a CSV file.

    Args:
        path: The file, in UTF-8.
    """
    content = read_file(path)
    with data_errors_of(path):
        text = content.decode("utf-8-sig")
        rows = tuple(
            (i, tuple(row))
            for i, row in enumerate(csv.reader(io.StringIO(text, newline="")), start=1)
            if row
        )
    if not rows:
        raise DataError(path, "is empty")
    titles, named = tuple(cell.strip() for cell in rows[0][1]), has_titles([row for _, row in rows])
    if named:
        rows = rows[1:]
    else:
        titles = tuple(str(i + 1) for i in range(len(titles)))
    if not rows or len(titles) < 2:
        raise DataError(path, "must have a column of features, one of labels, and a row of numbers")
    for number, row in rows:
        if len(row) != len(titles):
            raise DataError(path, f"has {len(row)} columns in row {number}; {len(titles)} expected")
    return CsvFile(path, titles, named, rows)


def has_titles(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row of a table names its columns.

    One of its cells is not a number then. If only the last one is not, it may be a label: it is if
    there is a label that is no number in every row.

    Args:
        rows: The cells.
    """
    texts = [bool(cell.strip()) and parse_number(cell) is None for cell in rows[0]]
    if sum(texts) == 1 and texts[-1] and len(texts) > 1:
        return any(not row or parse_number(row[-1]) is not None for row in rows)
    return any(texts)
