"""Derivatives from the closed form of the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.implicit import Implicit
from equipoise.solvers.dense import DenseLU

__all__ = ["ClosedForm"]


@final
@GRADIENTS.register("closed_form")
@dataclass(frozen=True)
class ClosedForm(Gradient):
    """`v = (I - J)^-T g` by elimination, then `v` is pulled back through one step.

    That is how papers write the gradients of an implicit network (Gao et al., 2022, Lemma 2.3).
    `Implicit` gives the same numbers up to its tolerance, by a solve; this one is exact to
    rounding, for states of up to a few hundred numbers: it takes the square of the width in memory
    for each sample, and its cube in time.
    """

    exact = True

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        return Implicit(DenseLU()).attach(plan, z0, args)
