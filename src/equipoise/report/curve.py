"""Lines of metrics as curves: numbers that may be missing, runs of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["MIN_VALUE", "average", "column", "inner", "keys", "number", "thin"]

MAX_VALUE, MIN_VALUE = 1e100, 1e-100
"""Beyond the first, numbers are as good as infinite, below the second as good as zero: plots of them would overflow."""
NUMBERS = (int, float, np.integer, np.floating)
MAX_POINTS = 1000
MAX_MEANS = 120
MIN_POINTS_TO_AVERAGE = 40


def number(value: object) -> float:
    """Return a value as a float, NaN where it is not a number to be drawn."""
    if (
        type(value) is float
    ):  # nearly all of a long run's; the general test takes several times as long
        return value if -MAX_VALUE <= value <= MAX_VALUE else math.nan
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        return math.nan
    return float(value) if -MAX_VALUE <= value <= MAX_VALUE else math.nan


def inner(line: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, an empty one where there is none."""
    value = line.get(key) if line is not None else None
    return value if isinstance(value, Mapping) else {}


def column(
    lines: Iterable[Mapping[str, Any]], key: str, part: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which lines have a key, in order, and the values there, NaN for those that are not finite.

    Where a step comes twice, because a run was taken up again from a checkpoint, the later line
    counts.

    Args:
        lines: Lines of metrics.
        key: The name of the values.
        part: The part of the line that has the key (`test`); the line itself if empty.
    """
    found = [
        (number(line.get("step")), number(values[key]))
        for line in lines
        if key in (values := inner(line, part) if part else line)
    ]
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table[:, 0])][::-1]
    steps, last = np.unique(table[:, 0], return_index=True)
    return steps, table[last, 1]


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most 1000 points of a curve with the lowest and the highest of each stretch, so that no spike is lost."""
    if len(x) <= MAX_POINTS:
        return x, y
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        values = y[stretch]
        if np.isfinite(values).any():
            kept += sorted({int(stretch[np.nanargmin(values)]), int(stretch[np.nanargmax(values)])})
        else:
            kept.append(int(stretch[0]))
    return x[kept], y[kept]


def average(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of equal stretches of a curve, of ten points or more each; nothing for a curve of a few points."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < MIN_POINTS_TO_AVERAGE:
        return x[:0], y[:0]
    stretches = min(MAX_MEANS, len(x) // 10)
    return tuple(
        np.array([part.mean() for part in np.array_split(values, stretches)]) for values in (x, y)
    )  # type: ignore[return-value]


def keys(lines: Sequence[Mapping[str, Any]], part: str = "") -> list[str]:
    """Return the names under which lines have at least one number, in the order of their first line."""
    found: dict[str, None] = {}
    for line in lines:
        for key, value in (inner(line, part) if part else line).items():
            if key not in found and math.isfinite(number(value)):
                found[key] = None
    return list(found)
