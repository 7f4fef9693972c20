"""How the columns of a table become numbers for a network, learnt from its training rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equipoise.data.cell_text import is_missing
from equipoise.data.errors import DataError, TableWarning
from equipoise.data.rounding import warn_of_lost_digits

__all__ = [
    "CategoryColumn",
    "Encoding",
    "Impute",
    "NumberColumn",
    "RawTable",
    "find_scale",
    "fit_encoding",
]

Impute = Literal["none", "mean", "median"]


@dataclass(frozen=True, eq=False)
class RawTable:
    """Where the values of a table come from, and what they stand for.

    Attributes:
        path: The file.
        titles: Names of the columns, or their numbers from 1 on.
        levels: The categories that the values of each column count; empty for a column of numbers.
        rows: The number of each row in its file.
    """

    path: Path
    titles: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]
    rows: NDArray[np.int64]

    def select_rows(self, index: NDArray[np.int64]) -> RawTable:
        """Return the table of some of the rows, in the order given."""
        return RawTable(self.path, self.titles, self.levels, self.rows[index])

    def error(self, row: int, column: int, reason: str) -> DataError:
        """Return an error about a cell.

        Args:
            row: The position of its row.
            column: The position of its column.
            reason: What is wrong with it.
        """
        place = f"row {self.rows[row]}, column {self.titles[column]!r}"
        return DataError(self.path, f"{place} {reason}")


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers, `(x - shift) / scale`.

    Args:
        shift: What is subtracted.
        scale: What is divided by. That of a column that does not vary in training is 0, and all its
            numbers become 0: the weights behind it were never trained.
        fill: What stands for a missing number; `None` refuses it.
    """

    shift: float = 0.0
    scale: float = 1.0
    fill: float | None = None

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1

    def encode(self, values: NDArray[np.float64], raw: RawTable, at: int) -> NDArray[np.float64]:
        """Return what a column becomes, (rows, width).

        Args:
            values: Its values, NaN where they are missing.
            raw: What is known of them.
            at: The position of the column.
        """
        missing = np.isnan(values)
        if raw.levels[at]:
            row = int(np.argmin(missing))
            cell = raw.levels[at][int(values[row])]
            raise raw.error(row, at, f"is {cell!r}, not a number as in training")
        if missing.any():
            if self.fill is None:
                raise _missing(raw, int(np.argmax(missing)), at)
            values = np.where(missing, self.fill, values)
        if not self.scale:
            return np.zeros((len(values), 1))
        found = (values - self.shift) / self.scale
        beyond = ~(np.abs(found) <= np.finfo(np.float32).max)
        if beyond.any():
            row = int(np.argmax(beyond))
            raise raw.error(row, at, f"is {values[row]:.6g}, not a finite number in float32")
        return found[:, None]


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories, of which each becomes a number that is 1 in its rows and else 0.

    `NA`, `?` and the like are missing, unless one of them is a category of the training rows.

    Args:
        categories: Those of the training rows, in the order of the alphabet.
        fill: The one that stands for a missing or another one; `None` refuses it.
    """

    categories: tuple[str, ...]
    fill: str | None = None

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return len(self.categories)

    def encode(self, values: NDArray[np.float64], raw: RawTable, at: int) -> NDArray[np.float64]:
        """Return what a column becomes, (rows, width); as of `NumberColumn.encode`."""
        levels = raw.levels[at]
        known = {name: i for i, name in enumerate(self.categories)}
        unknown = [i for i, name in enumerate(levels) if name not in known and is_missing(name)]
        missing = np.isnan(values) | np.isin(values, unknown)
        if not levels and not missing.all():
            row = int(np.argmin(missing))
            raise raw.error(
                row, at, f"is {values[row]:.6g}, a number; in training there were categories"
            )
        if missing.any() and self.fill is None:
            raise _missing(raw, int(np.argmax(missing)), at)
        place = np.array([known.get(level, -1) for level in levels] + [-1])
        codes = place[np.where(missing, len(levels), values).astype(np.int64)]
        unseen = (codes < 0) & ~missing
        if unseen.any():
            row = int(np.argmax(unseen))
            what = f"is {levels[int(values[row])]!r}, a category that the training rows do not have"
            if self.fill is None:
                remedy = "a run with data.impute counts it as missing"
                raise raw.error(row, at, f"{what}; {remedy}")
            others = int(unseen.sum()) - 1
            more = f" (and {others} more)" if others else ""
            warnings.warn(
                f"{raw.error(row, at, what)}{more}; {self.fill!r} stands for it",
                TableWarning,
                stacklevel=4,
            )
        if self.fill is not None:
            codes = np.where(codes < 0, known[self.fill], codes)
        found = np.zeros((len(values), self.width))
        found[np.arange(len(values)), codes] = 1
        return found


def _missing(raw: RawTable, row: int, column: int) -> DataError:
    return raw.error(
        row,
        column,
        "is missing; data.impute = 'mean' or 'median' fills such cells in by those of the training "
        "rows",
    )


@dataclass(frozen=True)
class Encoding:
    """What becomes of the columns of a table, and in what units numbers are predicted.

    Args:
        columns: What becomes of each feature.
        targets: The shift and the scale of each number to predict, if they are standardised.
    """

    columns: tuple[NumberColumn | CategoryColumn, ...]
    targets: tuple[NumberColumn, ...] = ()

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return sum(column.width for column in self.columns)

    def name_features(self, titles: Sequence[str]) -> tuple[str, ...]:
        """Return names of the numbers that a row becomes, `title` or `title=category`.

        Args:
            titles: Names of the columns; their numbers are used if there are none.
        """
        titles = titles or [str(i + 1) for i in range(len(self.columns))]
        names: list[str] = []
        for title, column in zip(titles, self.columns, strict=True):
            if isinstance(column, CategoryColumn):
                names += [f"{title}={category}" for category in column.categories]
            else:
                names.append(title)
        return tuple(names)

    def encode(self, values: NDArray[Any], raw: RawTable) -> NDArray[np.float32]:
        """Return rows as a network takes them, (rows, width).

        Args:
            values: The rows, (rows, columns): numbers, or numbers of categories; NaN if missing.
            raw: What is known of them.
        """
        if values.shape[1] != len(self.columns):
            raise DataError(
                raw.path,
                f"has {values.shape[1]} columns of features; the model was trained on "
                f"{len(self.columns)}",
            )
        found, start = np.empty((len(values), self.width), np.float32), 0
        for i, column in enumerate(self.columns):
            part = found[:, start : start + column.width]
            part[:] = column.encode(values[:, i].astype(np.float64), raw, i)
            start += column.width
        kept = [i for i, each in enumerate(self.columns) if _keeps_units(each)]
        warn_of_lost_digits(raw.path, values[:, kept], [raw.titles[i] for i in kept])
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "columns": [asdict(column) for column in self.columns],
            "targets": [asdict(column) for column in self.targets],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Encoding:
        """Return the encoding in plain values, or raise `ValueError`.

        Args:
            values: As of `to_dict`.
        """
        try:
            columns = tuple(_read_column(each) for each in values["columns"])
            targets = tuple(_read_number(each) for each in values["targets"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the encoding of its columns cannot be {values!r}") from error
        return cls(columns, targets)


def _keeps_units(column: NumberColumn | CategoryColumn) -> bool:
    return isinstance(column, NumberColumn) and (column.shift, column.scale) == (0, 1)


def _read_column(values: Mapping[str, Any]) -> NumberColumn | CategoryColumn:
    if "categories" not in values:
        return _read_number(values)
    names, fill = values["categories"], values["fill"]
    if not all(isinstance(name, str) for name in names) or not (fill is None or fill in names):
        raise ValueError(f"categories of its data cannot be {names!r}, filled by {fill!r}")
    return CategoryColumn(tuple(names), fill)


def _read_number(values: Mapping[str, Any]) -> NumberColumn:
    shift, scale, fill = (values[name] for name in ("shift", "scale", "fill"))
    for number in (shift, scale, 0.0 if fill is None else fill):
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"the scale of its columns cannot be {number!r}")
    return NumberColumn(float(shift), float(scale), None if fill is None else float(fill))


def fit_encoding(
    values: NDArray[Any],
    raw: RawTable,
    targets: NDArray[np.float64] | None = None,
    *,
    standardize: bool = False,
    impute: Impute = "none",
) -> Encoding:
    """Learn what becomes of the columns of a table.

    Sums are rounded once, so that the result does not depend on the machine.

    Args:
        values: The training rows, as of `Encoding.encode`.
        raw: What is known of them.
        targets: Numbers to predict, (rows, numbers), if there are any.
        standardize: Whether numbers are brought to mean 0 and deviation 1.
        impute: What stands for missing cells: the mean or the median of a column of numbers, the
            most frequent one of categories; `none` refuses them.
    """
    columns = tuple(
        _fit_column(values[:, i].astype(np.float64), raw, i, standardize, impute)
        for i in range(values.shape[1])
    )
    if targets is None or not standardize:
        return Encoding(columns)
    found = (find_scale(targets[:, i]) for i in range(targets.shape[1]))
    return Encoding(columns, tuple(NumberColumn(mean, std or 1.0) for mean, std in found))


def _fit_column(
    values: NDArray[np.float64], raw: RawTable, at: int, standardize: bool, impute: Impute
) -> NumberColumn | CategoryColumn:
    present, levels = values[~np.isnan(values)], raw.levels[at]
    if not len(present) and len(values):
        if impute == "none":
            raise _missing(raw, 0, at)
        reason = f"column {raw.titles[at]!r} has no value in any training row; leave it out"
        raise DataError(raw.path, reason)
    if levels:
        codes, counts = np.unique(present.astype(np.int64), return_counts=True)
        names = {levels[code]: int(count) for code, count in zip(codes, counts, strict=True)}
        frequent = max(sorted(names), key=lambda name: names[name])
        return CategoryColumn(tuple(sorted(names)), None if impute == "none" else frequent)
    mean, std = find_scale(present) if standardize or impute == "mean" else (0.0, 1.0)
    fill = {"none": None, "mean": mean, "median": float(np.median(present))}[impute]
    return NumberColumn(mean, std, fill) if standardize else NumberColumn(fill=fill)


def find_scale(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the standard deviation of numbers; that of a constant is 0.

    Args:
        values: The numbers, finite.
    """
    mean = math.fsum(values.tolist()) / max(len(values), 1)
    deviation = values - mean
    spread = float(np.abs(deviation).max(initial=0.0))
    # What rounding leaves of a constant is no spread.
    if spread <= 8 * np.finfo(np.float64).eps * abs(mean):
        return mean, 0.0
    # Scaled, so that squares of tiny numbers are not 0.
    return mean, spread * math.sqrt(math.fsum(((deviation / spread) ** 2).tolist()) / len(values))
