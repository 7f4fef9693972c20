"""Residual DEQs: a convolutional residual block as the cell, and the same block weight-tied."""

from equipoise.families.residual.cell import ResidualCell, WeightTied
from equipoise.families.residual.models import ResidualOptions

__all__ = ["ResidualCell", "ResidualOptions", "WeightTied"]
