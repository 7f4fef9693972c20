"""Inverse problems in imaging: equilibria that restore noisy, blurred and incomplete images."""

from equipoise.families.imaging.cell import (
    GradientCell,
    ImagingCell,
    ImagingProblem,
    ProximalCell,
)
from equipoise.families.imaging.models import ImagingOptions
from equipoise.families.imaging.network import LearntSlopes, ResidualNetwork

__all__ = [
    "GradientCell",
    "ImagingCell",
    "ImagingOptions",
    "ImagingProblem",
    "LearntSlopes",
    "ProximalCell",
    "ResidualNetwork",
]
