"""The cells of CSV files: where columns are divided, which row names them, what they hold."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from equipoise.data.bounded_io import data_errors_of, read_file
from equipoise.data.cell_text import fold_truth, has_comma_number, is_missing, parse_number
from equipoise.data.csv_text import COMMAS, decode_csv, find_separator
from equipoise.data.encoding import RawTable
from equipoise.data.errors import DataError, TableWarning

__all__ = ["MAX_FLOAT", "CsvFile", "has_titles", "open_csv"]

MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_CATEGORIES = 100  # of a column that nobody says holds categories
# Titles of columns that number rows: id, row, index, customer_id, PassengerId, "Unnamed: 0".
INDEX = re.compile(r"|(?i:(.*[ _.-])?(id|index|row)|unnamed: ?\d+)|.*[a-z](Id|ID|Index)")
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([T ].*)?|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}( .*)?")
LIKE_NUMBER = re.compile(r"[-+$€£]?\s*\d[\d.,_' ]*\s*[%€$£]?")  # 1,5 and 1_000 and 12 %


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
        """Return the position of a column, by its name, or by its number if it has none."""
        if name not in self.titles and not self.named:
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

    def texts(self, column: int) -> list[str]:
        """Return the cells of a column, without spaces around them."""
        return [row[column].strip() for _, row in self.rows]

    def names(self, column: int) -> list[str]:
        """Return the cells of a column that name something, each name written in one way."""
        return [fold_truth(text) for text in self.texts(column)]

    def warn_of_cases(self, column: int) -> None:
        """Warn of names in a column that differ only in capitals.

        Args:
            column: Its position.
        """
        spellings: dict[str, list[str]] = {}
        for name in sorted(set(self.names(column))):
            spellings.setdefault(name.lower(), []).append(name)
        alike = [names for names in spellings.values() if len(names) > 1]
        if alike:
            names = " and ".join(map(repr, alike[0]))
            more = f" ({len(alike) - 1} more like them)" if len(alike) > 1 else ""
            warnings.warn(
                f"{self.path}: column {self.titles[column]!r} has {names}{more}, which count as "
                "different; write them alike if they are the same",
                TableWarning,
                stacklevel=5,
            )

    def read_raw(
        self,
        columns: Sequence[int],
        categories: Collection[int] = (),
        given: Collection[int] = (),
    ) -> tuple[NDArray[np.float64], RawTable]:
        """Return columns as numbers and numbers of categories, NaN if missing, (rows, columns).

        Args:
            columns: Their positions.
            categories: The positions of those that hold categories.
            given: Those of which somebody says so: any text in them is a category.
        """
        values = np.empty((len(self.rows), len(columns)))
        levels: list[tuple[str, ...]] = []
        for i, column in enumerate(columns):
            if column in categories:
                texts = self.names(column)
                unknown = {text for text in texts if column not in given and is_missing(text)}
                names = sorted({*texts} - unknown - {""})
                numbers = {name: float(number) for number, name in enumerate(names)}
                values[:, i] = [numbers.get(text, np.nan) for text in texts]
                levels.append(tuple(names))
            else:
                values[:, i] = self.numbers(column)
                levels.append(())
        titles = tuple(self.titles[i] for i in columns)
        rows = np.array([number for number, _ in self.rows], dtype=np.int64)
        return values, RawTable(self.path, titles, tuple(levels), rows)

    def numbers(self, column: int, *, complete: bool = False) -> NDArray[np.float64]:
        """Return a column of numbers, or raise about the first cell that is none.

        Args:
            column: Its position.
            complete: Whether missing ones are refused; they are NaN otherwise.
        """
        cells = self.texts(column)
        try:
            values = np.array(cells, dtype=np.float64)
        except ValueError:
            values = np.full(1, np.nan)  # the slow search below says where
        # Python reads 1_000 as a number.
        if (np.abs(values) <= MAX_FLOAT).all() and not any("_" in cell for cell in cells):
            return values
        values = np.full(len(cells), np.nan)
        for i, cell in enumerate(cells):
            value = parse_number(cell)
            if is_missing(cell) and not complete:
                continue
            if value is None or not abs(value) <= MAX_FLOAT:
                what = f"is {cell!r}, not a finite number in float32" if cell else "is missing"
                if has_comma_number(cell):
                    what = f"is {cell!r}, a number with a comma; {COMMAS}"
                number = self.rows[i][0]
                raise DataError(self.path, f"row {number}, column {self.titles[column]!r} {what}")
            values[i] = value
        return values

    def find_categories(self, columns: Sequence[int], given: Collection[int] = ()) -> set[int]:
        """Return which columns hold categories: texts that are no numbers in all their rows.

        Raises about texts that are hardly meant as categories, such as dates and names.

        Args:
            columns: The positions of columns of features.
            given: Those of which somebody says so.
        """
        return {i for i in columns if i in given or self._is_category(i)}

    def _is_category(self, column: int) -> bool:
        cells = self.names(column)
        present = [(i, cell) for i, cell in enumerate(cells) if not is_missing(cell)]
        if any(parse_number(cell) is not None for _, cell in present) or not present:
            return False  # a text among numbers is refused when they are read
        different = {cell for _, cell in present}
        title = self.titles[column]
        leave = f"leave the column out by the option exclude=[{title!r}]"
        keep = f"or name it in the option categories=[{title!r}]"
        for pattern, what in ((DATE, "a date"), (LIKE_NUMBER, "not a number as Python writes it")):
            if all(pattern.fullmatch(cell) for cell in different):
                row, cell = self.rows[present[0][0]][0], present[0][1]
                remedy = "turn it into a number beforehand"
                where = f"row {row}, column {title!r} is {cell!r}, {what}"
                raise DataError(self.path, f"{where}; {remedy}, {leave}, {keep}")
        if len(different) > MAX_CATEGORIES or (
            len(different) == len(present) and len(self.rows) > 1
        ):
            where = f"column {title!r} has {len(different)} different texts in {len(present)} rows"
            raise DataError(self.path, f"{where}, which are hardly categories; {leave}, {keep}")
        return True

    def refuse_index(self, column: int) -> None:
        """Raise if a column only counts the rows, as its title says, in any order and steps.

        Args:
            column: Its position.
        """
        title = self.titles[column]
        if not self.named or not INDEX.fullmatch(title) or len(self.rows) < 3:
            return
        parsed = [parse_number(cell) for cell in self.texts(column)]
        numbers = sorted(number for number in parsed if number is not None)
        steps = {after - before for before, after in pairwise(numbers)}
        if len(numbers) == len(parsed) and len(steps) == 1 and steps != {0}:
            step = steps.pop()
            how = f" in steps of {step:g}" if step != 1 else ""
            raise DataError(
                self.path,
                f"column {title!r} counts the rows{how}, which is no feature; leave it out by the "
                f"option exclude=[{title!r}], or keep it by naming all features in columns=",
            )


def open_csv(
    path: Path,
    header: bool | None = None,
    known: Collection[str] = (),
    separator: str = "",
    *,
    least: int = 2,
    unsure: bool | None = None,
) -> CsvFile:
    """Return the cells of a CSV file.

    Args:
        path: The file, as of `decode_csv`.
        header: Whether its first row names the columns; by default `has_titles` guesses.
        known: As of `has_titles`.
        separator: What divides columns; by default a comma, or a semicolon or a tab where the first
            row has no comma.
        least: How many columns there must be.
        unsure: What is taken for `header` where that cannot be told; `None` refuses the file.
    """
    content = read_file(path)
    with data_errors_of(path):
        text = decode_csv(path, content)
        separator = separator or find_separator(path, text)
        table = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        rows = tuple((i, tuple(row)) for i, row in enumerate(table, start=1) if row)
    if not rows:
        raise DataError(path, "is empty: it holds no samples")
    titles = tuple(cell.strip() for cell in rows[0][1])
    cells = [row for _, row in rows]
    if header is None and not set(known) & set(titles):
        wrong = [cell for cell in titles if has_comma_number(cell)]
        if wrong:  # no title of a column
            raise DataError(path, f"row {rows[0][0]} has {wrong[0]!r}, a number; {COMMAS}")
    named = _find_titles(path, cells, known, unsure) if header is None else header
    if named:
        rows = rows[1:]
    else:
        titles = tuple(str(i + 1) for i in range(len(titles)))
    if not rows or len(titles) < least:
        raise (
            DataError(path, "must have a column of features, one of labels, and a row of numbers")
            if least > 1
            else DataError(path, "holds no samples")
        )
    for number, row in rows:
        if len(row) != len(titles):
            halves = separator == "," and len(titles) < len(row) <= 2 * len(titles)
            more = f" (if its numbers have decimal commas, {COMMAS})" if halves else ""
            raise DataError(
                path, f"has {len(row)} columns in row {number}; {len(titles)} expected{more}"
            )
    return CsvFile(path, titles, named, rows)


def _find_titles(
    path: Path, rows: Sequence[Sequence[str]], known: Collection[str], unsure: bool | None
) -> bool:
    """As `has_titles`, telling or refusing what is a mere guess."""
    first = [cell.strip() for cell in rows[0]]
    named = has_titles(rows, known)
    if known and set(known) <= set(first):
        return True
    if named and _is_lone_label(rows):
        warnings.warn(
            f"{path}: its first row is taken for names of columns, since {first[-1]!r} is the "
            "only label that occurs once; data.options.header = false makes it a sample",
            TableWarning,
            stacklevel=5,
        )
    elif named is None and unsure is None:
        raise DataError(
            path,
            "has texts and numbers in its first row, so it cannot be told whether it names the "
            "columns; say so by the option header (data.options.header = true or false)",
        )
    return bool(unsure if named is None else named)


def has_titles(rows: Sequence[Sequence[str]], known: Collection[str] = ()) -> bool | None:
    """Return whether the first row of a table names its columns; `None` if that cannot be told.

    It does if it has a text above numbers. Where all that is below its texts are texts as well,
    it does not if one of its texts occurs again in its column; it does if it has nothing but texts,
    or if only the label is a text, and the only one that occurs once.

    Args:
        rows: The cells.
        known: Names that the first row has if it names columns, such as those of a training file.
    """
    first = [cell.strip() for cell in rows[0]]
    if known and set(known) <= set(first):
        return True
    texts = [i for i, cell in enumerate(first) if not is_missing(cell) and not _is_number(cell)]
    if not texts:
        return False
    only_texts = len(texts) == sum(bool(cell) for cell in first)
    if len(rows) == 1:
        return only_texts
    below = {i: [row[i].strip() for row in rows[1:] if len(row) > i] for i in texts}
    if any(_is_number(cell) for cells in below.values() for cell in cells):
        return True
    if texts == [len(first) - 1] and len(first) > 1:
        return _is_lone_label(rows)
    if any(first[i] in below[i] for i in texts):
        return False
    return only_texts or None


def _is_number(cell: str) -> bool:
    return parse_number(cell) is not None and not is_missing(cell)


def _is_lone_label(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the last cell of the first row is the only text there, and the only one seen once."""
    *others, last = (cell.strip() for cell in rows[0])
    counts = Counter(row[-1].strip() for row in rows if row)
    lone = [label for label, count in counts.items() if count == 1]
    numbers = all(_is_number(cell) for cell in others)
    texts = not any(_is_number(label) for label in counts)
    return numbers and texts and lone == [last] and len(counts) > 1
