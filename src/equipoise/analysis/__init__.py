"""What can be asked of any cell or model."""

from equipoise.analysis.attack import AttackSettings, attack_radii
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
from equipoise.analysis.kernel import kernel_spectrum, tangent_kernel
from equipoise.analysis.lipschitz import NetworkBound, lipschitz_bound
from equipoise.analysis.problem import objective
from equipoise.analysis.radius import CertifiedRadii, RadiusCertifier, certified_accuracy
from equipoise.analysis.spectrum import SpectralRadius, spectral_radius
from equipoise.analysis.training_path import TrainingPath, gradient_descent, gradient_flow

__all__ = [
    "AttackSettings",
    "Case",
    "CertifiedRadii",
    "Check",
    "Finding",
    "Inequality",
    "NetworkBound",
    "RadiusCertifier",
    "SpectralRadius",
    "Subject",
    "TrainingPath",
    "Verdict",
    "attack_radii",
    "certified_accuracy",
    "certify",
    "find_checks",
    "gradient_descent",
    "gradient_flow",
    "kernel_spectrum",
    "lipschitz_bound",
    "list_checks",
    "make_case",
    "objective",
    "register_check",
    "spectral_radius",
    "tangent_kernel",
    "verify",
]
