"""What can be asked of any cell or model."""

from equipoise.analysis.certificate import certify
from equipoise.analysis.problem import objective
from equipoise.analysis.spectrum import spectral_radius

__all__ = ["certify", "objective", "spectral_radius"]
