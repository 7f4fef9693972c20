"""Back-propagation through the iteration itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.implicit import find_detached
from equipoise.solvers.base import require_count
from equipoise.solvers.fixed_point import require_fraction

__all__ = ["Unrolled"]


@final
@GRADIENTS.register("unrolled")
@dataclass(frozen=True)
class Unrolled(Gradient):
    """Make exactly `steps` recorded fixed-point steps from the start, and differentiate through all of them.

    The layer's solver is not used. Memory grows with `steps`. The derivative is that of the iterate, so it is as far from the
    equilibrium's as the iterate is from the equilibrium.

    Args:
        steps: Recorded steps.
        damping: Share of the new value in (0, 1].
    """

    steps: int = 20
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_count("Unrolled.steps", self.steps)
        require_fraction("Unrolled.damping", self.damping)

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        if plan.trace:
            raise ValueError("Unrolled keeps no trace; take another gradient strategy to look at the path of a solve.")
        step = plan.equation.bind(args)
        z = z0
        for _ in range(self.steps):
            z = step(z) if self.damping == 1 else z.lerp(step(z), self.damping)
        find_detached(plan.judging(self.steps), z, args)
        return z
