"""Equilibrium networks: layers whose output is the solution of `z = f(z, x)`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.core import ConvergenceError, ConvergenceWarning, Shared, convolution_bound, dense_norm, flush_denormals
    from equipoise.gradients import GRADIENTS, Implicit, JacobianFree, Phantom, Unrolled, frobenius_penalty, spectral_radius
    from equipoise.layers import (
        Cell,
        ChangeOfVariable,
        Equilibrium,
        OptEq,
        OptEqConv2d,
        Regularized,
        Skip,
        project,
        project_after,
    )
    from equipoise.models import Network, create_model, list_models
    from equipoise.solvers import (
        GMRES,
        SAM,
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
    from equipoise.theory import certify, objective, to_blocks, to_hidden_units, to_opteq, to_wide

__version__ = "0.1.0"

__all__ = [
    "GMRES",
    "GRADIENTS",
    "SAM",
    "SOLVERS",
    "Accelerated",
    "Anderson",
    "BiCGStab",
    "Broyden",
    "Cell",
    "ChangeOfVariable",
    "ConjugateGradient",
    "ConvergenceError",
    "ConvergenceWarning",
    "Equilibrium",
    "FixedPoint",
    "Implicit",
    "JacobianFree",
    "Linearization",
    "Network",
    "Neumann",
    "Newton",
    "OptEq",
    "OptEqConv2d",
    "Phantom",
    "Regularized",
    "Shared",
    "Skip",
    "Solution",
    "Status",
    "Stop",
    "Trace",
    "Unrolled",
    "certify",
    "convolution_bound",
    "create_model",
    "dense_norm",
    "flush_denormals",
    "frobenius_penalty",
    "list_models",
    "objective",
    "project",
    "project_after",
    "solve",
    "spectral_radius",
    "to_blocks",
    "to_hidden_units",
    "to_opteq",
    "to_wide",
]

_FOLDERS = ("core", "prox", "solvers", "gradients", "layers", "models", "theory", "data", "engine", "report", "recipes")

# Names are imported when they are first used, because torch takes a second, and `equipoise --help` does without it.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _FOLDERS:
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for folder in _FOLDERS:
                home = import_module(f"{__name__}.{folder}")
                if name in home.__all__:
                    return globals().setdefault(name, getattr(home, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*__all__, *_FOLDERS, *(name for name in globals() if name.startswith("__"))})
