"""What all tables of numbers with labels have in common."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.core import require_count
from equipoise.data.bounded_io import check_labels
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import Reader

__all__ = ["MAX_FLOAT", "TableReader", "TableWarning", "warn_of_lost_digits"]

MAX_FLOAT = float(np.finfo(np.float32).max)
MAX_LOST = 1e-3  # of a column's standard deviation, by rounding to float32
# Classes, if nobody says how many: a stray label would make a list of names that fills the memory.
MAX_CLASSES = 100_000


class TableWarning(UserWarning):
    """A table is read in a way that may not be meant."""


@dataclass(frozen=True)
class TableReader(Reader):
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
            features: One row for each sample; bytes stay bytes, other numbers become float32.
            labels: Whole numbers.
            labels_path: The file of the labels, if it is another one.
            columns: Names of the features, if they have names.
        """
        labels_path = labels_path or path
        x = np.ascontiguousarray(
            features, dtype=np.uint8 if features.dtype == np.uint8 else np.float32
        )
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
            self.name,
            split,
            "arrays",
            names,
            x.shape[1:],
            torch.from_numpy(x.copy()),
            y,
            columns=columns,
        )


def warn_of_lost_digits(path: Path, values: NDArray[Any], titles: Sequence[str]) -> None:
    """Warn if rounding to float32 takes away much of what varies in a column.

    A column of seconds since 1970 is rounded to multiples of 128, say.

    Args:
        path: The file.
        values: Its numbers, (rows, columns).
        titles: Names of the columns.
    """
    if values.dtype != np.float64:
        return
    error = np.abs(values - values.astype(np.float32)).max(axis=0)
    scale = np.abs(values).max(axis=0)
    # Scaled, so that squares of large numbers stay finite.
    deviation = scale * np.std(values / np.where(scale > 0, scale, 1), axis=0)
    constant = values.max(axis=0) == values.min(axis=0)
    lost = np.flatnonzero(~constant & (error > MAX_LOST * deviation))
    if len(lost):
        column = lost[0]
        others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        warnings.warn(
            f"{path}: column {titles[column]!r}{others} varies by {deviation[column]:.3g} and is "
            f"rounded by up to {error[column]:.3g} in float32, in which tables are kept; subtract "
            "one number from it in all files beforehand",
            TableWarning,
            stacklevel=5,
        )
