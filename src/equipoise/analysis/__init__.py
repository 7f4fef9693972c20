"""What can be asked of any cell or model."""

from equipoise.analysis.certificate import certify
from equipoise.analysis.check import (
    Case,
    Check,
    Finding,
    Inequality,
    Subject,
    Verdict,
    find_checks,
    list_checks,
    make_case,
    register_check,
    verify,
)
from equipoise.analysis.problem import objective
from equipoise.analysis.spectrum import SpectralRadius, spectral_radius

__all__ = [
    "Case",
    "Check",
    "Finding",
    "Inequality",
    "SpectralRadius",
    "Subject",
    "Verdict",
    "certify",
    "find_checks",
    "list_checks",
    "make_case",
    "objective",
    "register_check",
    "spectral_radius",
    "verify",
]
