"""Equilibrium layers."""

from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium

__all__ = ["Cell", "Equilibrium"]
