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
from equipoise.analysis.direction import PathPlane, path_plane, random_direction, weights_of
from equipoise.analysis.kernel import kernel_spectrum, tangent_kernel
from equipoise.analysis.landscape import Landscape, PointLoss, grid_axis, loss_landscape
from equipoise.analysis.lipschitz import NetworkBound, lipschitz_bound
from equipoise.analysis.problem import objective
from equipoise.analysis.radius import CertifiedRadii, RadiusCertifier, certified_accuracy
from equipoise.analysis.sharpness import (
    Basin,
    Curvature,
    find_basin,
    hessian_product,
    top_eigenvalues,
)
from equipoise.analysis.spectrum import (
    Eigenvalues,
    SpectralRadius,
    jacobian_eigenvalues,
    spectral_radius,
)
from equipoise.analysis.training_path import TrainingPath, gradient_descent, gradient_flow
from equipoise.analysis.trajectory import Trajectory, project_paths, trace_solve

__all__ = [
    "AttackSettings",
    "Basin",
    "Case",
    "CertifiedRadii",
    "Check",
    "Curvature",
    "Eigenvalues",
    "Finding",
    "Inequality",
    "Landscape",
    "NetworkBound",
    "PathPlane",
    "PointLoss",
    "RadiusCertifier",
    "SpectralRadius",
    "Subject",
    "TrainingPath",
    "Trajectory",
    "Verdict",
    "attack_radii",
    "certified_accuracy",
    "certify",
    "find_basin",
    "find_checks",
    "gradient_descent",
    "gradient_flow",
    "grid_axis",
    "hessian_product",
    "jacobian_eigenvalues",
    "kernel_spectrum",
    "lipschitz_bound",
    "list_checks",
    "loss_landscape",
    "make_case",
    "objective",
    "path_plane",
    "project_paths",
    "random_direction",
    "register_check",
    "spectral_radius",
    "tangent_kernel",
    "top_eigenvalues",
    "trace_solve",
    "verify",
    "weights_of",
]
