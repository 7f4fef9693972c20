"""Features that give away what is to be predicted."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from equipoise.data.cell_text import parse_number
from equipoise.data.dataset import Dataset
from equipoise.data.encoding import RawTable
from equipoise.data.errors import TableWarning

__all__ = ["warn_of_leak"]

MIN_ROWS = 10  # fewer may agree by accident


def warn_of_leak(dataset: Dataset, raw: RawTable) -> None:
    """Warn if a column of features equals the label, or a number to predict, in all rows.

    Args:
        dataset: The training rows, not encoded yet.
        raw: What is known of them.
    """
    if dataset.x is None or dataset.y is None or len(dataset) < MIN_ROWS:
        return
    x, y = dataset.x.numpy(), dataset.y.numpy()
    for at in range(x.shape[1]):
        for name, target in _list_targets(dataset, y, raw.levels[at]):
            if np.array_equal(x[:, at], target) and target.min() < target.max():
                warnings.warn(
                    f"{raw.path}: column {raw.titles[at]!r} equals {name} in all {len(x)} training "
                    "rows; leave it out unless it is known when predictions are made",
                    TableWarning,
                    stacklevel=4,
                )


def _list_targets(
    dataset: Dataset, y: NDArray[np.generic], levels: tuple[str, ...]
) -> list[tuple[str, NDArray[np.float64]]]:
    """What is to be predicted, in the numbers that a column with these categories would have."""
    if dataset.task == "regression":
        named = zip(dataset.classes, y.T, strict=True)
        return [] if levels else [(repr(name), values.astype(np.float64)) for name, values in named]
    if levels:
        numbers = {name: float(i) for i, name in enumerate(levels)}
        values = [numbers.get(name) for name in dataset.classes]
    else:
        values = [parse_number(name) for name in dataset.classes]
    if y.ndim != 1 or any(value is None for value in values):
        return []
    return [("the label", np.array(values, dtype=np.float64)[y.astype(np.int64)])]
