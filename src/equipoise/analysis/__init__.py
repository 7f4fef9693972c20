"""What can be asked of any cell or model."""

from equipoise.analysis.certificate import Certificate, certify
from equipoise.analysis.spectrum import spectral_radius

__all__ = [
    "Certificate",
    "certify",
    "spectral_radius",
]
