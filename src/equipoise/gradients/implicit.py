"""Exact derivatives of an equilibrium, of every order, by the implicit function theorem."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from equipoise.core.transforms import (
    full_precision,
    is_transformed,
    is_wrapped,
    jvp_depth,
    outside_transforms,
    unwrapped,
)
from equipoise.core.tree import row_norm, shares_memory, to_numpy
from equipoise.core.validate import require_count, require_positive
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.change import ChangeCheck
from equipoise.gradients.start import rescale
from equipoise.solvers.auto import pick_adjoint, solve_adjoint
from equipoise.solvers.linear_problem import LinearProblem, func_jvp, func_vjp
from equipoise.solvers.loop import run
from equipoise.solvers.measure import comfortable
from equipoise.solvers.problem import Linearization, MapProblem, Problem
from equipoise.solvers.protocol import SOLVERS, Solution, Solver, Status, Stop

__all__ = ["Implicit"]


@final
@GRADIENTS.register("implicit")
@dataclass(frozen=True)
class Implicit(Gradient):
    """Solve the adjoint equation `v = J^T v + g`, then pull `v` back through one step.

    See Bai et al. (2019). Exact up to the tolerance of the two solves, in constant memory. The
    adjoint equation is an equilibrium itself, so its own derivatives follow in the same way, and
    second and higher derivatives are exact too. Forward mode solves `t = J t + d`.

    Args:
        solver: A solver, its name or a table; `auto` picks from what the cell declares (see
            `equipoise.solvers.auto`).
        tolerance: Residual relative to the larger of `|v|` and `|g|`; by default the forward
            solve's tolerance.
        max_steps: Steps at most; by default the forward solve's.
    """

    solver: str | Mapping[str, Any] | Solver = "auto"
    tolerance: float | None = None
    max_steps: int | None = None

    exact = True

    def __post_init__(self) -> None:
        if self.solver != "auto":
            made = SOLVERS.resolve(self.solver, also=["auto"])
            if isinstance(self.solver, Mapping):
                object.__setattr__(self, "solver", made)
        if self.tolerance is not None:
            require_positive("Implicit.tolerance", self.tolerance)
        if self.max_steps is not None:
            require_count("Implicit.max_steps", self.max_steps)

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        if jvp_depth(args) > 1:
            raise ValueError(
                "Implicit must be in one forward-mode transform at most, because torch gives wrong "
                "derivatives of its own functions in two; got jacfwd or jvp in another one. Use "
                "torch.func.hessian, or jacrev for one of them."
            )
        return self.find(plan, z0, args)

    def find(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the equilibrium; arguments may have tangents of one forward-mode transform."""
        recording = torch.is_grad_enabled()
        if not (recording and any(arg.requires_grad for arg in args)) and not is_transformed(*args):
            return plan.find(z0, args, inspect=recording)
        return _Task(plan, self, MapProblem(plan.equation, args)).find(z0)


