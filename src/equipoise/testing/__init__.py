"""The contract tests as functions: call them on your own cells, solvers, gradients and models."""

from equipoise.testing.activation import check_activation
from equipoise.testing.cell import check_cell
from equipoise.testing.contract import ContractError, Report
from equipoise.testing.gradient import check_gradient
from equipoise.testing.model import check_model
from equipoise.testing.regularizer import check_regularizer
from equipoise.testing.solver import check_solver
from equipoise.testing.status import check_statuses

__all__ = [
    "ContractError",
    "Report",
    "check_activation",
    "check_cell",
    "check_gradient",
    "check_model",
    "check_regularizer",
    "check_solver",
    "check_statuses",
]
