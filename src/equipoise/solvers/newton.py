"""Semismooth Newton-Krylov."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from equipoise.core.registry import choose
from equipoise.core.tree import row_norm
from equipoise.core.validate import require_between, require_count
from equipoise.solvers.conjugate_gradient import ConjugateGradient
from equipoise.solvers.dense import Factors, dense_pays
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.loop import run
from equipoise.solvers.problem import Linearization, Problem
from equipoise.solvers.protocol import SOLVERS, Move, Point, Rule, Solver, Stop

__all__ = ["Newton"]

REST = 5
"""Plain steps that a sample takes after a line search that failed."""
FIRST_GUESS = 6
"""Steps that the first inner solve is expected to take."""


@final
@SOLVERS.register("newton")
@dataclass(frozen=True)
class Newton(Solver):
    """Solve `(I - J) d = f(z) - z` roughly, and step along `d`.

    Semismooth (Qi & Sun, 1993) and inexact (Dembo, Eisenstat & Steihaug, 1982). The step is halved
    until the residual falls enough; where it never does, plain steps `f(z)` are taken for a while,
    since the residual may have to rise before it can fall.

    Args:
        forcing: Relative residual of the inner solves.
        inner_steps: Steps of an inner solve at most.
        halvings: Halvings of the line search at most.
        inner: How `d` is found. `krylov`: by conjugate gradient for symmetric cells and GMRES
            otherwise; `dense`: by elimination; `auto`: by elimination where that is cheaper than
            the steps that the last inner solve took (at first `FIRST_GUESS`).
    """

    forcing: float = 0.1
    inner_steps: int = 50
    halvings: int = 8
    inner: Literal["auto", "krylov", "dense"] = "auto"

    def __post_init__(self) -> None:
        require_between("Newton.forcing", self.forcing, 0, 1, "()")
        require_count("Newton.inner_steps", self.inner_steps)
        require_count("Newton.halvings", self.halvings)
        choose("Newton.inner", self.inner, ["auto", "krylov", "dense"])

    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        return _Search(self, problem)


class _Search(Rule):
    def __init__(self, solver: Newton, problem: Problem) -> None:
        self.solver = solver
        self.problem = problem
        self.krylov: Solver = ConjugateGradient() if problem.symmetric else GMRES()
        self.expected = {"auto": float(FIRST_GUESS), "krylov": 0.0, "dense": math.inf}[solver.inner]
        self.stop = Stop(solver.forcing, max_steps=solver.inner_steps, norm="state")
        self.local: Linearization | None = None
        # Plain steps that each sample has still to take, as a column.
        self.rest: Tensor | None = None

    def advance(self, at: Point) -> Move:
        z, gap = at.z, at.gap
        rest = torch.zeros_like(at.size[:, None]) if self.rest is None else self.rest
        resting = rest > 0
        if bool(resting.all()):
            self.local, self.rest = None, rest - 1
            return Move(at.f)
        local = self.local or self.problem.linearize(z)
        direction = torch.where(resting, gap, self._direction(z, gap, local))
        before = at.size[:, None]
        length = torch.ones_like(before)
        for _ in range(self.solver.halvings + 1):
            next_z = torch.addcmul(z, direction, length)
            local = self.problem.linearize(next_z)
            after = row_norm(local.value - next_z)[:, None]
            good = resting | (after <= (1 - 1e-4 * length) * before)
            if bool(good.all()):
                break
            length = torch.where(good, length, length / 2)
        else:
            next_z = torch.where(good, next_z, at.f)
            local = self.problem.linearize(next_z)
        self.local, self.rest = local, torch.where(good, rest - 1, float(REST))
        return Move(next_z, local.value)

    def _direction(self, z: Tensor, gap: Tensor, local: Linearization) -> Tensor:
        """Return `(I - J)^-1 gap`, roughly."""
        system = LinearProblem(self.problem, z, gap, transpose=False, local=local, forcing=True)
        if self.expected == math.inf or dense_pays(self.problem, z.shape, self.expected):
            return Factors(system.matrix()).solve(gap)
        found = run(system, torch.zeros_like(z), self.krylov, self.stop, f=gap)
        if self.solver.inner == "auto":
            self.expected = float(found.steps.max())
        value: Tensor = found.value
        return value

    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        self.problem = problem
        if self.local is not None:
            self.local = self.local.select_rows(rows) if self.local.select_rows else None
        self.rest = None if self.rest is None else self.rest[rows]
