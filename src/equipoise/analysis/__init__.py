"""What can be asked of any cell or model."""

from equipoise.analysis.certificate import certify
from equipoise.analysis.problem import objective
from equipoise.analysis.spectrum import SpectralRadius, spectral_radius

__all__ = ["SpectralRadius", "certify", "objective", "spectral_radius"]
