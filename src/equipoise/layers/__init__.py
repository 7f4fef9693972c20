"""Cells, the equilibrium layer, and wrappers that change the problem behind a cell."""

from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Factor, Link, Statement
from equipoise.layers.dropout import VariationalDropout
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.function import fixed_point
from equipoise.layers.lipschitz import Bound, Chain, Part, Sum
from equipoise.layers.options import CallOptions, SolveOptions
from equipoise.layers.problem import Descent, Minimization, Problem
from equipoise.layers.project import project_norms, project_norms_after
from equipoise.layers.root import root
from equipoise.layers.wrappers import ChangeOfVariable, Regularized, Skip

__all__ = [
    "Bound",
    "CallOptions",
    "Cell",
    "Certificate",
    "Chain",
    "ChangeOfVariable",
    "Descent",
    "Equilibrium",
    "Factor",
    "Link",
    "Minimization",
    "Part",
    "Problem",
    "Regularized",
    "Skip",
    "SolveOptions",
    "Statement",
    "Sum",
    "VariationalDropout",
    "fixed_point",
    "project_norms",
    "project_norms_after",
    "root",
]
