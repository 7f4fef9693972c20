"""Tables in CSV files: features that are numbers, and a class or numbers to predict."""

from __future__ import annotations

import csv
import io
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import SettingError, require_flag
from equipoise.data.bounded_io import data_errors_of, find_file, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.label_names import label_name, list_label_names, parse_number
from equipoise.data.reader import DATASETS
from equipoise.data.table import MAX_FLOAT, TableReader, TableWarning, warn_of_lost_digits

__all__ = ["CSV", "CsvFile", "has_titles", "open_csv"]


@final
@DATASETS.register("csv")
@dataclass(frozen=True)
class CSV(TableReader):
    """Rows of features and a label, in `train.csv`, `val.csv` and `test.csv`.

    The folder may also be a single file, all of whose rows are training samples. The first row
    names the columns if one of its cells is not a number (see `has_titles`); those of other files
    may then be in another order. Labels are whole numbers or texts; if one is a text, all
    are. Classes are the different labels of the training file, numbers in their order and texts in
    that of the alphabet. With `targets`, the data are a regression.

    Args:
        classes: How many classes there are: labels that are numbers are then those of classes, from
            0 on. By default as many as there are different labels.
        label: The name of the label's column; by default it is the last one.
        targets: Names of columns of numbers to predict, in place of a label.
        columns: Names of the columns of features; by default all others.
        header: Whether the first row names the columns, if that is not to be guessed.
        labels: The classes, if they are not those of the training file but of a trained model.
    """

    name = "csv"
    summary = "Tables of numbers with a column of labels (train.csv, val.csv, test.csv)."

    label: str | None = None
    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    header: bool | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.header is not None:
            require_flag("CSV.header", self.header)
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
        train = self._find(folder, "train")
        learnt = None if train in (None, path) else open_csv(train, self.header)
        file = open_csv(path, self.header, learnt.titles if learnt and learnt.named else ())
        learnt = learnt or file
        wanted, kept = self._find_columns(file, learnt)
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
        y, names = self._number(file, wanted[0], learnt)
        x = torch.from_numpy(features)
        return Dataset(self.name, split, "arrays", names, x.shape[1:], x, y, columns=columns)

    def _find(self, folder: Path, split: str) -> Path | None:
        """The file of a split; all of a single file is for training."""
        if folder.is_file():
            return folder if split == "train" else None
        return find_file(folder, f"{split}.csv")

    def _find_columns(self, file: CsvFile, learnt: CsvFile) -> tuple[list[int], list[int]]:
        """Where a file has what is to be predicted, and its features in the training order."""
        named = file.named and learnt.named and learnt.titles != file.titles
        predicted = self.targets
        if named and not predicted and learnt.titles[self._find_label(learnt)] in file.titles:
            predicted = (learnt.titles[self._find_label(learnt)],)
        wanted = [file.find(name) for name in predicted] or [self._find_label(file)]
        others = [i for i in range(len(file.titles)) if i not in wanted]
        names = self.columns
        if named and not names:
            features = [title for title in learnt.titles if title not in predicted]
            if len(set(features)) == len(features) and {*features} == {
                file.titles[i] for i in others
            }:
                names = tuple(features)
        kept = [file.find(name) for name in names] or others
        both = [i for i in kept if i in wanted]
        if both:
            title = file.titles[both[0]]
            raise DataError(
                file.path,
                f"has its column {title!r} both as a feature and as the label; name the label's "
                "column with the option label=",
            )
        return wanted, kept

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
        values = self._values(columns)
        warn_of_lost_digits(self.path, values, [self.titles[i] for i in columns])
        return values.astype(np.float32)

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


def open_csv(path: Path, header: bool | None = None, known: Collection[str] = ()) -> CsvFile:
    """Return the cells of a CSV file.

    Args:
        path: The file, in UTF-8.
        header: Whether its first row names the columns; by default `has_titles` guesses.
        known: As of `has_titles`.
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
    titles = tuple(cell.strip() for cell in rows[0][1])
    named = has_titles([row for _, row in rows], known) if header is None else header
    told = header is not None or (known and set(known) <= set(titles))
    if named and not told and _is_lone_label([row for _, row in rows]):
        warnings.warn(
            f"{path}: its first row is taken for names of columns, since {titles[-1]!r} is the "
            "only label that occurs once; data.options.header = false makes it a sample",
            TableWarning,
            stacklevel=4,
        )
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


def has_titles(rows: Sequence[Sequence[str]], known: Collection[str] = ()) -> bool:
    """Return whether the first row of a table names its columns.

    One of its cells is not a number then. If only the last one is not, it may be a label: it is if
    there is a label that is no number in every row, unless it is the only one that occurs once.

    Args:
        rows: The cells.
        known: Names that the first row has if it names columns, such as those of a training file.
    """
    first = [cell.strip() for cell in rows[0]]
    if known and set(known) <= set(first):
        return True
    texts = [bool(cell) and parse_number(cell) is None for cell in first]
    if sum(texts) == 1 and texts[-1] and len(texts) > 1:
        numbers = any(not row or parse_number(row[-1]) is not None for row in rows)
        return numbers or _is_lone_label(rows)
    return any(texts)


def _is_lone_label(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the last cell of the first row is the only text there, and the only one seen once."""
    *others, last = (cell.strip() for cell in rows[0])
    counts = Counter(row[-1].strip() for row in rows if row)
    lone = [label for label, count in counts.items() if count == 1]
    numbers = all(parse_number(cell) is not None for cell in others)
    texts = all(parse_number(label) is None for label in counts)
    return numbers and texts and lone == [last] and len(counts) > 1
