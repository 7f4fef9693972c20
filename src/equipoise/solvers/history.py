"""The last residuals of each sample, which tell growth from standstill."""

from __future__ import annotations

import numpy as np

__all__ = ["History"]

MAX_HISTORY = 1000
"""Residuals of a sample kept at most."""
RISES = 5
"""Looks in succession at which the residual of a linear equation that diverges has risen."""


class History:
    """A ring of the residuals at the last looks.

    One array in place of one for each look: small blocks that outlive big ones would fragment the
    heap.

    Args:
        looks: How many looks back are asked for; at most 1,000 are kept.
        count: Number of rows.

    Attributes:
        recent: The residuals, shape (looks kept, rows), with NaN where there was no look.
        looks: Looks so far.
    """

    def __init__(self, looks: int, count: int) -> None:
        # np.full takes several times as long for a few numbers.
        self.recent: np.ndarray = np.empty((min(looks, MAX_HISTORY) + 1, count))
        self.recent.fill(np.nan)
        self.looks = 0

    @property
    def is_full(self) -> bool:
        """Whether the next look overwrites the first of a ring that is full."""
        return self.looks > 0 and self.looks % len(self.recent) == 0

    def add(self, residual: np.ndarray | list[float]) -> None:
        """Keep the residuals of one more look.

        Args:
            residual: One number for each row.
        """
        self.recent[self.looks % len(self.recent)] = residual
        self.looks += 1

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep only some of the rows.

        Args:
            rows: Their numbers.
        """
        self.recent = self.recent[:, rows]

    def rising(self) -> np.ndarray:
        """Return which residuals have risen at each of the last looks.

        The solution of a linear equation may be as far away as it likes, and so may a first step
        lead, where parts of the state have very different sizes; divergence is what goes on.
        """
        rises = min(RISES, len(self.recent) - 1)
        if self.looks <= rises:
            return np.zeros(self.recent.shape[1], dtype=bool)
        last = [(self.looks - 1 - k) % len(self.recent) for k in range(rises + 1)]
        rising: np.ndarray = np.all(np.diff(self.recent[last], axis=0) < 0, axis=0)
        return rising

    def growing(self, rows: np.ndarray, improved: int | np.ndarray) -> np.ndarray:
        """Return which of some rows have had rising residuals ever since these last fell.

        Rising means that the last third lies above the first.

        Args:
            rows: Which rows are asked for, a mask.
            improved: The look of each row's last real fall, or that of all.
        """
        growing = np.zeros(len(rows), dtype=bool)
        history = np.roll(self.recent, -(self.looks % len(self.recent)), axis=0)[-self.looks :]
        fell = np.broadcast_to(improved, growing.shape)
        for row in rows.nonzero()[0]:
            since = history[-(self.looks - int(fell[row]) + 1) :, row]
            third = max(len(since) // 3, 2)
            if len(since) >= 4 and np.isfinite(since).all():
                # The second test tells a slow climb from a cycle whose later values happen to be
                # high.
                growing[row] = (
                    since[-third:].min() > 1.01 * since[:third].max()
                    and since[-1] > 1.001 * since[-third]
                )
        return growing
