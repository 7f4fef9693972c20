"""OptEq: equilibrium networks whose equilibrium minimises a convex function."""

from equipoise.families.opteq.cell import FrozenLayer, OptEqCell, project_norms, project_norms_after
from equipoise.families.opteq.conv import OptEqConv2d
from equipoise.families.opteq.convert import (
    Blocks,
    HiddenUnits,
    to_blocks,
    to_hidden_units,
    to_opteq,
    to_wide,
)
from equipoise.families.opteq.deep_objective import DeepObjective, WideLimit
from equipoise.families.opteq.layer import OptEq
from equipoise.families.opteq.models import OptEqOptions, SolveOptions
from equipoise.families.opteq.objective import Descent, Objective, QuadraticProgram, objective

__all__ = [
    "Blocks",
    "DeepObjective",
    "Descent",
    "FrozenLayer",
    "HiddenUnits",
    "Objective",
    "OptEq",
    "OptEqCell",
    "OptEqConv2d",
    "OptEqOptions",
    "QuadraticProgram",
    "SolveOptions",
    "WideLimit",
    "objective",
    "project_norms",
    "project_norms_after",
    "to_blocks",
    "to_hidden_units",
    "to_opteq",
    "to_wide",
]
