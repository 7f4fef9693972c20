"""Families of equilibrium networks: one folder each, with its cells, layers, models and theory."""

from equipoise.families import opteq

__all__ = ["opteq"]
