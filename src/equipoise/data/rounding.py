"""What the columns of a table lose by rounding to float32."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equipoise.data.errors import TableWarning

__all__ = ["find_lost_digits", "warn_of_lost_digits"]

MAX_LOST = 1e-3  # of a column's standard deviation, by rounding to float32


def warn_of_lost_digits(path: Path, values: NDArray[Any], titles: Sequence[str]) -> None:
    """Warn if rounding to float32 takes away much of what varies in a column.

    A column of seconds since 1970 is rounded to multiples of 128, say.

    Args:
        path: The file.
        values: Its numbers, (rows, columns).
        titles: Names of the columns.
    """
    lost = find_lost_digits(values)
    if lost:
        column, (deviation, error) = next(iter(lost.items()))
        others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        warnings.warn(
            f"{path}: column {titles[column]!r}{others} varies by {deviation:.3g} and is "
            f"rounded by up to {error:.3g} in float32; data.standardize = true keeps its digits",
            TableWarning,
            stacklevel=5,
        )


def find_lost_digits(values: NDArray[Any]) -> dict[int, tuple[float, float]]:
    """Return columns of which float32 loses much, with their deviations and rounding errors.

    Args:
        values: Numbers, (rows, columns), NaN if missing.
    """
    lost = {}
    for i in range(values.shape[1]) if values.dtype == np.float64 else ():
        column = values[:, i][~np.isnan(values[:, i])]
        if not len(column) or column.min() == column.max():
            continue
        error = float(np.abs(column - column.astype(np.float32)).max())
        size = float(np.abs(column).max())
        # Scaled, so that squares of large numbers stay finite.
        deviation = size * float(np.std(column / size))
        if error > MAX_LOST * deviation:
            lost[i] = deviation, error
    return lost
