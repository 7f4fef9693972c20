"""Cells, the equilibrium layer, and wrappers that change the problem behind a cell."""

from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.wrappers import ChangeOfVariable, Regularized, Skip

__all__ = [
    "Cell",
    "ChangeOfVariable",
    "Equilibrium",
    "Regularized",
    "Skip",
]
