"""Multiscale DEQs: several resolutions of an image as one equilibrium."""

from equipoise.families.multiscale.cell import Injected, MultiscaleCell
from equipoise.families.multiscale.head import ScaleClassHead, ScalePixelHead
from equipoise.families.multiscale.layer import Multiscale
from equipoise.families.multiscale.models import MultiscaleOptions

__all__ = [
    "Injected",
    "Multiscale",
    "MultiscaleCell",
    "MultiscaleOptions",
    "ScaleClassHead",
    "ScalePixelHead",
]
