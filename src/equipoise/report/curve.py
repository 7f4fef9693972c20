"""Lines of metrics as curves: numbers that may be missing, runs of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["MIN_VALUE", "average", "numeric_keys", "read_column", "submapping", "thin", "to_number"]

# A plot of larger numbers would overflow, and of smaller ones underflow.
MAX_VALUE, MIN_VALUE = 1e100, 1e-100
NUMBERS = (int, float, np.integer, np.floating)
MAX_POINTS = 1000
MAX_MEANS = 120
MIN_POINTS_TO_AVERAGE = 40


def to_number(value: object) -> float:
    """Return a value as a float, NaN where it is not a number that can be drawn."""
    if type(value) is float:  # nearly always; the general test takes several times as long
        return value if -MAX_VALUE <= value <= MAX_VALUE else math.nan
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        return math.nan
    return float(value) if -MAX_VALUE <= value <= MAX_VALUE else math.nan


def submapping(line: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, an empty one where there is none."""
    value = line.get(key) if line is not None else None
    return value if isinstance(value, Mapping) else {}


def read_column(
    lines: Iterable[Mapping[str, Any]], key: str, split: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the lines that have a key, in order, and the values there.

    Values that are not finite become NaN. Where a step comes twice, because a run was resumed from
    a checkpoint, the later line counts.

    Args:
        lines: Lines of metrics.
        key: The name of the values.
        split: The split whose metrics have the key (`test`); empty for the line itself.
    """
    found = []
    for line in lines:
        values = submapping(line, split) if split else line
        if key in values:
            found.append((to_number(line.get("step")), to_number(values[key])))
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    table = table[np.isfinite(table[:, 0])][::-1]
    steps, last = np.unique(table[:, 0], return_index=True)
    return steps, table[last, 1]


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most 1000 points of a curve: the lowest and highest of each stretch."""
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
    """Return the means of equal stretches of ten or more points; nothing for a short curve."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < MIN_POINTS_TO_AVERAGE:
        return x[:0], y[:0]
    stretches = min(MAX_MEANS, len(x) // 10)
    mean_x, mean_y = (
        np.array([stretch.mean() for stretch in np.array_split(values, stretches)])
        for values in (x, y)
    )
    return mean_x, mean_y


def numeric_keys(lines: Sequence[Mapping[str, Any]], split: str = "") -> list[str]:
    """Return the names under which lines have a number at least once, in order of appearance."""
    found: dict[str, None] = {}
    for line in lines:
        for key, value in (submapping(line, split) if split else line).items():
            if key not in found and math.isfinite(to_number(value)):
                found[key] = None
    return list(found)
