"""Cells and layers."""

from equipoise.layers.cell import Cell
from equipoise.layers.change import ChangeOfVariable, Regularized, Skip
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.operator import Composed, Convolution, Dense, Operator, separable
from equipoise.layers.opteq import OptEq
from equipoise.layers.opteq_cell import OptEqCell, Unit, project, project_after
from equipoise.layers.opteq_conv import OptEqConv2d

__all__ = [
    "Cell",
    "ChangeOfVariable",
    "Composed",
    "Convolution",
    "Dense",
    "Equilibrium",
    "Operator",
    "OptEq",
    "OptEqCell",
    "OptEqConv2d",
    "Regularized",
    "Skip",
    "Unit",
    "project",
    "project_after",
    "separable",
]
