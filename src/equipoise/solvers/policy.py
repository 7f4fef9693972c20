"""What happens when a solve ends: it is counted, listeners hear of it, and `on_failure` applies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Literal, get_args

from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.registry import choose
from equipoise.solvers.coupling import CheckSchedule
from equipoise.solvers.protocol import Solution, Status
from equipoise.solvers.remedy import Direction, find_remedy

__all__ = ["Direction", "Listener", "OnFailure", "SolveCounts", "SolveLog", "describe"]

OnFailure = Literal["raise", "warn", "ignore"]
Listener = Callable[[Direction, Solution], None]
"""Called with each solve that has ended, before `on_failure` applies."""
Remedy = Callable[[Solution, Status, Direction], str]
"""Says what to try after a failed solve, as the end of a sentence."""

VERB = {
    Status.MAX_STEPS: "did not converge",
    Status.STALLED: "stalled",
    Status.DIVERGED: "diverged",
    Status.NONFINITE: "met NaN or infinity",
}


def describe(solution: Solution, direction: Direction, remedy: Remedy = find_remedy) -> str:
    """Say in one sentence how a solve failed, with counts and the remedy for its worst failure.

    Empty if every sample converged.
    """
    counts = solution.counts()
    failed = [status for status in counts if status != Status.CONVERGED]
    if not failed:
        return ""
    total = solution.status.numel()
    what = " and ".join(f"{counts[status]} of {total} samples {VERB[status]}" for status in failed)
    worst = solution.residual[~solution.converged].max().item()
    steps = int(solution.steps.max())
    advice = remedy(solution, max(failed), direction)
    return f"{what} (worst relative residual {worst:.1e} after {steps} steps): {advice}."


class SolveCounts:
    """How the solves of one layer in one direction ended, and which failures it has warned about.

    Args:
        name: What is being solved, as the sentence begins.
        direction: In which direction.
        remedy: Says what to try after a failure.

    Attributes:
        solves: How many there were.
        failures: How many of them had a sample that did not converge.
        counts: Samples by status.
        checks: Which solves are checked for samples that depend on each other.
    """

    def __init__(self, name: str, direction: Direction, remedy: Remedy = find_remedy) -> None:
        self.name = name
        self.direction = direction
        self.remedy = remedy
        self.solves = 0
        self.failures = 0
        self.counts = dict.fromkeys(Status, 0)
        self.checks = CheckSchedule()
        self._next_warning = 1
        self._warned_of: set[Status] = set()

    def add(self, solution: Solution, on_failure: str) -> None:
        """Count a solve, and raise or warn if a sample of it failed.

        Warnings come with the first failure of each kind and then when their number has grown
        tenfold, so that training shows a few lines and never silence.
        """
        self.solves += 1
        if solution.all_converged:
            self.counts[Status.CONVERGED] += solution.status.numel()
            return
        self.failures += 1
        found = solution.counts()
        for status, count in found.items():
            self.counts[status] += count
        if on_failure == "ignore":
            return
        sentence = f"{self.name}: {describe(solution, self.direction, self.remedy)}"
        if on_failure == "raise":
            raise ConvergenceError(sentence)
        kinds = found.keys() - {Status.CONVERGED}
        if self.failures >= self._next_warning or not kinds <= self._warned_of:
            self._next_warning = 10 * self.failures
            self._warned_of |= kinds
            if self.failures > 1:
                sentence += f" This was failure {self.failures} in {self.solves} solves."
            warnings.warn(sentence, ConvergenceWarning, stacklevel=3)


class SolveLog:
    """What one layer knows of its solves; every solve that ends, forward or backward, comes here.

    Solves of several threads are counted one at a time. Copies and pickles keep the counts, and
    leave behind the last solution, which holds a whole batch, and the listeners.

    Args:
        on_failure: `raise`, `warn` or `ignore`.
        name: What is being solved, as sentences begin.
        remedy: Says what to try after a failure.

    Attributes:
        forward: Counts of the forward solves.
        backward: Counts of the adjoint solves.
        last: The last forward `Solution`, on state trees and detached; its `adjoint` is the last
            backward solve through it.
        listeners: Called with the direction and the `Solution` of each solve.
    """

    def __init__(self, on_failure: OnFailure, name: str, remedy: Remedy = find_remedy) -> None:
        choose("on_failure", on_failure, get_args(OnFailure))
        self.on_failure = on_failure
        self.forward = SolveCounts(name, "forward", remedy)
        self.backward = SolveCounts(f"{name}, backward solve", "backward", remedy)
        self.last: Solution | None = None
        self.listeners: list[Listener] = []
        self._lock = RLock()

    def add(
        self, direction: Direction, solution: Solution, on_failure: OnFailure | None = None
    ) -> None:
        """Tell the listeners of a solve that has ended, count it, and apply `on_failure`.

        Args:
            direction: Which solve it was.
            solution: How it ended.
            on_failure: The policy of this solve; by default the log's.
        """
        if direction == "forward":
            self.last = solution
        for listener in tuple(self.listeners):
            listener(direction, solution)
        counts = self.forward if direction == "forward" else self.backward
        with self._lock:
            counts.add(solution, on_failure or self.on_failure)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "last": None, "listeners": [], "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=RLock())

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Call `listener` with each solve while the context lasts."""
        self.listeners.append(listener)
        try:
            yield
        finally:
            self.listeners.remove(listener)
