"""The problem that a layer's equilibria solve."""

from __future__ import annotations

from equipoise.analysis.certificate import require_finite_weights, require_layer
from equipoise.core.tree import Tree
from equipoise.layers import Equilibrium, Problem
from equipoise.layers.declarations import problem_of

__all__ = ["objective"]


def objective(layer: Equilibrium, x: Tree) -> Problem:
    """Return the problem that the equilibria of `layer` at the input `x` solve.

    What it offers depends on the family: an OptEq of one layer gives its `Objective`, one of
    several layers a `DeepObjective`. Raises ValueError if no problem is known.

    Args:
        layer: An equilibrium layer whose cell knows its problem, perhaps within `Skip`,
            `ChangeOfVariable` and `Regularized`.
        x: The layer's input, batch first.
    """
    require_layer("objective", layer)
    require_finite_weights("objective.layer", layer.cell)
    layer.check(x)
    return problem_of(layer.cell, x)
