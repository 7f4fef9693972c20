"""How a solve is differentiated."""

from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.closed_form import ClosedForm
from equipoise.gradients.implicit import Implicit
from equipoise.gradients.penalty import frobenius_penalty
from equipoise.gradients.phantom import JacobianFree, Phantom
from equipoise.gradients.unrolled import Unrolled

__all__ = [
    "GRADIENTS",
    "ClosedForm",
    "Gradient",
    "Implicit",
    "JacobianFree",
    "Phantom",
    "Plan",
    "Unrolled",
    "frobenius_penalty",
]
