"""OptEq: equilibrium networks whose equilibrium minimises a convex function."""

from equipoise.families.opteq import (
    composition_checks,
    layer_checks,
    network_checks,
    table,
    training_checks,
)
from equipoise.families.opteq.cell import OptEqCell
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
from equipoise.families.opteq.models import OptEqOptions
from equipoise.families.opteq.objective import Objective, QuadraticProgram
from equipoise.families.opteq.training_bound import TrainingBound, training_bound

__all__ = [
    "Blocks",
    "DeepObjective",
    "HiddenUnits",
    "Objective",
    "OptEq",
    "OptEqCell",
    "OptEqConv2d",
    "OptEqOptions",
    "QuadraticProgram",
    "TrainingBound",
    "WideLimit",
    "composition_checks",
    "layer_checks",
    "network_checks",
    "table",
    "to_blocks",
    "to_hidden_units",
    "to_opteq",
    "to_wide",
    "training_bound",
    "training_checks",
]
