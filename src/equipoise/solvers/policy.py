"""What happens when a solve fails: an error, a warning that does not repeat for each batch, or only a count."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal, get_args

import torch

from equipoise.core.errors import ConvergenceError, ConvergenceWarning
from equipoise.core.registry import choose
from equipoise.solvers.protocol import Solution, Status, Stop

__all__ = ["FailurePolicy", "OnFailure", "describe"]

OnFailure = Literal["raise", "warn", "ignore"]

REMEDY = {
    Status.MAX_STEPS: "raise max_steps, loosen tolerance, or try solver 'newton'",
    Status.STALLED: (
        "try solver 'fixed_point' or 'broyden', add damping, loosen tolerance, "
        "and see that the step is not random"
    ),
    Status.DIVERGED: (
        "bound the norm of the cell's Jacobian below 1, or try solver 'anderson' or 'newton'"
    ),
    Status.NONFINITE: (
        "look for NaN or infinity in the input and the weights, bound the "
        "cell's growth, or lower the learning rate"
    ),
}
VERB = {
    Status.MAX_STEPS: "did not converge",
    Status.STALLED: "stalled",
    Status.DIVERGED: "diverged",
    Status.NONFINITE: "met NaN or infinity",
}


def describe(solution: Solution, stop: Stop, short: str = "") -> str:
    """Return one sentence on how a solve failed, with counts and remedies for its worst failure; empty if it did not.

    Args:
        solution: How it ended.
        stop: Its stopping rule.
        short: The remedy where steps ran out, if the usual one is not right.
    """
    counts = solution.counts()
    failed = [status for status in counts if status != Status.CONVERGED]
    if not failed:
        return ""
    total = solution.status.numel()
    what = " and ".join(f"{counts[status]} of {total} samples {VERB[status]}" for status in failed)
    worst = solution.residual[~solution.converged].max().item()
    steps = int(solution.steps.max())
    remedy = short if short and max(failed) == Status.MAX_STEPS else REMEDY[max(failed)]
    eps = torch.finfo(solution.residual.dtype).eps
    if (
        max(failed) in (Status.STALLED, Status.MAX_STEPS)
        and stop.tolerance < 10 * eps
        and worst < 1000 * eps
    ):
        remedy = (
            f"a tolerance of {stop.tolerance:.0e} is at the limit of "
            f"{solution.residual.dtype}: loosen it or use float64"
        )
    return f"{what} (worst relative residual {worst:.1e} after {steps} steps): {remedy}."


class FailurePolicy:
    """Applies one policy to the solves of one layer, and counts how its samples ended.

    Warnings come with the first failing solve of each kind and then when their number has grown
    tenfold, so that training shows a few lines and never silence.

    Args:
        on_failure: `raise`, `warn` or `ignore`.
        name: What is being solved, as the sentence begins.

    Attributes:
        counts: Samples by how they ended.
        observer: What to tell of each solve, before the policy applies.
    """

    def __init__(self, on_failure: OnFailure, name: str) -> None:
        self.on_failure = choose("on_failure", on_failure, get_args(OnFailure))
        self.name = name
        self.solves = 0
        self.failures = 0
        self.counts = dict.fromkeys(Status, 0)
        self.observer: Callable[[Solution], None] | None = None
        self._next_warning = 1
        self._heard: set[Status] = set()  # kinds of failure that were warned of

    def add(self, solution: Solution, stop: Stop, remedy: str = "") -> None:
        """Count a solve, and complain as the policy says if some of it failed; `remedy` is what helps against `MAX_STEPS`."""
        self.solves += 1
        if self.observer is not None:
            self.observer(solution)
        if bool((solution.status == Status.CONVERGED).all()):
            self.counts[Status.CONVERGED] += solution.status.numel()
            return
        for status, count in solution.counts().items():
            self.counts[status] += count
        self.failures += 1
        sentence = describe(solution, stop, remedy)
        if self.on_failure == "raise":
            raise ConvergenceError(f"{self.name}: {sentence}")
        kinds = {status for status in solution.counts() if status != Status.CONVERGED}
        if self.on_failure == "warn" and (
            self.failures >= self._next_warning or not kinds <= self._heard
        ):
            self._next_warning = 10 * self.failures
            self._heard |= kinds
            tally = (
                ""
                if self.failures == 1
                else f" This was failure {self.failures} in {self.solves} solves."
            )
            warnings.warn(f"{self.name}: {sentence}{tally}", ConvergenceWarning, stacklevel=2)
