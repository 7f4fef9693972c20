"""Exact derivatives of an equilibrium, of every order, by the implicit function theorem."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from equipoise.core.transforms import full_precision, is_wrapped
from equipoise.core.tree import row_norm, shares_memory
from equipoise.core.validate import require_count, require_positive
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.solvers.auto import pick_adjoint
from equipoise.solvers.loop import run
from equipoise.solvers.problem import Affine, Equation, Linearization, MapProblem
from equipoise.solvers.protocol import SOLVERS, Solver, Status, Stop

__all__ = ["Implicit", "find_detached"]


@final
@GRADIENTS.register("implicit")
@dataclass(frozen=True)
class Implicit(Gradient):
    """Solve the adjoint equation `v = J^T v + g` at the equilibrium and pull `v` back through one step (Bai et al., 2019).

    Exact up to the tolerance of the two solves, in constant memory. The adjoint equation is an
    equilibrium itself, so its own derivatives follow in the same way, and second and higher
    derivatives are exact too. Forward mode solves `t = J t + d`.

    Args:
        solver: A solver or its name; `auto` picks from what the cell declares (see
            `equipoise.solvers.auto`).
        tolerance: Residual relative to the larger of `|v|` and `|g|`; by default the forward
            solve's tolerance.
        max_steps: Steps at most; by default the forward solve's.
    """

    solver: str | Solver = "auto"
    tolerance: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.solver != "auto":
            SOLVERS.resolve(self.solver, also=["auto"])
        if self.tolerance is not None:
            require_positive("Implicit.tolerance", self.tolerance)
        if self.max_steps is not None:
            require_count("Implicit.max_steps", self.max_steps)

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        return find(_Forward(plan, self), z0, args)


def find(task: _Task, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Run a task as one differentiable operation."""
    result: Tensor = _Solve.apply(task, z0, *args)  # type: ignore[no-untyped-call]
    return result


