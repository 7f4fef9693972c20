"""Families of equilibrium networks: one folder each, with its cells, layers, models and theory."""

from equipoise.families import (
    explicit,
    imaging,
    lipschitz,
    monotone,
    multiscale,
    opteq,
    relu_implicit,
    residual,
    transformer,
    well_posed,
)

__all__ = [
    "explicit",
    "imaging",
    "lipschitz",
    "monotone",
    "multiscale",
    "opteq",
    "relu_implicit",
    "residual",
    "transformer",
    "well_posed",
]
