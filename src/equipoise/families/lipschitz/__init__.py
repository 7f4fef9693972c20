"""Lipschitz-bounded equilibrium networks (LBEN): how far outputs move is prescribed."""

from equipoise.families.lipschitz.cell import LipschitzCell, WeightedInclusion
from equipoise.families.lipschitz.layer import LipschitzBounded
from equipoise.families.lipschitz.matrix import LipschitzMatrix
from equipoise.families.lipschitz.models import LipschitzOptions

__all__ = [
    "LipschitzBounded",
    "LipschitzCell",
    "LipschitzMatrix",
    "LipschitzOptions",
    "WeightedInclusion",
]
