"""Roots of plain functions, differentiable in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from equipoise.core.transforms import is_transformed
from equipoise.core.tree import Shared, Tree, row_dot, row_norm
from equipoise.core.validate import SettingError
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.detached import find_detached
from equipoise.gradients.implicit import Implicit
from equipoise.layers.equilibrium import MAX_STEPS, TOLERANCE
from equipoise.layers.function import FunctionCell, FunctionLayer
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import LinearProblem, func_vjp
from equipoise.solvers.loop import run
from equipoise.solvers.newton import Newton
from equipoise.solvers.policy import OnFailure
from equipoise.solvers.problem import Equation, MapProblem, Problem, linearize_by_autograd
from equipoise.solvers.protocol import Solution, Solver, Status, Stop, Trace
from equipoise.solvers.solve import unpack_solution

__all__ = ["root"]

FALL = 0.36
"""By how much `|g|` must fall in a Newton step near a root.

To a simple root it falls to 0, to one of multiplicity m to (1 - 1/m)^m < 1/e. Near a pole Newton
steps are short too, but there it falls to more than 1/e.
"""
ROUNDED = 0.75
"""Relative steps shorter than machine epsilon to this power may be rounding of `g` alone.

They need not make `|g|` fall.
"""
MAX_DENSE = 64
"""States up to this wide have their Newton systems solved by elimination.

