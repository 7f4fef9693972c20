"""What a cell's equilibria solve: a protocol that every family's problems meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from equipoise.solvers.protocol import Trace

if TYPE_CHECKING:
    from equipoise.layers.wrappers import ChangeOfVariable, Regularized

__all__ = ["Descent", "Minimization", "Problem"]


@dataclass(frozen=True)
class Descent:
    """How a solve went down: arrays of shape (looks, batch), or (looks, 1) for coupled samples.

    Attributes:
        value: The function that falls, at each look.
        residual: Relative residuals `|f(z) - z|/|f(z)|`, shape (looks, batch) always.
        merit: A second function with the same minimisers, finite everywhere, if there is one.
    """

    value: np.ndarray
    residual: np.ndarray
    merit: np.ndarray | None = None


class Problem(Protocol):
    """The optimisation problem or inclusion that a cell's equilibria solve at one input.

    Subclass it and define `describe`; everything else has a default that says "not known".
    """

    def describe(self) -> str:
        """Return the problem in sentences."""
        ...

    def descent(self, trace: Trace | None) -> Descent | None:
        """Return how a solve went down, or None if there is no function that falls.

        Args:
            trace: Its path, `layer.last.trace` after `layer(x, trace=True)`.
        """
        return None

    def skipped(self, alpha: float) -> Problem:
        """Return the problem of the step `alpha f(z) + (1 - alpha) z`."""
        raise ValueError(f"No problem is known for Skip around {self!r}.")

    def changed(self, change: ChangeOfVariable) -> Problem:
        """Return the problem of the step after a change of variable."""
        raise ValueError(f"No problem is known for ChangeOfVariable around {self!r}.")

    def regularized(self, wrapper: Regularized) -> Problem:
        """Return the problem of the step with a regulariser."""
        raise ValueError(f"No problem is known for Regularized around {self!r}.")


@runtime_checkable
class Minimization(Problem, Protocol):
    """A problem with a function that the equilibria minimise, which can be drawn."""

    @property
    def title(self) -> str:
        """The problem in a few words."""
        ...

    def minimizer(self, start: Tensor | None = None) -> Tensor:
        """Return a minimiser, searched for from a state."""
        ...

    def along(self, states: Sequence[Tensor]) -> Descent:
        """Return the function and the residuals along some states."""
        ...
