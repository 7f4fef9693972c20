"""The fixed test samples of data that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["split_rows"]


def split_rows(labels: NDArray[Any], split: str) -> NDArray[np.int64]:
    """Return the rows of a split: a fifth of each class is for tests.

    Args:
        labels: The class of each row; all alike where there are none.
        split: `train` or `test`.
    """
    # the old generator, because its numbers are promised never to change
    random = np.random.RandomState(0)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test[members[: round(len(members) / 5)]] = True
    return np.flatnonzero(test if split == "test" else ~test)
