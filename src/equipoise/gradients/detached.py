"""Equilibria that gradients do not flow through."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equipoise.core.transforms import is_transformed
from equipoise.core.tree import shares_memory
from equipoise.gradients.base import Plan
from equipoise.gradients.implicit import Implicit
from equipoise.solvers.problem import MapProblem

__all__ = ["find_detached"]


def find_detached(plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return the equilibrium without connecting it to `args`."""
    z0 = z0.detach()
    if is_transformed(*args):
        # `Implicit` has rules for the transforms of `torch.func`.
        return Implicit().attach(plan, z0, [arg.detach() for arg in args])
    value = plan.solve(MapProblem(plan.equation, args), z0)
    return value.clone() if shares_memory(value, (z0, *args)) else value
