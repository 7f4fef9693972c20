"""Equilibrium networks: layers whose output is the solution of `z = f(z, x)`."""

from equipoise.core import ConvergenceError, ConvergenceWarning, Shared, convolution_bound, flush_denormals
from equipoise.gradients import GRADIENTS, Implicit, JacobianFree, Phantom, Unrolled, frobenius_penalty, spectral_radius
from equipoise.layers import Cell, Equilibrium
from equipoise.solvers import (
    GMRES,
    SOLVERS,
    Accelerated,
    Anderson,
    BiCGStab,
    Broyden,
    ConjugateGradient,
    FixedPoint,
    Linearization,
    Neumann,
    Newton,
    Solution,
    Status,
    Stop,
    Trace,
    solve,
)

__version__ = "0.1.0"

__all__ = [
    "GMRES",
    "GRADIENTS",
    "SOLVERS",
    "Accelerated",
    "Anderson",
    "BiCGStab",
    "Broyden",
    "Cell",
    "ConjugateGradient",
    "ConvergenceError",
    "ConvergenceWarning",
    "Equilibrium",
    "FixedPoint",
    "Implicit",
    "JacobianFree",
    "Linearization",
    "Neumann",
    "Newton",
    "Phantom",
    "Shared",
    "Solution",
    "Status",
    "Stop",
    "Trace",
    "Unrolled",
    "convolution_bound",
    "flush_denormals",
    "frobenius_penalty",
    "solve",
    "spectral_radius",
]
