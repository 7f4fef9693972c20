"""A few samples on their way, in plain Python numbers."""

from __future__ import annotations

import numpy as np

from equipoise.solvers.protocol import Stop

__all__ = ["PROGRESS", "FewSamples"]

PROGRESS = 0.999
"""A residual has fallen if it is below this fraction of the best one so far."""


class FewSamples:
    """Follows a few samples in Python numbers, which are faster there than arrays.

    It knows the common case alone: every residual has fallen, and none has reached its target. Then
    `follow` keeps the numbers and says True. In any other case it changes nothing and says False,
    and the monitor takes the numbers back with `pop` and decides.

    Args:
        stop: The stopping rule.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.best: tuple[list[float], list[float]] | None = None

    def follow(
        self, residual: list[float], scale: list[float], mark: np.ndarray, guard: np.ndarray
    ) -> bool:
        """Return whether all samples are on their way.

        Args:
            residual: Their residuals now.
            scale: What these are relative to.
            mark: Their residuals before, if it has followed none since the last `pop`.
            guard: Residuals that may be small enough whatever the scale.
        """
        tolerance = self.stop.tolerance
        before = mark.tolist() if self.best is None else self.best[0]
        for now, unit, last, least in zip(residual, scale, before, guard.tolist(), strict=True):
            if not least + tolerance * unit < now < PROGRESS * last:
                return False
        self.best = residual, scale
        return True

    def fell(self, residual: list[float], mark: np.ndarray) -> bool:
        """Return whether all residuals have fallen; arguments as of `follow`."""
        before = mark.tolist() if self.best is None else self.best[0]
        return all(now < PROGRESS * last for now, last in zip(residual, before, strict=True))

    def pop(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the residuals and scales kept since the last call, if any; they are the best."""
        best, self.best = self.best, None
        return None if best is None else (np.array(best[0]), np.array(best[1]))