class _Task(ABC):
    """An equation that knows how to solve itself and what its linearised equations are."""

    equation: Equation

    def __init__(self, plan: Plan, settings: Implicit) -> None:
        self.plan = plan
        self.settings = settings

    @abstractmethod
    def solve(self, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        """Return the solution without recording gradients."""

    def linearised(self, *, transpose: bool) -> _Linear:
        return _Linear(self, transpose)


class _Forward(_Task):
    def __init__(self, plan: Plan, settings: Implicit) -> None:
        super().__init__(plan, settings)
        self.equation = plan.equation

    def solve(self, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        return self.plan.solve(z0, args)


class _Linear(_Task):
    """`v = J v + d` or `v = J^T v + d` at an equilibrium `z`, with arguments `(d, z, *args)`."""

    def __init__(self, base: _Task, transpose: bool) -> None:
        super().__init__(base.plan, base.settings)
        self.base = base
        self.transpose = transpose
        self.equation = _LinearEquation(base.equation, transpose)

    def solve(self, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        d, z, *rest = args
        problem = MapProblem(self.base.equation, rest)
        return self.solve_at(problem, z, problem.linearize(z), d)

    def solve_at(self, problem: MapProblem, z: Tensor, local: Linearization, d: Tensor) -> Tensor:
        """Solve at a point where the base equation has been linearised."""
        plan, settings = self.plan, self.settings
        if settings.solver == "auto":
            solver = pick_adjoint(symmetric=problem.symmetric, lipschitz=plan.lipschitz)
        else:
            solver = SOLVERS.resolve(settings.solver)
        stop = Stop(
            tolerance=settings.tolerance or plan.stop.tolerance,
            absolute=0.0,
            max_steps=settings.max_steps or plan.stop.max_steps,
            patience=plan.stop.patience,
            check_every=plan.stop.check_every,
        )
        unit = _unit(d)
        d = d if unit is None else d / unit
        start = d.new_zeros(1, 1).expand_as(
            d
        )  # from zero, where the map is known; and zero takes no memory
        solution = run(
            Affine(problem, z, local, d, transpose=self.transpose), start, solver, stop, f=d
        )
        plan.add_adjoint(solution)
        value: Tensor = solution.value
        failed = ~solution.converged
        if failed.any():
            # A failed solve must not pass for a vanishing gradient: use the first term of the
            # series, or NaN if nothing is finite.
            idle = failed & (value == 0).all(dim=1)
            value = torch.where(idle[:, None], d, value)
            lost = solution.status == Status.NONFINITE
            value = torch.where(lost[:, None], torch.nan, value)
        return value if unit is None else value * unit


def _unit(d: Tensor) -> Tensor | None:
    """The largest entry of each row if the squares of some row would underflow or overflow, else nothing."""
    limits = torch.finfo(d.dtype)
    size = row_norm(d)
    if not d.shape[1] or bool(
        ((size > limits.tiny**0.5 / limits.eps) & (size < limits.max**0.5 * limits.eps)).all()
    ):
        return None
    largest = d.abs().amax(dim=1, keepdim=True)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


class _LinearEquation(Equation):
    def __init__(self, base: Equation, transpose: bool) -> None:
        self.base = base
        self.transpose = transpose
        self.rows = (True, True, *base.rows)
        self.mutable_args = frozenset(place + 2 for place in base.mutable_args)
        self.symmetric = base.symmetric
        self.can_drop_rows = base.can_drop_rows

    def bind(self, args: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        d, z, *rest = args
        step = self.base.bind(rest)
        if self.transpose:

            def adjoint(v: Tensor) -> Tensor:
                pulled: Tensor = _vjp(step, z)[1](v)[0]
                return pulled + d

            return adjoint

        def tangent(v: Tensor) -> Tensor:
            return _push(step, (z,), (v,)) + d

        return tangent


class _Solve(torch.autograd.Function):
    """The solution of a task as a differentiable function of everything the equation depends on.

    The tensors are explicit arguments, because a derivative taken at a detached copy forgets that
    the solution moves with them, which makes second derivatives silently wrong.
    """

    @staticmethod
    def forward(task: _Task, z0: Tensor, *args: Tensor) -> Tensor:
        value = task.solve(z0, args)
        return value.clone() if shares_memory(value, (z0, *args)) else value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        task, _, *args = inputs
        ctx.task = task
        # A step may write to its buffers (a running statistic, say) between forward and backward;
        # torch would refuse that.
        mutable_args = task.equation.mutable_args
        ctx.buffers = {
            i: arg for i, arg in enumerate(args) if i in mutable_args and not is_wrapped(arg)
        }
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
            need and arg.dtype.is_floating_point
            for need, arg in zip(ctx.needs_input_grad[2:], args, strict=True)
        ]
        pull = _pull_recorded if torch.is_grad_enabled() else _pull
        with full_precision(z.device.type):
            return (None, None, *pull(ctx.task, g, z, args, wanted))

    @staticmethod
    def jvp(ctx: Any, _task: None, _z0: Tensor | None, *tangents: Tensor | None) -> Tensor:
        z, args = _saved(ctx)
        moved = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
        if not moved:
            return torch.zeros_like(z)
        with full_precision(z.device.type):
            step = _at(ctx.task.equation, z, args, list(moved))
            d = _push(step, [args[i] for i in moved], list(moved.values()))
            return find(ctx.task.linearised(transpose=False), torch.zeros_like(z), [d, z, *args])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], task: _Task, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Members of an ensemble have their own weights, hence their own problems: solve them one after the other."""
        members = []
        for member in range(info.batch_size):
            z0, *args = (
                t if d is None else t.select(d, member)
                for t, d in zip(tensors, in_dims[1:], strict=True)
            )
            members.append(find(task, z0, args))
        return torch.stack(members), 0


def _saved(ctx: Any) -> tuple[Tensor, list[Tensor]]:
    z, *rest = ctx.saved_tensors
    found = iter(rest)
    return z, [
        ctx.buffers[i] if i in ctx.buffers else next(found)
        for i in range(len(rest) + len(ctx.buffers))
    ]


# Without this torch parses the signature anew at each call, which costs more than a small cell.
_Solve.forward.__signature__ = inspect.signature(_Solve.forward)  # type: ignore[attr-defined]


def _vjp(step: Callable[..., Any], *primals: Tensor) -> tuple[Any, Callable[..., Any]]:
    value, pull = torch.func.vjp(step, *primals)[:2]
    return value, pull


def _push(
    step: Callable[..., Tensor], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Tensor:
    """`J t` as the derivative of `u -> J^T u`, because torch cannot nest forward mode in forward mode."""
    value, pull = _vjp(step, *primals)
    _, push = _vjp(pull, torch.zeros_like(value))
    moved: Tensor = push(tuple(tangents))[0]
    return moved


def _at(
    equation: Equation, z: Tensor, args: Sequence[Tensor], places: Sequence[int]
) -> Callable[..., Tensor]:
    """The step at `z` as a function of the arguments in `places` alone."""

    def step(*chosen: Tensor) -> Tensor:
        full = list(args)
        for place, tensor in zip(places, chosen, strict=True):
            full[place] = tensor
        return equation.bind(full)(z)

    return step


def _pull_recorded(
    task: _Task, g: Tensor, z: Tensor, args: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Pull `g` back to the arguments by operations that can be differentiated again.

    `torch.func.vjp` takes its arguments as independent; `torch.autograd.grad` at the attached
    solution would count the path through the solution twice.
    """
    v = find(task.linearised(transpose=True), torch.zeros_like(g), [g, z, *args])
    places = [place for place, want in enumerate(wanted) if want]
    pulled: list[Tensor | None] = [None] * len(args)
    if places:
        if not any(is_wrapped(tensor) for tensor in (g, z, *args)):
            leaves = [
                arg.detach().requires_grad_(want) for arg, want in zip(args, wanted, strict=True)
            ]
            task.plan.inspect(task.equation.bind(leaves)(z.detach()), leaves)
        _, pull = _vjp(_at(task.equation, z, args, places), *(args[i] for i in places))
        for place, tensor in zip(places, pull(v), strict=True):
            pulled[place] = tensor
    return pulled


def _pull(
    task: _Task, g: Tensor, z: Tensor, args: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Pull `g` back to the arguments, first derivatives only: one recorded step serves the adjoint solve and the pull-back."""
    z = z.detach()
    leaves = [arg.detach().requires_grad_(want) for arg, want in zip(args, wanted, strict=True)]
    chosen = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
    problem = MapProblem(task.equation, args)
    with torch.set_grad_enabled(task.equation.linearize_keeps_graph):
        local = task.equation.declared(z, leaves if task.equation.linearize_keeps_graph else args)
    if local is None:
        problem = MapProblem(task.equation, leaves)
        local = problem.linearize(z)
    v = task.linearised(transpose=True).solve_at(problem, z, local, g)
    if not chosen:
        return [None] * len(args)
    recorded = local.graph
    if recorded is None:
        with torch.enable_grad():
            recorded = task.equation.bind(leaves)(z)
    task.plan.inspect(recorded, [*chosen, *([] if local.point is None else [local.point])])
    found = iter(
        torch.autograd.grad(recorded, chosen, v, allow_unused=True)
        if recorded.requires_grad
        else [None] * len(chosen)
    )
    return [next(found) if want else None for want in wanted]


def find_detached(plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
    """Return the equilibrium without connecting it to `args`; unlike `Plan.solve`, also under `torch.func` transforms."""
    return find(_Forward(plan, Implicit()), z0.detach(), [arg.detach() for arg in args])
