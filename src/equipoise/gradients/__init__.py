"""How a solve is differentiated."""

from equipoise.gradients.base import Gradient, Plan, gradients
from equipoise.gradients.implicit import Implicit
from equipoise.gradients.penalty import frobenius_penalty, spectral_radius
from equipoise.gradients.phantom import JacobianFree, Phantom
from equipoise.gradients.unrolled import Unrolled

__all__ = [
    "Gradient",
    "Implicit",
    "JacobianFree",
    "Phantom",
    "Plan",
    "Unrolled",
    "frobenius_penalty",
    "gradients",
    "spectral_radius",
]
