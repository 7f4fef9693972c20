"""Tables in CSV files: features that are numbers or categories, and what is to be predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from equipoise.core import SettingError, require_flag
from equipoise.data.bounded_io import find_file
from equipoise.data.cell_text import parse_number
from equipoise.data.csv_file import CsvFile, open_csv
from equipoise.data.csv_text import SEPARATORS
from equipoise.data.dataset import Dataset, Task
from equipoise.data.encoding import CategoryColumn
from equipoise.data.errors import DataError
from equipoise.data.label_names import label_name, list_label_names
from equipoise.data.reader import DATASETS
from equipoise.data.table import TableReader

__all__ = ["CSV"]


@final
@DATASETS.register("csv")
@dataclass(frozen=True)
class CSV(TableReader):
    """Rows of features and a label, in `train.csv`, `val.csv` and `test.csv`.

    The folder may also be a single file, all of whose rows are training samples. The first row
    names the columns if it has a text above numbers (see `has_titles`); those of other files may
    then be in another order, and beside others. Labels are whole numbers or texts; if one is a
    text, all are. Classes are the different labels of the training file, numbers in their order and
    texts in that of the alphabet. With `targets`, the data are a regression. A column of features
    holds categories if no cell of the training file is a number.

    Args:
        classes: How many classes there are: labels that are numbers are then those of classes, from
            0 on. By default as many as there are different labels.
        label: The name of the label's column; by default it is the last one.
        targets: Names of columns of numbers to predict, in place of a label.
        columns: Names of the columns of features; by default all others.
        exclude: Names of columns to leave out.
        categories: Names of columns of features that hold categories though they look otherwise:
            numbers that only name something, dates, or texts of which there are many.
        header: Whether the first row names the columns, if that is not to be guessed.
        separator: What divides columns, if that is not to be guessed: ',', ';' or a tab.
        labels: The classes, if they are not those of the training file but of a trained model.
    """

    name = "csv"
    summary = "Tables with a column of labels or numbers to predict (train.csv, val.csv, test.csv)."

    label: str | None = None
    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    header: bool | None = None
    separator: str = ""
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.header is not None:
            require_flag("CSV.header", self.header)
        if self.separator not in ("", *SEPARATORS):
            raise SettingError("CSV.separator", "be ',', ';' or a tab", self.separator)
        for key in ("targets", "columns", "exclude", "categories", "labels"):
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
        for key in ("columns", "exclude", "categories"):
            both = [name for name in getattr(self, key) if name in (*self.targets, self.label)]
            if both:
                raise SettingError(f"CSV.{key}", "not name what is to be predicted", both[0])
        both = [name for name in self.exclude if name in (*self.columns, *self.categories)]
        if both:
            raise SettingError("CSV.exclude", "not name a column that is asked for", both[0])

    @classmethod
    def as_trained(cls, about: Dataset) -> dict[str, Any]:
        kinds = about.encoding.columns if about.encoding else ()
        titles = about.columns or [str(i + 1) for i in range(len(kinds))]
        categories = tuple(
            title
            for title, kind in zip(titles, kinds, strict=False)
            if isinstance(kind, CategoryColumn)
        )
        known = {} if about.task == "regression" else {"labels": about.classes}
        # Columns of one name are found where they were.
        columns = about.columns if len(set(about.columns)) == len(about.columns) else ()
        return {**known, "columns": columns, "categories": categories}

    def has(self, folder: Path, split: str) -> bool:
        return self._find(folder, split) is not None

    def read_raw(self, folder: Path, split: str) -> Dataset:
        path = self._find(folder, split)
        if path is None:
            raise self.missing(folder, f"{split}.csv")
        train = self._find(folder, "train")
        learnt = None if train in (None, path) else self._open(train)
        file = self._open(path, learnt)
        learnt = learnt or file
        wanted, kept = self._find_columns(file, learnt)
        if not kept:
            raise DataError(path, "must have a column of features beside what is to be predicted")
        categories, given = self._find_categories(kept, learnt)
        if file is learnt:
            for i in sorted(categories | (set() if self.targets else {*wanted})):
                file.warn_of_cases(i)
        values, raw = file.read_raw(kept, categories, given)
        columns = tuple(file.titles[i] for i in kept) if file.named else ()
        x = torch.from_numpy(values)
        if self.targets:
            y = torch.from_numpy(np.stack([file.numbers(i, complete=True) for i in wanted], axis=1))
            names = self.targets
        else:
            y, names = self._number(file, wanted[0], learnt)
        task: Task = "regression" if self.targets else "arrays"
        return Dataset(self.name, split, task, names, x.shape[1:], x, y, columns=columns, raw=raw)

    def _find(self, folder: Path, split: str) -> Path | None:
        """The file of a split; all of a single file is for training."""
        if folder.is_file():
            return folder if split == "train" else None
        return find_file(folder, f"{split}.csv")

    def _open(self, path: Path | None, learnt: CsvFile | None = None) -> CsvFile:
        assert path is not None  # whoever asks has found it
        known = learnt.titles if learnt and learnt.named else self.columns
        return open_csv(path, self.header, known, self.separator)

    def _find_columns(self, file: CsvFile, learnt: CsvFile) -> tuple[list[int], list[int]]:
        """Where a file has what is to be predicted, and its features in the training order."""
        excluded = {learnt.find(name) for name in self.exclude}
        predicted = [learnt.find(name) for name in self.targets] or [self._find_label(learnt)]
        others = [i for i in range(len(learnt.titles)) if i not in predicted and i not in excluded]
        features = [learnt.find(name) for name in self.columns] or others
        if not self.columns:
            for i in features:
                learnt.refuse_index(i)
        both = [i for i in features if i in predicted]
        if both:
            title = learnt.titles[both[0]]
            raise DataError(
                learnt.path,
                f"has its column {title!r} both as a feature and as the label; name the label's "
                "column with the option label=",
            )
        if not (file.named and learnt.named) or file.titles == learnt.titles:
            if len(file.titles) != len(learnt.titles):
                raise DataError(
                    file.path,
                    f"has {len(file.titles)} columns and {learnt.path.name} {len(learnt.titles)}; "
                    "columns can differ where both files name theirs in a first row",
                )
            return predicted, features
        names = [learnt.titles[i] for i in features]
        return [file.find(learnt.titles[i]) for i in predicted], [file.find(n) for n in names]

    def _find_label(self, file: CsvFile) -> int:
        return len(file.titles) - 1 if self.label is None else file.find(self.label)

    def _find_categories(self, kept: list[int], learnt: CsvFile) -> tuple[set[int], set[int]]:
        """Which of the columns that are kept hold categories, and which since the options say so.

        That is told by the training file.
        """
        _, features = self._find_columns(learnt, learnt)
        given = {learnt.find(name) for name in self.categories}
        strange = [learnt.titles[i] for i in given if i not in features]
        if strange:
            raise SettingError("CSV.categories", "name columns of features", strange[0])
        found = learnt.find_categories(features, given)
        pairs = list(zip(kept, features, strict=True))
        return {own for own, i in pairs if i in found}, {own for own, i in pairs if i in given}

    def _number(
        self, file: CsvFile, column: int, learnt: CsvFile
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The class of each row, and the names of all classes, those of the training file."""
        own = file.names(column)
        # A file of some classes of a trained model says nothing about the others.
        y = _positions(self.labels, own)
        if self.labels and -1 not in y:
            return torch.tensor(y), self.labels
        names = list_label_names({*learnt.names(self._find_label(learnt))} - {""})
        if not names:
            _require_labels(learnt, self._find_label(learnt))
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


def _require_labels(file: CsvFile, column: int) -> None:
    """Raise about the first cell of a column that is no whole number."""
    values = file.numbers(column, complete=True)
    number, row = file.rows[np.flatnonzero(values != np.round(values))[0]]
    remedy = f"; to predict numbers, name the column in targets: ['{file.titles[column]}']"
    raise DataError(
        file.path,
        f"row {number}, column {file.titles[column]!r} is {row[column]!r}; labels must be "
        f"whole numbers or texts{remedy if file.named else ''}",
    )
