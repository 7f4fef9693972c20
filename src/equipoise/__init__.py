"""Equilibrium networks: layers whose output is the solution of `z = f(z, x)`."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import lazy_names

if TYPE_CHECKING:
    from equipoise.analysis import certify, objective, spectral_radius, verify
    from equipoise.core import ConvergenceError, ConvergenceWarning, Shared, flush_denormals
    from equipoise.families.monotone import MonotoneConv2d, MonotoneDense, MonotoneMultiTier
    from equipoise.families.opteq import (
        OptEq,
        OptEqConv2d,
        to_blocks,
        to_hidden_units,
        to_opteq,
        to_wide,
    )
    from equipoise.gradients import (
        GRADIENTS,
        ClosedForm,
        Implicit,
        JacobianFree,
        Phantom,
        Unrolled,
        frobenius_penalty,
    )
    from equipoise.layers import (
        Cell,
        Certificate,
        ChangeOfVariable,
        Equilibrium,
        Problem,
        Regularized,
        Skip,
        VariationalDropout,
        fixed_point,
        project_norms,
        project_norms_after,
        root,
    )
    from equipoise.models import (
        ImageModel,
        ImageNetwork,
        Model,
        create_model,
        list_models,
        register_model,
    )
    from equipoise.operators import convolution_bound, dense_norm
    from equipoise.solvers import (
        GMRES,
        SAM,
        SOLVERS,
        Accelerated,
        Anderson,
        BiCGStab,
        Broyden,
        ConjugateGradient,
        DenseLU,
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
    "SAM",
    "SOLVERS",
    "Accelerated",
    "Anderson",
    "BiCGStab",
    "Broyden",
    "Cell",
    "Certificate",
    "ChangeOfVariable",
    "ClosedForm",
    "ConjugateGradient",
    "ConvergenceError",
    "ConvergenceWarning",
    "DenseLU",
    "Equilibrium",
    "FixedPoint",
    "ImageModel",
    "ImageNetwork",
    "Implicit",
    "JacobianFree",
    "Linearization",
    "Model",
    "MonotoneConv2d",
    "MonotoneDense",
    "MonotoneMultiTier",
    "Neumann",
    "Newton",
    "OptEq",
    "OptEqConv2d",
    "Phantom",
    "Problem",
    "Regularized",
    "Shared",
    "Skip",
    "Solution",
    "Status",
    "Stop",
    "Trace",
    "Unrolled",
    "VariationalDropout",
    "certify",
    "convolution_bound",
    "create_model",
    "dense_norm",
    "fixed_point",
    "flush_denormals",
    "frobenius_penalty",
    "list_models",
    "objective",
    "project_norms",
    "project_norms_after",
    "register_model",
    "root",
    "solve",
    "spectral_radius",
    "to_blocks",
    "to_hidden_units",
    "to_opteq",
    "to_wide",
    "verify",
]

_FOLDERS = (
    "core",
    "operators",
    "prox",
    "solvers",
    "gradients",
    "layers",
    "analysis",
    "models",
    "families",
    "data",
    "engine",
    "plots",
    "report",
    "runs",
    "testing",
)

# Names are imported when they are first used, because torch takes a second, and `equipoise --help`
# does without it.
if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, __all__, (*_FOLDERS, "families.opteq", "families.monotone"))

    def __dir__() -> list[str]:
        return sorted({*__all__, *_FOLDERS, *(name for name in globals() if name.startswith("__"))})
