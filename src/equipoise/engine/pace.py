"""How long a run still takes, and times in words."""

from __future__ import annotations

import math
import time

__all__ = ["Pace", "describe_duration"]


class Pace:
    """Measures how long steps and evaluations take, to say how long the rest of a run will.

    Args:
        steps: Steps of the whole run.
        made: Steps that were made before.
        scored: Samples that are to be scored from now on.
        batch: Samples in each step.
    """

    def __init__(self, steps: int = 0, made: int = 0, scored: int = 0, batch: int = 1) -> None:
        self.steps, self.first, self.made = steps, made, made
        self.unscored, self.scored, self.batch = scored, 0, batch
        self.began = self.changed = time.monotonic()
        self.scoring = 0.0  # seconds
        self._under_way = 0  # samples that the present evaluation has scored

    def step(self, step: int) -> None:
        """Note that a step was made.

        Args:
            step: How many were made.
        """
        self.made, self.changed, self._under_way = step, time.monotonic(), 0

    def evaluate(self, done: int) -> None:
        """Note how far an evaluation is.

        Args:
            done: Samples that it has scored.
        """
        now, new = time.monotonic(), max(done - self._under_way, 0)
        if new:
            self.scoring += now - self.changed
            self.scored += new
            self.unscored = max(self.unscored - new, 0)
        self.changed, self._under_way = now, done

    def left(self) -> float | None:
        """Return the seconds that the run still takes; `None` if that is not known."""
        made = self.made - self.first
        if made <= 0:
            return None
        step = (self.changed - self.began - self.scoring) / made
        # Until one is measured, a sample counts half of what it costs in training.
        sample = self.scoring / self.scored if self.scored else step / self.batch / 2
        return step * (self.steps - self.made) + sample * self.unscored


def describe_duration(seconds: float | None) -> str:
    """Return a time in its largest units; nothing for one that is not known.

    Args:
        seconds: The time.
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )
