"""Cheap, inexact gradients: a few recorded steps from the equilibrium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from equipoise.core.validate import require_count, require_fraction
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.detached import find_detached

__all__ = ["JacobianFree", "Phantom"]


@final
@GRADIENTS.register("phantom")
@dataclass(frozen=True)
class Phantom(Gradient):
    """Record `steps` damped steps from the detached equilibrium.

    The unrolled phantom gradient (Geng et al., 2021) is `sum_k M^k damping df`,
    `M = (1 - damping) I + damping J^T`, cut after `steps` terms: a descent direction, not the
    derivative. Memory grows with `steps`.

    Args:
        steps: Recorded steps.
        damping: Weight of the new value, in (0, 1].
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        require_count("Phantom.steps", self.steps)
        require_fraction("Phantom.damping", self.damping)

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        step = plan.equation.bind(args)
        z = find_detached(plan, z0, args)
        for _ in range(self.steps):
            z = z.lerp(step(z), self.damping)
        return z


@final
@GRADIENTS.register("jacobian_free")
@dataclass(frozen=True)
class JacobianFree(Gradient):
    """Record one step at the detached equilibrium, as if `J` were zero (Fung et al., 2021).

    The gradient is the first term of the series.
    """

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        # Cloned, because a step may return memory that it will use again.
        return plan.equation.bind(args)(find_detached(plan, z0, args)).clone()
