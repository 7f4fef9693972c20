"""What every gradient strategy shares: the plan of a solve, and the shape of a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from equipoise.core.registry import Registry
from equipoise.solvers.loop import judge, run
from equipoise.solvers.problem import Equation, MapProblem
from equipoise.solvers.protocol import Solution, Solver, Stop

__all__ = ["GRADIENTS", "Gradient", "Plan"]


@dataclass(frozen=True)
class Plan:
    """One forward solve: what is solved, how, and who hears of the outcome.

    Attributes:
        equation: The equation on matrices.
        solver: The forward solver.
        stop: Its stopping rule.
        report: Called with the forward solution.
        report_adjoint: Called with the solution of each adjoint equation and its stopping rule.
        inspect: Called with a recorded step and the tensors that it may depend on.
        lipschitz: A bound of the equation's Lipschitz constant in the state, if the cell declares
            one.
        trace: Whether to keep the path.
        judged: Steps that were made already; then the plan only looks at its start.
    """

    equation: Equation
    solver: Solver
    stop: Stop
    report: Callable[[Solution], None]
    report_adjoint: Callable[[Solution, Stop], None]
    inspect: Callable[[Tensor, Sequence[Tensor]], None]
    lipschitz: float | None = None
    trace: bool = False
    judged: int = 0

    def solve(self, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the equilibrium without recording gradients."""
        if self.judged:
            solution = judge(MapProblem(self.equation, args), z0, self.stop, self.judged)
            self.report(solution)
            return z0
        solution = run(
            MapProblem(self.equation, args), z0, self.solver, self.stop, trace=self.trace
        )
        self.report(solution)
        value: Tensor = solution.value
        return value

    def judging(self, steps: int) -> Plan:
        """Return a plan that solves nothing: it looks at the state it is given and reports how far `steps` steps have come."""
        return replace(self, judged=steps)


class Gradient(ABC):
    """How a solve is differentiated. Concrete strategies are final: compose them."""

    @abstractmethod
    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the equilibrium, connected to `args` for automatic differentiation."""


GRADIENTS: Registry[Gradient] = Registry("gradient", Gradient)  # type: ignore[type-abstract]
"""All gradient strategies by name."""