Krylov methods solve the largest equations first, so that among equations of very different scales
their rough steps are no Newton steps.
"""
MAX_ROUNDS = 20
"""How often the search starts anew in other units."""


class RootCell(FunctionCell):
    """`a z - b g(z, *args)`, whose equilibrium at `a = 1` is a root of `g` for any `b`."""

    def inject(self, x: Sequence[Any]) -> list[Shared]:
        factors, *args = x
        return [Shared(factors), *super().inject(args)]

    def step(self, z: Tree, context: Sequence[Tensor]) -> Tree:
        factors, *args = context
        z_leaves, spec = pytree.tree_flatten(z)
        leaves, found = pytree.tree_flatten(self.enter(self.call(self.readout(z, args), args)))
        if found != spec or any(
            not isinstance(own, Tensor) or own.shape != leaf.shape
            for own, leaf in zip(leaves, z_leaves, strict=True)
        ):
            shapes = [tuple(getattr(own, "shape", ())) for own in leaves]
            wanted = [tuple(leaf.shape) for leaf in z_leaves]
            raise ValueError(
                "root.g must return the tree and the shapes of its state; got shapes "
                f"{shapes} for {wanted}."
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


def _gain(g: Tensor, pull: Callable[[Tensor], Tensor]) -> Tensor:
    """The factor `b` that turns `g` into steps in `z`, for each row.

    With `u = g / |g|` it is `1 / |J^T u|`, with the sign of `<u, J u>`. Then `|b g|` is at most the
    length of the Newton step: `|g|^2 = -<J^T g, d> <= |J^T g| |d|`.
    """
    largest = g.abs().amax(dim=1, keepdim=True)
    u = torch.where(largest > 0, g / largest, 1.0)
    pulled = pull(u)
    gain = row_norm(pulled) / row_norm(u)
    sign = torch.where(row_dot(u, pulled)[:, 0] < 0, -1.0, 1.0)
    return torch.where(gain.isfinite() & (gain > 0), sign / gain, 1.0)


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
        g, z = _g(equation, args, z0), z0
        made = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        work = made.clone()
        # A root at zero is reached when it is zero to rounding, seen from where the search began.
        tiny = (torch.finfo(z.dtype).eps * row_norm(z0)).clamp(min=self.stop.absolute)
        stop = replace(self.stop, absolute=float(tiny.min()) if len(z) else 0.0)
        trace: Trace | None = None
        for _ in range(MAX_ROUNDS):
            local = linearize_by_autograd(g, z)
            gain = _gain(local.value, local.vjp)
            scaled = MapProblem(equation, [_factors(z, 1.0, gain), *args[1:]])
            left = self.stop.max_steps - int(made.max()) if len(made) else 1
            flat = run(
                scaled, z, self.solver, replace(stop, max_steps=max(left, 1)), trace=self.trace
            )
            z, made, work = flat.value, made + flat.steps, work + flat.evaluations
            if flat.trace is not None:
                trace = flat.trace if trace is None else _joined(trace, flat.trace)
            length, size, falls = _newton_step(scaled, z, g)
            size = torch.where(length <= tiny, torch.maximum(size, row_norm(z0)), size)
            relative = torch.where(length == 0, 0.0, length / size)
            reached = falls & ((relative <= self.stop.tolerance) | (length <= tiny))
            # `b g` is small enough and the step is not: the Jacobian has changed on the way, or is
            # badly conditioned.
            again = (flat.status == Status.CONVERGED) & ~reached
            flat.status[reached] = int(Status.CONVERGED)
            if not bool(again.any()):
                break
            if left <= int(flat.steps.max()):
                flat.status[again] = int(Status.MAX_STEPS)
                break
            wanted = flat.residual * (self.stop.tolerance / relative).clamp(max=1.0) / 2
            least = 4 * torch.finfo(z.dtype).eps
            stop = replace(stop, tolerance=max(float(wanted[again].min()), least))
        else:
            flat.status[again] = int(Status.STALLED)
        self.gain = gain
        flat = replace(
            flat,
            residual=torch.where(relative.isfinite(), relative, flat.residual),
            steps=made,
            evaluations=work,
            trace=trace,
            stop=self.stop,
        )
        self.solution: Solution | None = unpack_solution(flat, equation.layout)
        self.members += 1
        self.log.add("forward", self.solution, self.on_failure)
        return z


def _joined(first: Trace, second: Trace) -> Trace:
    """Two parts of a path as one; the second begins where the first ends."""
    residual = torch.cat([first.residual, second.residual[1:]])
    return Trace(residual, first.state + second.state[1:])


def _newton_step(
    problem: MapProblem, z: Tensor, g: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how long Newton's step is, how long the state is, and whether `|g|` falls by it."""
    local = problem.linearize(z)
    gap = local.value - z
    system = LinearProblem(problem, z, gap, transpose=False, local=local, forcing=True)
    # Accurately, since what a rough solve leaves out is long where the Jacobian is nearly singular.
    inner = GMRES(memory=max(1, min(z.shape[1], 50)))
    exact = Stop(100 * torch.finfo(z.dtype).eps, absolute=0.0, max_steps=200)
    with torch.no_grad():
        found = run(system, torch.zeros_like(z), inner, exact, f=gap)
        solved = found.residual <= 1e-3
        at_root = (gap == 0).all(dim=1)
        size = torch.maximum(row_norm(z), row_norm(z + found.value))
        length = torch.where(solved, row_norm(found.value), torch.inf)
        length = torch.where(at_root, 0.0, length)
        now, then = g(z), g(z + found.value)
        # Relative to the largest entry, since squares of small ones underflow.
        unit = now.abs().amax(dim=1, keepdim=True) if z.shape[1] else 1.0
        falls = row_norm(then / unit) <= FALL * row_norm(now / unit)
        rounding = torch.finfo(z.dtype).eps ** ROUNDED
        return length, size, falls | at_root | (length <= rounding * size)


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
            gain = _gain(value, lambda v: pull(v)[0]).detach()
        plan.solution, plan.members, plan.given = search.solution, search.members, True
        return self.inner.attach(plan, z, [_factors(z, 1.0, gain), *args[1:]])


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
    times as long as `z`, and makes `|g|` fall. The length of that step, relative to `z`, is the
    `residual` of the `Solution`: to first order the distance to the root. Unlike `|g|` it does not
    change when `g` is multiplied by a number or a matrix (Deuflhard, 2011, section 2.1), so that
    small values of `g` pass for no root.

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
    ones = _factors(leaves[0] if leaves else torch.ones(1), 1.0, 1.0)
    if return_solution:
        return layer.solve((ones, *args), cell.enter(z0), trace=trace)
    return layer((ones, *args), cell.enter(z0), trace=trace)