@dataclass
class _Task:
    """A problem of a plan: the forward one, or one of the linear ones that its derivatives need.

    Attributes:
        plan: The forward solve.
        settings: How linear problems are solved.
        problem: The problem.
        recording: Whether derivatives may be asked for.
        wanted: With respect to which arguments.
        solved: The problem as it was solved, once it is.
        check: Sees whether backward evaluates the map of the forward solve.
        recorded: The last evaluation of the solve, if backward can use it.
    """

    plan: Plan
    settings: Implicit
    problem: Problem
    recording: bool = False
    wanted: Sequence[bool] = ()
    solved: Problem | None = None
    check: ChangeCheck | None = None
    recorded: _Recorded | None = None

    def find(self, z0: Tensor) -> Tensor:
        """Solve as one differentiable operation."""
        args = self.problem.args
        wanted = [arg.requires_grad or is_wrapped(arg) for arg in args]
        recording = torch.is_grad_enabled() and any(wanted)
        task = _Task(self.plan, self.settings, self.problem, recording, wanted)
        result: Tensor = _Solve.apply(task, z0, *args)  # type: ignore[no-untyped-call]
        return result

    def freeze(self) -> _Task:
        """Return the task for its derivatives: what the step read is what they will use."""
        problem, solution = (self.solved or self.problem).freeze(), self.plan.solution
        check = None
        if solution is not None and not isinstance(problem, LinearProblem):
            check = ChangeCheck(solution, self.plan.stop, whole=self.plan.given)
        return _Task(self.plan, self.settings, problem, True, (), None, check, self.recorded)

    def with_args(self, args: Sequence[Tensor]) -> _Task:
        """Return the same task with other arguments."""
        made = object.__new__(_Task)  # copy.copy takes as long as two small operations
        vars(made).update(vars(self), problem=self.problem.with_args(args))
        return made

    def linear(self, z: Tensor, g: Tensor, args: Sequence[Tensor], *, transpose: bool) -> _Task:
        """Return the linear problem at a solution `z` with constant term `g`."""
        made = self.with_args(args)
        made.problem = LinearProblem(made.problem, z, g, transpose=transpose)
        return made

    def solve(self, z0: Tensor) -> Tensor:
        """Solve without recording gradients."""
        if isinstance(self.problem, LinearProblem):
            return self.solve_linear(self.problem.linearized())
        return self.plan.solve(self.problem, z0)

    def solve_linear(self, problem: LinearProblem) -> Tensor:
        """Solve a linear problem that has its linearisation, from zero if nothing is remembered."""
        plan, settings = self.plan, self.settings
        stop = _adjoint_stop(plan.stop, settings.tolerance, settings.max_steps)
        unit = _unit(problem.g)
        if unit is not None:
            problem = problem.with_constant(problem.g / unit)
        g = problem.g
        # At zero the map is known, and a zero expanded from one entry takes no memory.
        start, f = g.new_zeros(1, 1).expand_as(g), g
        kept = plan.starts.backward(g) if plan.starts is not None and problem.transpose else None
        if kept is not None:
            start, f = rescale(problem, kept)
        check = partial(plan.check_due, "backward", g)
        if settings.solver == "auto":
            solver = pick_adjoint(
                problem,
                g.shape,
                lipschitz=plan.lipschitz,
                forward=plan.solver,
                steps=plan.evaluations,
            )
            with plan.remembering_refusals():
                solution = solve_adjoint(problem, start, f, solver, stop, check)
        else:
            solver = SOLVERS.resolve(settings.solver)
            with plan.remembering_refusals():
                solution = run(problem, start, solver, stop, f=f, check=check)
        plan.add_adjoint(solution)
        value = _never_silently_zero(solution, g)
        return value if unit is None else value * unit


@lru_cache(maxsize=64)  # checking a new one for each solve takes longer than a small step
def _adjoint_stop(forward: Stop, tolerance: float | None, max_steps: int | None) -> Stop:
    """Return the stopping rule of linear problems, which need nothing but a relative residual."""
    return Stop(
        tolerance=tolerance or forward.tolerance,
        absolute=0.0,
        max_steps=max_steps or forward.max_steps,
        patience=forward.patience,
        check_every=forward.check_every,
        norm=forward.norm,
    )


def _never_silently_zero(solution: Solution, g: Tensor) -> Tensor:
    """Return the solution of a linear problem so that a failure cannot pass for a zero gradient.

    A failed sample that is zero becomes `g`, the first term of the series; one that met NaN or
    infinity becomes NaN.
    """
    value: Tensor = solution.value
    if solution.all_converged:
        return value
    failed = ~solution.converged
    zero = failed & (value == 0).all(dim=1)
    if bool(zero.any()):
        value = torch.where(zero[:, None], g, value)
    nonfinite = solution.status == Status.NONFINITE
    return torch.where(nonfinite[:, None], torch.nan, value) if bool(nonfinite.any()) else value


def _unit(g: Tensor) -> Tensor | None:
    """Return the largest entry of each row if squares of some row would underflow or overflow."""
    low, high = comfortable(g.dtype)
    sizes = to_numpy(row_norm(g))
    ordinary = (low < sizes) & (sizes < high)  # false for NaN
    if not g.numel() or np.count_nonzero(ordinary) == len(sizes):
        return None
    largest = g.abs().amax(dim=1, keepdim=True)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


