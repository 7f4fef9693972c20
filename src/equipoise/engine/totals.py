"""Everything that adds up over batches and over processes, as one vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.engine.solve_monitor import SolveMonitor, Tally, steps_and_status
from equipoise.engine.tasks import Score, Task

__all__ = ["Totals"]

LOSS, WEIGHT = 0, 1
FORWARD = slice(2, 2 + Tally.size)
BACKWARD = slice(2 + Tally.size, 2 + 2 * Tally.size)
SCORE = slice(2 + 2 * Tally.size, None)


class Totals:
    """Sums of losses, of solves and of a score.

    Args:
        task: Whose score.

    Attributes:
        vector: The sums, float64: adding the vectors of two processes is counting what both did.
    """

    def __init__(self, task: Task) -> None:
        self.score: Score = task.score()
        self.vector = torch.cat([torch.zeros(SCORE.start, dtype=torch.float64), self.score.sums()])

    def add(self, loss: float, weight: float, solves: SolveMonitor) -> None:
        """Take in a batch.

        Args:
            loss: Its mean loss.
            weight: What the mean was over.
            solves: What its solves did.
        """
        if weight:
            self.vector[LOSS] += loss * weight
        self.vector[WEIGHT] += weight
        self.vector[FORWARD] += solves.forward.sums
        self.vector[BACKWARD] += solves.backward.sums

    def add_score(self, score: Score) -> None:
        """Take in the score of a batch."""
        self.load(torch.cat([self.vector[: SCORE.start], self.vector[SCORE] + score.sums()]))

    def load(self, vector: Tensor) -> None:
        """Replace the sums."""
        self.vector = vector
        self.score.load(vector[SCORE])

    @property
    def failed(self) -> int:
        """How many solves of single samples, forward and backward, missed their tolerance."""
        return sum(
            int(self.vector[part][2:].sum()) for part in (FORWARD, BACKWARD)
        )  # after the steps and the converged ones

    def clear(self) -> None:
        """Forget everything."""
        self.load(torch.zeros_like(self.vector))

    def line(self) -> dict[str, Any]:
        """Return the means and counts, as they stand in a line of metrics."""
        weight = self.vector[WEIGHT].item()
        forward_steps, forward = steps_and_status(self.vector[FORWARD])
        backward_steps, backward = steps_and_status(self.vector[BACKWARD])
        return {
            "loss": self.vector[LOSS].item() / weight if weight else None,
            **self.score.compute(),
            "forward_steps": forward_steps,
            "backward_steps": backward_steps,
            "forward_status": forward,
            "backward_status": backward,
        }
