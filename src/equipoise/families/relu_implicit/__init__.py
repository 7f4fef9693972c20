"""Implicit ReLU networks: well-posed by scaling, trained by gradient descent with a proof."""

from equipoise.families.relu_implicit import equilibrium_checks
from equipoise.families.relu_implicit.cell import ReluImplicitCell
from equipoise.families.relu_implicit.lemma import ClosedForms, closed_forms
from equipoise.families.relu_implicit.network import ReluImplicitNetwork, ReluImplicitOptions

__all__ = [
    "ClosedForms",
    "ReluImplicitCell",
    "ReluImplicitNetwork",
    "ReluImplicitOptions",
    "closed_forms",
    "equilibrium_checks",
]
