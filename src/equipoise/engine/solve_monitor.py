"""What the equilibrium layers of a model did: steps, residuals and statuses of their solves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.core import Structure
from equipoise.engine.blow_up import largest_magnitude
from equipoise.layers.declarations import norm_limit_of, norms_of
from equipoise.models import find_equilibria
from equipoise.solvers import Solution, Status
from equipoise.solvers.policy import Direction, describe

__all__ = ["SolveMonitor", "Tally", "norm_limit", "operator_norms", "steps_and_status"]


class Tally:
    """Counts of how samples ended, and how many steps they took, in some solves.

    Attributes:
        sums: Number of steps, then the number of samples of each `Status`; float64, so that tallies
            add up as vectors.
        residual: The largest relative residual.
    """

    size: ClassVar[int] = 1 + len(Status)

    def __init__(self) -> None:
        self.sums = torch.zeros(self.size, dtype=torch.float64)
        self.residual = 0.0

    def add(self, solution: Solution) -> None:
        """Add one solve."""
        if not solution.status.numel():
            return
        self.sums[0] += solution.steps.sum().item()
        self.sums[1:] += torch.bincount(solution.status, minlength=len(Status)).cpu()
        self.residual = max(self.residual, _largest(solution.residual))


def steps_and_status(sums: Tensor) -> tuple[float | None, dict[str, int]]:
    """Return the mean number of steps and the counts of statuses in the sums of a `Tally`."""
    total = sums[1:].sum().item()
    counts = {status.name: int(sums[1 + status]) for status in Status if sums[1 + status]}
    return (sums[0].item() / total if total else None), counts


class SolveMonitor:
    """Listens to all equilibrium layers of a model.

    Args:
        model: The model.

    Attributes:
        forward: Tally of the forward solves since `clear`.
        backward: Tally of the backward solves.
        failure: A sentence on the first solve that diverged or met NaN since `clear`, empty if
            there was none.
        forward_failed: Whether a forward solve did.
        largest: The largest absolute value in the equilibria.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = list(find_equilibria(model).values())
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.forward, self.backward = Tally(), Tally()
        self.failure = ""
        self.forward_failed = False
        self.largest = 0.0
        self._missed: list[Tensor] = []
        self._nonfinite: list[Tensor] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the context lasts."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.solves.listening(self._add))
            yield

    def missed(self, count: int) -> Tensor:
        """Return which samples of a batch have a forward solve that missed its tolerance.

        Args:
            count: How many samples the batch has. A solve of another number of rows, such as a
                coupled batch, counts for all.
        """
        return _any_of(self._missed, count)

    def nonfinite(self, count: int) -> Tensor:
        """Return which samples of a batch have a forward solve that met NaN or infinity.

        What their layer returns is finite, but no equilibrium.

        Args:
            count: As of `missed`.
        """
        return _any_of(self._nonfinite, count)

    def _add(self, direction: Direction, solution: Solution) -> None:
        backward = direction == "backward"
        (self.backward if backward else self.forward).add(solution)
        if not backward:
            self.largest = max(
                self.largest, *map(largest_magnitude, Structure(solution.value).leaves)
            )
            self._missed.append(~solution.converged.cpu())
            self._nonfinite.append((solution.status == Status.NONFINITE).cpu())
        if bool((solution.status >= Status.DIVERGED).any()):
            self.forward_failed |= not backward
            self.failure = self.failure or f"{direction} solve: {describe(solution, direction)}"


def operator_norms(model: nn.Module) -> dict[str, float]:
    """Return what the cells of all equilibrium layers of a model say of their operators' norms.

    Args:
        model: The model.
    """
    with torch.no_grad():
        return {
            f"{name}.{operator}": bound
            for name, part in find_equilibria(model).items()
            for operator, bound in norms_of(part.cell).items()
        }


def norm_limit(model: nn.Module) -> float | None:
    """Return what `operator_norms` must stay below, where all cells agree on one number.

    Args:
        model: The model.
    """
    limits = {norm_limit_of(part.cell) for part in find_equilibria(model).values()}
    return limits.pop() if len(limits) == 1 else None


def _any_of(flags: list[Tensor], count: int) -> Tensor:
    """Which of `count` samples have a flag in one solve."""
    found = torch.zeros(count, dtype=torch.bool)
    for each in flags:
        found |= each if len(each) == count else each.any()
    return found


def _largest(values: Tensor) -> float:
    finite = values[torch.isfinite(values)]
    return float(finite.max()) if len(finite) == len(values) else float("inf")