class _Recorded:
    """The evaluation of a forward solve that was its last, with its history.

    Backward linearises the step at the solution, and the solve has just evaluated it there to prove
    the residual: one evaluation does for both.

    Args:
        problem: The problem as backward will see it: its arguments are leaves.

    Attributes:
        leaves: These.
        local: The linearisation.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.leaves = problem.args
        self.local: Linearization | None = None
        self._z: Tensor | None = None

    @classmethod
    def prepare(cls, problem: Problem, wanted: Sequence[bool]) -> _Recorded | None:
        """Have the last evaluation of a solve recorded, if that can be."""
        if not isinstance(problem, MapProblem) or not problem.equation.linearize_is_step:
            return None
        # What is saved under hooks (checkpoints, tensors moved elsewhere) is theirs to recompute.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        keeps = problem.linearize_keeps_graph and not problem.mutable_args and hooks is None
        if not keeps or is_transformed(*problem.args):
            return None
        made = cls(problem.with_args(_leaves(problem.args, wanted)))
        problem.recorder = made.evaluate
        return made

    def evaluate(self, z: Tensor) -> Tensor | None:
        """Return the map at `z`, recorded, if the cell can do that."""
        self.local = None  # before the next one takes its memory
        with torch.enable_grad():
            self.local = self.problem.declared(z.detach())
        self._z = z
        return None if self.local is None else self.local.value

    def is_at(self, value: Tensor) -> bool:
        """Return whether the last evaluation was at the solution of all samples."""
        at, self._z = self._z, None
        return self.local is not None and at is not None and torch.equal(at, value)


class _Solve(torch.autograd.Function):
    """The solution of a task as a differentiable function of everything the problem depends on.

    The tensors are explicit arguments, because a derivative taken at a detached copy forgets that
    the solution moves with them, which makes second derivatives silently wrong.
    """

    @staticmethod
    def forward(task: _Task, z0: Tensor, *args: Tensor) -> Tensor:
        solved = task.with_args(args)
        check = solved.problem.watch_copy(task.wanted) if task.recording else None
        recorded = _Recorded.prepare(solved.problem, task.wanted) if task.recording else None
        value = solved.solve(z0)
        task.recorded = recorded if recorded is not None and recorded.is_at(value) else None
        if check is not None:
            check(z0)
        task.solved = solved.problem if task.recording else None
        return value.clone() if shares_memory(value, (z0, *args)) else value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        task, _, *args = inputs
        ctx.task = task.freeze() if task.recording else task
        # A step may write to its buffers (a running statistic, say) between forward and backward;
        # torch would refuse that.
        problem = ctx.task.problem
        ctx.buffers = {i: problem.args[i] for i in problem.mutable_args if not is_wrapped(args[i])}
        ctx.dtypes = [arg.dtype for arg in args]
        kept = [output, *(arg for i, arg in enumerate(args) if i not in ctx.buffers)]
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if torch._C._functorch.is_legacy_batchedtensor(g):
            raise ValueError(
                "Implicit must see one gradient at a time; got a batch "
                "(is_grads_batched=True). Use torch.func.jacrev or vmap."
            )
        z, args = _saved(ctx)
        wanted = [
            need and (arg.dtype.is_floating_point or arg.dtype.is_complex)
            for need, arg in zip(ctx.needs_input_grad[2:], args, strict=True)
        ]
        pull = _pull_differentiably if torch.is_grad_enabled() else _pull
        with full_precision(z.device.type):
            return (None, None, *pull(ctx.task, g, z, args, wanted))

    @staticmethod
    def jvp(ctx: Any, _task: None, _z0: Tensor | None, *tangents: Tensor | None) -> Tensor:
        z, args = _saved(ctx)
        moved = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        if not moved:
            return torch.zeros_like(z)
        task: _Task = ctx.task
        with full_precision(z.device.type):
            step = _in_args(task.problem, z, args, list(moved))
            g = func_jvp(step, [args[i] for i in moved], list(moved.values()))
            return task.linear(z, g, args, transpose=False).find(torch.zeros_like(z))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], task: _Task, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Solve the members of an ensemble in turn: their own weights make their own problems."""
        members = []
        for member in range(info.batch_size):
            z0, *args = (
                t if d is None else t.select(d, member)
                for t, d in zip(tensors, in_dims[1:], strict=True)
            )
            members.append(task.with_args(args).find(z0))
        return torch.stack(members), 0


