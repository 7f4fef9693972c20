"""Equilibria that gradients do not flow through."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from equipoise.core.transforms import is_transformed
from equipoise.gradients.base import Plan
from equipoise.gradients.implicit import Implicit

__all__ = ["find_detached"]


def find_detached(plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return the equilibrium without connecting it to `args`."""
    if is_transformed(*args):
        # `Implicit` has rules for the transforms of `torch.func`.
        return Implicit().find(plan, z0.detach(), [arg.detach() for arg in args])
    return plan.find(z0, args)
