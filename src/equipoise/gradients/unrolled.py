"""Back-propagation through the iteration itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from equipoise.core.validate import require_count, require_fraction
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.detached import find_detached
from equipoise.solvers.buffers import ReusedMemory, ReuseGuard
from equipoise.solvers.fixed_point import FixedPoint
from equipoise.solvers.problem import MapProblem, Problem
from equipoise.solvers.protocol import Point, Solver, Stop

__all__ = ["Unrolled"]


@final
@GRADIENTS.register("unrolled")
@dataclass(frozen=True)
class Unrolled(Gradient):
    """Record exactly `steps` fixed-point steps from the start, and differentiate through them.

    The layer's solver is not used, unless it is `SAM`, which chooses among equilibria: then the
    recorded steps are its own (OptEq, eq. 12). Memory grows with `steps`. The derivative is that of
    the iterate, so it is as far from the equilibrium's as the iterate is from the equilibrium.

    Args:
        steps: Recorded steps.
        damping: Weight of the new value, in (0, 1]; must be 1 with `SAM`, which averages.
    """

    steps: int = 20
    damping: float = 1.0

    exact = True
    depends_on_start = True

    def __post_init__(self) -> None:
        require_count("Unrolled.steps", self.steps)
        require_fraction("Unrolled.damping", self.damping)

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        if plan.trace:
            raise ValueError(
                "Unrolled keeps no trace; take another gradient strategy to look at the path "
                "of a solve."
            )
        if plan.solver.runs_all_steps and self.damping != 1:
            raise ValueError(
                f"Unrolled.damping must be 1 with {type(plan.solver).__name__}, which "
                f"averages; got {self.damping}."
            )
        solver = plan.solver if plan.solver.runs_all_steps else FixedPoint(self.damping)
        problem = MapProblem(plan.equation, args)
        try:
            z = self._unroll(plan, solver, problem, z0)
        except ReusedMemory:
            plan.kept.clear()
            z = self._unroll(plan, solver, problem.copying(), z0)
        made = replace(plan, solver=solver, steps_made=self.steps)
        find_detached(made, z, args)
        plan.solution, plan.members = made.solution, made.members
        return z

    def _unroll(self, plan: Plan, solver: Solver, problem: Problem, z0: Tensor) -> Tensor:
        z, rule = z0, None
        guard = ReuseGuard(z0)
        recent: deque[Tensor] = deque(maxlen=3)  # which the recorded steps keep anyhow
        for step in range(1, self.steps + 1):
            f = problem(z)
            guard.check(f, z, *recent)
            recent.append(f)
            rule = rule or solver.start(problem, z0, f)
            z = rule.advance(Point(z, f)).z
            if step in plan.states:
                plan.kept.append(z)
        # The last value may lie in memory that the step will use again.
        return z.clone() if z is f else z

    def attach_states(self, plan: Plan, args: Sequence[Tensor]) -> list[Tensor]:
        return plan.kept

    def step_limit(self, stop: Stop) -> int:
        return self.steps
