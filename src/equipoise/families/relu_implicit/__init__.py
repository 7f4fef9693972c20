"""Implicit ReLU networks: well-posed by scaling, trained by gradient descent with a proof."""

from equipoise.families.relu_implicit import equilibrium_checks, spectrum_checks, training_checks
from equipoise.families.relu_implicit.cell import ReluImplicitCell
from equipoise.families.relu_implicit.conditions import Quantities, quantities
from equipoise.families.relu_implicit.gram import Gram, gram, limit_gram
from equipoise.families.relu_implicit.lemma import ClosedForms, closed_forms
from equipoise.families.relu_implicit.network import ReluImplicitNetwork, ReluImplicitOptions

__all__ = [
    "ClosedForms",
    "Gram",
    "Quantities",
    "ReluImplicitCell",
    "ReluImplicitNetwork",
    "ReluImplicitOptions",
    "closed_forms",
    "equilibrium_checks",
    "gram",
    "limit_gram",
    "quantities",
    "spectrum_checks",
    "training_checks",
]
