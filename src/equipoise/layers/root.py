"""Roots of plain functions, differentiable in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equipoise.core.transforms import is_transformed
from equipoise.core.tree import Shared, Tree, row_norm, to_numpy
from equipoise.core.validate import SettingError
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.detached import find_detached
from equipoise.gradients.implicit import Implicit
from equipoise.layers.equilibrium import MAX_STEPS, TOLERANCE
from equipoise.layers.function import FunctionCell, FunctionLayer
from equipoise.layers.root_check import MAX_DENSE, RootCheck, Verdict, gain_of
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import func_vjp
from equipoise.solvers.loop import run
from equipoise.solvers.newton import Newton
from equipoise.solvers.policy import OnFailure, SolveLog
from equipoise.solvers.problem import Equation, MapProblem, Problem
from equipoise.solvers.protocol import Solution, Solver, Status, Stop, Trace
from equipoise.solvers.remedy import Direction, find_remedy
from equipoise.solvers.solve import unpack_solution

__all__ = ["root"]

MAX_ROUNDS = 20
"""How often the search starts anew in other units."""
MAX_POLISH = 5
"""Newton steps of the check itself at most, after each of these."""
SHORT = 0.01
"""Relative length from which on they are made."""
ROUNDINGS = 16
"""A part of the state this many roundings long beside the rest may be zero."""


class RootCell(FunctionCell):
    """`a z - b g(z, *args)`, whose equilibrium at `a = 1` is a root of `g` for any `b`."""

    _step_name = "root.g"

    def inject(self, x: Sequence[Any]) -> list[Shared]:
        factors, *args = x
        return [Shared(factors), *super().inject(args)]

    def step(self, z: Tree, context: Sequence[Tensor]) -> Tree:
        factors, *args = context
        z_leaves, spec = pytree.tree_flatten(z)
        leaves, found = pytree.tree_flatten(self.enter(self.call(self.readout(z, args), args)))
        name = type(self).__name__
        if found != spec or any(
            not isinstance(own, Tensor) or own.shape != leaf.shape
            for own, leaf in zip(leaves, z_leaves, strict=True)
        ):
            shapes = [tuple(getattr(own, "shape", ())) for own in leaves]
            wanted = [tuple(leaf.shape) for leaf in z_leaves]
            raise ValueError(
                f"{name}.g must return the tree and the shapes of its state; got shapes "
                f"{shapes} for {wanted}."
            )
        for own, leaf in zip(leaves, z_leaves, strict=True):
            lower = own.is_complex() == leaf.is_complex() and torch.is_autocast_enabled(
                leaf.device.type
            )
            if own.device != leaf.device or (own.dtype != leaf.dtype and not lower):
                raise ValueError(
                    f"{name}.g must keep the dtype and the device of its state; got {own.dtype} on "
                    f"{own.device} for {leaf.dtype} on {leaf.device}."
                )
        a, b = ([row.view(-1, *[1] * (leaf.dim() - 1)) for leaf in z_leaves] for row in factors)
        moved = [a[i] * leaf - b[i] * leaves[i] for i, leaf in enumerate(z_leaves)]
        return pytree.tree_unflatten(moved, spec)


RootCell.__name__ = "root"  # what messages call it


def _factors(like: Tensor, a: float, b: Tensor | float) -> Tensor:
    """The context tensor of `RootCell`, shape (2, rows) or (2, 1)."""
    b = torch.as_tensor(b, dtype=like.dtype, device=like.device).reshape(-1)
    return torch.stack([torch.full_like(b, a), b])


def _g(equation: Equation, args: Sequence[Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    """`g` on matrices."""
    return equation.bind([_factors(like, 0.0, -1.0), *args[1:]])


@dataclass
class _Search(Plan):
    """Finds roots: solves `z = z - b g(z)`, and sees by Newton's step whether these are roots.

    Attributes:
        gain: The factor `b` at the solution.
    """

    gain: Tensor | None = field(default=None, init=False)

    def solve(self, problem: Problem, z0: Tensor) -> Tensor:
        assert isinstance(problem, MapProblem)
        equation, args = problem.equation, problem.args
        check = RootCheck(_g(equation, args, z0), problem, self.stop)
        z, verdict, stop = z0, check.judge(z0), self.stop
        start = verdict.size
        made = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        work = made.clone()
        trace: Trace | None = None
        for _ in range(MAX_ROUNDS):
            scaled = MapProblem(equation, [_factors(z, 1.0, verdict.gain), *args[1:]])
            left = self.stop.max_steps - int(made.max()) if len(made) else 1
            flat = run(
                scaled, z, self.solver, replace(stop, max_steps=max(left, 1)), trace=self.trace
            )
            z, made, work = flat.value, made + flat.steps, work + flat.evaluations
            if flat.trace is not None:
                trace = flat.trace if trace is None else _joined(trace, flat.trace)
            verdict = check.judge(z)
            z = _polish(check, z, verdict)
            start = np.where(start > 0, start, verdict.size)
            z = _round_to_zero(check, z, verdict, torch.finfo(z.dtype).eps * start)
            # `b g` is small enough and the step is not: the Jacobian has changed on the way, or is
            # badly conditioned.
            again = flat.converged & ~torch.from_numpy(verdict.reached).to(z.device)
            if not bool(again.any()):
                break
            if left <= int(flat.steps.max()):
                flat.status[again] = int(Status.MAX_STEPS)
                break
            rows = to_numpy(again)
            wanted = to_numpy(flat.residual)[rows] * np.minimum(
                self.stop.tolerance / verdict.relative[rows], 1.0
            )
            least = 4 * torch.finfo(z.dtype).eps
            stop = replace(self.stop, tolerance=max(float(wanted.min()) / 2, least))
        else:
            flat.status[again] = int(Status.STALLED)
        whole = np.linalg.norm(verdict.size, axis=1, keepdims=True)
        floor = ROUNDINGS * torch.finfo(z.dtype).eps * np.minimum(start, whole)
        z = _round_to_zero(check, z, verdict, floor, floor)
        self.gain = verdict.gain
        flat.status[torch.from_numpy(verdict.reached).to(z.device)] = int(Status.CONVERGED)
        residual = torch.from_numpy(verdict.relative).to(z)
        flat = replace(
            flat,
            value=z,
            residual=residual,
            scale=row_norm(z),
            steps=made,
            evaluations=work,
            trace=trace,
            stop=self.stop,
        )
        self.solution: Solution | None = unpack_solution(flat, equation.layout)
        self.members += 1
        self.log.add("forward", self.solution, self.on_failure)
        return z


def _polish(check: RootCheck, z: Tensor, verdict: Verdict) -> Tensor:
    """Return `z` after Newton steps of rows that are not yet roots, as long as they shorten.

    Solvers see `z - b g(z)`, in which a small `b g` is rounded; the steps of the check are not.
    """
    for _ in range(MAX_POLISH):
        near = ~verdict.reached & (verdict.relative < SHORT)
        if not near.any():
            break
        moved = torch.where(torch.from_numpy(near).to(z.device)[:, None], z + verdict.step, z)
        other = check.judge(moved)
        rows = near & (other.reached | (other.relative < verdict.relative / 4))
        if not rows.any():
            break
        z = torch.where(torch.from_numpy(rows).to(z.device)[:, None], moved, z)
        verdict.replace_rows(rows, other)
    return z


def _round_to_zero(
    check: RootCheck,
    z: Tensor,
    verdict: Verdict,
    negligible: np.ndarray,
    floor: np.ndarray | None = None,
) -> Tensor:
    """Return `z` with negligible parts set to zero in rows that are roots then.

    Relative to themselves, numbers that should be zero are never found: towards a multiple root at
    zero each step makes them smaller by the same factor, and beside others they are rounding.

    Args:
        check: What judges.
        z: The point.
        verdict: What is true of it; changed where parts are set to zero.
        negligible: Norms of parts up to which they are.
        floor: Steps that parts which are set to zero may have; none by default.
    """
    small = (verdict.size <= negligible) & ~verdict.passed
    small[verdict.reached] = False
    if not small.any():
        return z
    columns = check.columns(z)
    mask = np.repeat(small, columns, axis=1)
    rounded = torch.where(torch.from_numpy(mask).to(z.device), 0.0, z)
    other = check.judge(rounded, 0.0 if floor is None else np.where(small, floor, 0.0))
    rows = other.reached & ~verdict.reached
    verdict.replace_rows(rows, other)
    return torch.where(torch.from_numpy(rows).to(z.device)[:, None], rounded, z)


def _joined(first: Trace, second: Trace) -> Trace:
    """Two parts of a path as one; the second begins where the first ends."""
    residual = torch.cat([first.residual, second.residual[1:]])
    return Trace(residual, first.state + second.state[1:])


@dataclass(frozen=True)
class _AtRoot(Gradient):
    """The derivative of a root: that of the equilibrium of `z - b g(z)`, with `b` at the root.

    The factor cancels: `(b J)^-1 (b dg) = J^-1 dg`. But it keeps the adjoint equation as well
    scaled as the problem allows.

    Args:
        inner: How the adjoint equation is solved.
    """

    inner: Implicit

    exact = True

    def attach(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> Tensor:
        search = _Search(**{own.name: getattr(plan, own.name) for own in fields(Plan) if own.init})
        z = find_detached(search, z0, args)
        gain = search.gain
        if gain is None or is_transformed(z, *args):
            detached = [arg.detach() for arg in args]
            value, pull = func_vjp(_g(plan.equation, detached, z), z.detach())
            gain = gain_of(value, lambda v: pull(v)[0]).detach()
        plan.solution, plan.members, plan.given = search.solution, search.members, True
        return self.inner.attach(plan, z, [_factors(z, 1.0, gain), *args[1:]])


def _find_remedy(solution: Solution, status: Status, direction: Direction) -> str:
    """Return what to try after a failed search or adjoint solve, as the end of a sentence."""
    if solution.stop.tolerance < 10 * torch.finfo(solution.residual.dtype).eps:
        return find_remedy(solution, status, direction)
    if direction == "backward":
        if status == Status.NONFINITE:
            return (
                "look for NaN or infinity in the gradient of the loss and in the derivatives of g "
                "at the root"
            )
        return (
            "where the Jacobian of g is singular, as at multiple roots, the root has no derivative "
            "in the arguments; elsewhere try Implicit(solver='dense') or loosen "
            "Implicit(tolerance=...)"
        )
    more = "raise max_steps, or " if status == Status.MAX_STEPS else ""
    return f"there may be no root near; {more}start from another z0, or try another solver"


def root(
    g: Callable[..., Tree],
    z0: Tree,
    *args: Any,
    solver: str | Solver = "newton",
    gradient: str | Gradient = "implicit",
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
    stop: Stop | None = None,
    on_failure: OnFailure = "warn",
    coupled: bool = False,
    trace: bool = False,
    return_solution: bool = False,
) -> Any:
    """Return a solution of `g(z, *args) = 0`, differentiable in the arguments.

    A root has converged when Newton's step `d`, the solution of `J d = -g`, is at most `tolerance`
    times as long as `z`, in each tensor of the state (or as `stop.norm` says), and the step after
    it is shorter (see `equipoise.layers.root_check`). The length of `d`, relative to `z`, is the
    `residual` of the `Solution`: to first order the distance to the root, and infinite where there
    is no such step. Unlike `|g|` it does not change when `g` is multiplied by a number or a matrix
    (Deuflhard, 2011, section 2.1), so that small values of `g` pass for no root. Parts of the state
    that become negligible are set to zero, and converge if that is a root.

    The solver runs on `z = z - b g(z)`, with `b` the inverse of the gain of `J` where it is, so any
    solver for equilibria will do. The derivative is that of the implicit function theorem,
    `dz = -J^-1 dg`, of every order. What is said of arguments, modules, closures and `coupled` for
    `fixed_point` holds here too.

    Args:
        g: The function; returns the tree and the shapes of `z0`.
        z0: Where to start: one tensor or a tree of tensors.
        *args: What else `g` needs: trees of tensors, and anything that is no tensor.
        solver: A solver or its name; `newton` and `auto` are Newton's method, with dense matrices
            for states up to 64 numbers wide.
        gradient: `implicit`, or an `Implicit` with settings; its automatic solver is GMRES.
        tolerance: Relative length of Newton's step to reach; also for the adjoint solve.
        max_steps: Updates at most, likewise.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.
        on_failure: What to do when samples do not converge: `raise`, `warn` or `ignore`.
        coupled: Whether the whole of `z0` is one problem; else each row is one.
        trace: Whether to keep the path in `Solution.trace`.
        return_solution: Whether to return the `Solution`, which has the root in `value`, in place
            of the root alone.
    """
    strategy = GRADIENTS.resolve(gradient)
    if not isinstance(strategy, Implicit):
        raise SettingError(
            "root.gradient", "be 'implicit' or an Implicit", gradient, "The others need a map."
        )
    if strategy.solver == "auto":
        strategy = replace(strategy, solver=GMRES(memory=50))
    cell = RootCell(g, symmetric=False, coupled=coupled)
    leaves = [leaf for leaf in pytree.tree_leaves(cell.enter(z0)) if isinstance(leaf, Tensor)]
    if solver in ("auto", "newton"):
        width = sum(leaf.numel() // max(len(leaf), 1) if leaf.dim() else 1 for leaf in leaves)
        solver = Newton(inner="dense" if width <= MAX_DENSE else "krylov")
    layer = FunctionLayer(
        cell,
        on_failure,
        solver=solver,
        gradient=_AtRoot(strategy),
        tolerance=tolerance,
        max_steps=max_steps,
        stop=stop,
    )
    layer.solves = SolveLog(on_failure, type(cell).__name__, _find_remedy)
    ones = _factors(leaves[0] if leaves else torch.ones(1), 1.0, 1.0)
    if return_solution:
        return layer.solve((ones, *args), cell.enter(z0), trace=trace)
    return layer((ones, *args), cell.enter(z0), trace=trace)
