"""Steps made ahead of the monitor, in one compiled loop, while every sample is on its way.

For a few samples the time between two small products is that of the calls in between. A map that a
compiled loop knows is iterated there, for as long as each residual falls and none reaches its
target: looks at which the monitor would have decided nothing. Where a look may decide something,
the loop stops, and the map is evaluated by the cell itself: no sample ends by what the compiled
loop computed.

For many samples the cell evaluates its map in each step, and what lies between two evaluations is
one call of a kernel: the look at the last one, and the step to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.solvers.protocol import Point

__all__ = ["MAX_AHEAD", "Ahead", "CompiledRuns", "Limits"]

MAX_AHEAD = 32
"""Steps made at once at most."""


@dataclass(frozen=True)
class CompiledRuns:
    """Runs of solvers with one map; their arguments are those that the rules give them.

    Attributes:
        anderson: Anderson acceleration, if there is that.
        conjugate: Conjugate gradient, likewise.
        evaluate: The map itself, where products of many samples are best left to torch: writes its
            value at its first argument into the second.
        product: The product with the Jacobian, likewise.
    """

    anderson: Callable[..., Any] | None = None
    conjugate: Callable[..., Any] | None = None
    evaluate: Callable[[Tensor, Tensor], Any] | None = None
    product: Callable[[Tensor, Tensor], Any] | None = None


class Limits:
    """Between which numbers the residuals of a run must stay, and what it passed.

    Args:
        tolerance: Of the stopping rule.
        absolute: Likewise.
        progress: The fraction of the best residual that the next one must be below.
        guard: Residuals that may be small enough whatever the scale.
        best: The best residuals so far.
        excess: The largest residual in units of the smallest target, now and at the look before.
        steps: Steps that may be made.
    """

    def __init__(
        self,
        *,
        tolerance: float,
        absolute: float,
        progress: float,
        guard: np.ndarray,
        best: np.ndarray,
        excess: tuple[float, float],
        steps: int,
    ) -> None:
        self.tolerance, self.absolute, self.progress = tolerance, absolute, progress
        self.guard, self.best = guard.astype(float), best.astype(float)
        self.excess = np.array(excess)
        self.steps = min(steps, MAX_AHEAD)
        self.sizes, self.scales = np.empty((2, self.steps, len(best)))


@dataclass(frozen=True)
class Ahead:
    """How far a run went.

    Attributes:
        steps: Steps made.
        looks: Looks passed.
        evaluations: Evaluations and products made.
        good: The iterate of the last look passed.
        at: Where it is, if the rule knows; else the map must be evaluated at `z`.
        z: Where it is.
        seen: Whether the look at `at` was passed as well.
    """

    steps: int
    looks: int
    evaluations: int
    good: Tensor
    z: Tensor
    at: Point | None = None
    seen: bool = False
