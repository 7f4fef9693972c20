"""What every gradient strategy shares: the plan of a solve, and the form of a strategy."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from equipoise.core.registry import Registry
from equipoise.core.tree import shares_memory
from equipoise.gradients.start import StartStates
from equipoise.solvers.coupling import CouplingError
from equipoise.solvers.error import offer_error, tighten
from equipoise.solvers.loop import judge, run
from equipoise.solvers.policy import Direction, OnFailure, SolveLog
from equipoise.solvers.problem import Equation, MapProblem, Problem
from equipoise.solvers.protocol import Solution, Solver, Stop
from equipoise.solvers.solve import unpack_solution

__all__ = ["GRADIENTS", "Gradient", "Plan"]


@dataclass
class Plan:
    """One forward solve and the backward solves through it: what is solved, and how.

    Attributes:
        equation: The equation on matrices.
        solver: The forward solver.
        stop: Its stopping rule.
        log: Hears of every solve.
        inspect: Called with a recorded step and the tensors that it may depend on.
        lipschitz: A bound of the equation's Lipschitz constant in the state, if the cell declares
            one.
        on_failure: What to do when samples do not converge; by default what the log says.
        trace: Whether to keep the path.
        states: Steps after which to keep the iterate.
        steps_made: Steps that were made already; then `solve` only looks at its start.
        given: Whether `solve` takes its start for the equilibrium.
        starts: Where the solves start, if earlier ones are remembered.
        solution: The forward solution, once there is one.
        kept: The iterates after `states`, once there is a solution.
        members: How many forward solves there were: one, or as many as `vmap` has members.
        returned: What the user was given of it, attached for differentiation. A weak reference,
            since what is attached keeps the plan.
    """

    equation: Equation
    solver: Solver
    stop: Stop
    log: SolveLog
    inspect: Callable[[Tensor, Sequence[Tensor]], None]
    lipschitz: float | None = None
    on_failure: OnFailure | None = None
    trace: bool = False
    states: tuple[int, ...] = ()
    steps_made: int = 0
    given: bool = False
    starts: StartStates | None = None
    solution: Solution | None = field(default=None, init=False)
    kept: list[Tensor] = field(default_factory=list, init=False)
    members: int = field(default=0, init=False)
    returned: weakref.ref[Solution] | None = field(default=None, init=False)

    def solve(self, problem: Problem, z0: Tensor) -> Tensor:
        """Return the solution of the equation with its arguments, without recording gradients."""
        if self.given:
            return z0
        if self.steps_made:
            flat = judge(problem, z0, self.solver, self.stop, self.steps_made)
        else:
            with self.remembering_refusals():
                flat = run(
                    problem,
                    z0,
                    self.solver,
                    self.stop,
                    near=self.starts is not None,
                    trace=self.trace,
                    states=self.states,
                    check=lambda: self.check_due("forward", z0),
                )
            self.kept = flat.states or []
        if self.stop.tolerance_on == "error":
            tighten(problem, flat, self.lipschitz)
        value: Tensor = flat.value
        flat.value = value.clone()  # the caller may write to the layer's output
        # A residual that was rounded as the lower precision is proves nothing.
        offer_error(problem, flat, self.lipschitz if self.equation.lower is None else None)
        if self.starts is not None:
            self.starts.keep("forward", flat)
        self.solution = unpack_solution(flat, self.equation.layout)
        self.members += 1
        self.log.add("forward", self.solution, self.on_failure)
        return value

    def find(self, z0: Tensor, args: Sequence[Tensor], *, inspect: bool = False) -> Tensor:
        """Return the solution from `z0` without connecting it to `args`, in memory of its own.

        Args:
            z0: The start.
            args: The arguments, which no transform is at work on.
            inspect: Whether to refuse trainable tensors, of which the result would know nothing.
        """
        z0, problem = z0.detach(), MapProblem(self.equation, args)
        if inspect:
            problem.inspect_first(lambda value: self.inspect(value, ()))
        value = self.solve(problem, z0)
        return value.clone() if shares_memory(value, (z0, *args)) else value

    def check_due(self, direction: Direction, z: Tensor) -> bool:
        """Return whether it is time to check that the samples of a solve are independent."""
        counts = self.log.forward if direction == "forward" else self.log.backward
        return counts.checks.due((len(z), self.equation.training))

    @contextmanager
    def remembering_refusals(self) -> Iterator[None]:
        """Have every later solve checked if samples prove to depend on each other."""
        try:
            yield
        except CouplingError:
            self.log.forward.checks.always = self.log.backward.checks.always = True
            raise

    @property
    def evaluations(self) -> int:
        """Evaluations that the forward solve took, of the sample that took most."""
        if self.solution is None or not self.solution.evaluations.numel():
            return 0
        return int(self.solution.evaluations.max())

    def add_adjoint(self, flat: Solution) -> None:
        """Take in the solution of an adjoint equation at the equilibrium."""
        if self.starts is not None:
            self.starts.keep("backward", flat)
        adjoint = unpack_solution(flat, self.equation.layout)
        returned = None if self.returned is None else self.returned()
        for solution in (self.solution, returned):
            if solution is not None:
                solution.adjoint = adjoint
        self.log.add("backward", adjoint, self.on_failure)


class Gradient(ABC):
    """How a solve is differentiated. Concrete strategies are final: compose them.

    Attributes:
        exact: Whether the derivatives, of every order, are those of the value that is returned.
        depends_on_start: Whether the value that is returned, or its derivatives, are those of the
            steps from the start, and not of the equilibrium alone.
        tolerance: That of the adjoint solve, if it has one of its own.
    """

    exact: ClassVar[bool] = False
    depends_on_start: ClassVar[bool] = False
    tolerance: float | None = None

    @abstractmethod
    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the equilibrium, connected to `args` for automatic differentiation."""

    def attach_states(self, plan: Plan, args: Sequence[Tensor]) -> list[Tensor]:
        """Return the iterates that the solve kept, each as if it were the equilibrium."""
        at = replace(plan, given=True, states=(), starts=None)
        return [self.attach(at, z, args) for z in plan.kept]

    def step_limit(self, stop: Stop) -> int:
        """Return how many steps a solve makes at most."""
        return stop.max_steps


GRADIENTS: Registry[Gradient] = Registry("gradient", Gradient)  # type: ignore[type-abstract]
"""All gradient strategies by name."""
