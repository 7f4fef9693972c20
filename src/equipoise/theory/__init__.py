"""What is true of a layer: the problem that its equilibrium solves, and certificates."""

from equipoise.theory.certificate import Certificate, certify
from equipoise.theory.convert import Blocks, HiddenUnits, to_blocks, to_hidden_units, to_opteq, to_wide
from equipoise.theory.deep import DeepObjective, WideLimit
from equipoise.theory.objective import Descent, Objective, QuadraticProgram, objective

__all__ = [
    "Blocks",
    "Certificate",
    "DeepObjective",
    "Descent",
    "HiddenUnits",
    "Objective",
    "QuadraticProgram",
    "WideLimit",
    "certify",
    "objective",
    "to_blocks",
    "to_hidden_units",
    "to_opteq",
    "to_wide",
]