def _saved(ctx: Any) -> tuple[Tensor, list[Tensor]]:
    z, *rest = ctx.saved_tensors
    found = iter(rest)
    args = [
        ctx.buffers[i] if i in ctx.buffers else next(found)
        for i in range(len(rest) + len(ctx.buffers))
    ]
    for arg, dtype in zip(args, ctx.dtypes, strict=True):
        if arg.dtype != dtype:
            raise RuntimeError(
                f"Weights must keep their dtype until backward; got one that was {dtype} and is "
                f"{arg.dtype} now. Convert the layer before its forward pass, or after backward."
            )
    return z, args


# Without this torch parses the signature anew at each call, which costs more than a small cell.
_Solve.forward.__signature__ = inspect.signature(_Solve.forward)  # type: ignore[attr-defined]


def _in_args(
    problem: Problem, z: Tensor, args: Sequence[Tensor], indices: Sequence[int]
) -> Callable[..., Tensor]:
    """Return the step at `z` as a function of the arguments at `indices` alone."""
    problem = problem.uncompiled()

    def step(*chosen: Tensor) -> Tensor:
        full = list(args)
        for index, tensor in zip(indices, chosen, strict=True):
            full[index] = tensor
        return problem.with_args(full).with_own_buffers()(z)

    return step


def _pull_differentiably(
    task: _Task, g: Tensor, z: Tensor, args: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Pull `g` back to the arguments by operations that can be differentiated again.

    `torch.func.vjp` takes its arguments as independent; `torch.autograd.grad` at the attached
    solution would count the path through the solution twice.
    """
    _refuse_change_of_values(task, z, args, wanted)
    v = task.linear(z, g, args, transpose=True).find(torch.zeros_like(g))
    indices = [index for index, want in enumerate(wanted) if want]
    pulled: list[Tensor | None] = [None] * len(args)
    if indices:
        step = _in_args(task.problem, z, args, indices)
        _, pull = func_vjp(step, *(args[i] for i in indices))
        for index, tensor in zip(indices, pull(v), strict=True):
            pulled[index] = tensor
    return pulled


def _refuse_change_of_values(
    task: _Task, z: Tensor, args: list[Tensor], wanted: list[bool]
) -> None:
    """Evaluate the step at the values behind the tensors, and refuse what would be lost."""
    values = unwrapped((z, *args))
    if values is None or not any(wanted):
        return
    with outside_transforms():
        z, *args = values
        leaves = _leaves(args, wanted)
        problem = task.problem.with_args(leaves)
        value = problem(z.detach())
        if task.check is not None:
            task.check.refuse(problem, z.detach(), value.detach())
        task.plan.inspect(value, leaves)


def _pull(
    task: _Task, g: Tensor, z: Tensor, args: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Pull `g` back to the arguments, for first derivatives only.

    One recorded step serves the adjoint solve and the pull-back.
    """
    z = z.detach()
    kept, task.recorded = task.recorded, None  # its history serves once
    leaves = _leaves(args, wanted) if kept is None else kept.leaves
    chosen = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
    problem, recorded = task.problem.with_args(args), task.problem.with_args(leaves)
    local = None if kept is None else kept.local
    if local is None:
        keeps_graph = problem.linearize_keeps_graph
        with torch.set_grad_enabled(keeps_graph):
            local = (recorded if keeps_graph else problem).declared(z)
    declared = local is not None
    if local is None:
        problem, local = recorded, recorded.linearize(z)
    if task.check is not None:
        task.check.refuse(problem, z, local.value, declared=declared)
    v = task.solve_linear(LinearProblem(problem, z, g, transpose=True, local=local))
    if not chosen:
        return [None] * len(args)
    value, point = local.graph, local.point
    del kept, local  # what the products needed is free before a step is recorded
    if value is None:
        with torch.enable_grad():
            value = recorded(z)
    known = [leaf for leaf in leaves if leaf.requires_grad]
    task.plan.inspect(value, [*known, *([] if point is None else [point])])
    found = iter(
        torch.autograd.grad(value, chosen, v, allow_unused=True)
        if value.requires_grad
        else [None] * len(chosen)
    )
    return [next(found) if want else None for want in wanted]


def _leaves(args: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [arg.detach().requires_grad_(want) for arg, want in zip(args, wanted, strict=True)]
