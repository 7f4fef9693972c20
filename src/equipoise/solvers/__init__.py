"""Update rules for `z = f(z)` and the loop that runs them."""

from equipoise.solvers.accelerated import Accelerated
from equipoise.solvers.anderson import Anderson
from equipoise.solvers.bicgstab import BiCGStab
from equipoise.solvers.broyden import Broyden
from equipoise.solvers.conjugate_gradient import ConjugateGradient
from equipoise.solvers.dense import DenseLU
from equipoise.solvers.fixed_point import FixedPoint
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.loop import run
from equipoise.solvers.neumann import Neumann
from equipoise.solvers.newton import Newton
from equipoise.solvers.problem import Equation, Linearization, MapProblem, Problem
from equipoise.solvers.protocol import (
    SOLVERS,
    Move,
    Point,
    Rule,
    Solution,
    Solver,
    Status,
    Stop,
    Trace,
)
from equipoise.solvers.sam import SAM
from equipoise.solvers.solve import check_context, solve, unpack_solution

__all__ = [
    "GMRES",
    "SAM",
    "SOLVERS",
    "Accelerated",
    "Anderson",
    "BiCGStab",
    "Broyden",
    "ConjugateGradient",
    "DenseLU",
    "Equation",
    "FixedPoint",
    "LinearProblem",
    "Linearization",
    "MapProblem",
    "Move",
    "Neumann",
    "Newton",
    "Point",
    "Problem",
    "Rule",
    "Solution",
    "Solver",
    "Status",
    "Stop",
    "Trace",
    "check_context",
    "run",
    "solve",
    "unpack_solution",
]
