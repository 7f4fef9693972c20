"""Equilibria of plain functions, differentiable in their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from equipoise.core.module_tensors import find_untracked_tensor
from equipoise.core.tree import Shared, Tree
from equipoise.core.validate import SettingError, require_flag
from equipoise.gradients.base import Gradient, Plan
from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import MAX_STEPS, TOLERANCE, Equilibrium
from equipoise.solvers.policy import OnFailure, SolveLog
from equipoise.solvers.protocol import Solver, Stop

__all__ = ["FunctionCell", "FunctionLayer", "fixed_point"]


class FunctionCell(Cell):
    """`z = f(z, *args)` as a cell whose input is the arguments.

    The arguments are passed whole, so nothing leaves the batch. One problem is a batch of one.

    Args:
        function: `f`. A module, or a method of one, has its parameters tracked.
        symmetric: Whether the Jacobian in `z` is symmetric positive semidefinite.
        coupled: Whether the whole state is one problem.
    """

    def __init__(self, function: Callable[..., Tree], *, symmetric: bool, coupled: bool) -> None:
        super().__init__()
        key = type(self).__name__
        if not callable(function):
            raise SettingError(f"{key}.f", "be a function", function, got=type(function).__name__)
        require_flag(f"{key}.symmetric", symmetric)
        require_flag(f"{key}.coupled", coupled)
        self.symmetric = symmetric
        self.coupled = coupled
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            # Looked up at each call, since a solve may run with a copy of the module.
            self.owner, self.method = owner, function.__name__
        else:
            self.function = function
        self.arguments: Any = None

    def call(self, z: Tree, context: Sequence[Tensor]) -> Tree:
        """Return `f(z, *args)` for a state as the user has it."""
        leaves, spec = self.arguments
        found = iter(context)
        filled = [next(found) if leaf is Tensor else leaf for leaf in leaves]
        args = filled if spec is None else pytree.tree_unflatten(filled, spec)
        function = getattr(self.owner, self.method) if "owner" in self._modules else self.function
        return function(z, *args)

    def inject(self, x: Sequence[Any]) -> list[Shared]:
        leaves: Sequence[Any] = x
        spec = None  # for tensors alone, which are put back at once
        if not all(isinstance(leaf, Tensor) for leaf in x):
            leaves, spec = pytree.tree_flatten(tuple(x))
        # The class stands for each tensor, which comes with the context.
        self.arguments = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        return [Shared(leaf) for leaf in leaves if isinstance(leaf, Tensor)]

    def enter(self, z0: Tree) -> Tree:
        """Return a state of the user's as one of the cell's."""
        return _each(z0, lambda leaf: leaf[None]) if self.coupled else z0

    def readout(self, z: Tree, context: Tree) -> Tree:
        return _each(z, lambda leaf: leaf[0]) if self.coupled else z

    def step(self, z: Tree, context: Sequence[Tensor]) -> Tree:
        return self.enter(self.call(self.readout(z, context), context))


def _each(tree: Tree, function: Callable[[Tensor], Tensor]) -> Tree:
    """A tree with a function applied to each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    return pytree.tree_map_only(Tensor, function, tree)


class FixedPointCell(FunctionCell):
    """The cell of `fixed_point`."""

    _step_name = "fixed_point.f"


FixedPointCell.__name__ = "fixed_point"  # what messages call it


class FunctionLayer(Equilibrium):
    """The layer of one call of a plain function."""

    cell: FunctionCell

    def __init__(self, cell: FunctionCell, on_failure: OnFailure, **options: Any) -> None:
        super().__init__(cell, **options)
        self.solves = SolveLog(on_failure, type(cell).__name__)

    def _begin(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> None:
        plan.equation.can_drop_rows = False
        if not torch.is_grad_enabled():
            return
        value = plan.equation.bind([arg.detach() for arg in args])(z0.detach())
        tangent = _tangent(value)
        if value.requires_grad or tangent is not None:
            found = find_untracked_tensor(value, [])
            shape = "" if found is None else f" of shape {tuple(found.shape)}"
            raise ValueError(
                f"{type(self.cell).__name__}.f must get tensors that need gradients as arguments; "
                f"got one{shape} that it closes over, whose gradient would be lost. Pass it after "
                "z0, or give the module that holds it as the function."
            )


def _tangent(value: Tensor) -> Tensor | None:
    """The derivative that forward mode carries along with a tensor, if any."""
    if forward_ad._current_level < 0:
        return None
    tangent: Tensor | None = forward_ad.unpack_dual(value).tangent  # type: ignore[no-untyped-call]
    return tangent


def fixed_point(
    f: Callable[..., Tree],
    z0: Tree,
    *args: Any,
    solver: str | Solver = "auto",
    gradient: str | Gradient = "implicit",
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
    stop: Stop | None = None,
    on_failure: OnFailure = "warn",
    symmetric: bool = False,
    coupled: bool = False,
    trace: bool = False,
    return_solution: bool = False,
) -> Any:
    """Return the solution of `z = f(z, *args)`, differentiable in the arguments.

    Derivatives of every order flow to all tensors in `args`, and to the parameters of `f` if it is
    a module or a method of one; backward, forward mode and the transforms of `torch.func` work as
    they do for a layer. Nothing flows to `z0`. A tensor that `f` closes over and that needs
    gradients is refused.

    Each row of `z0` is its own problem, as everywhere in this library. If the rows depend on each
    other, as the entries of one vector do, say `coupled=True`: then the whole of `z0`, of any
    shape, is one problem. The arguments are passed whole; to let finished samples leave the batch,
    write a `Cell`.

    Args:
        f: The function; returns the tree, shapes and dtype of `z0`.
        z0: Where to start: one tensor or a tree of tensors.
        *args: What else `f` needs: trees of tensors, and anything that is no tensor.
        solver: A solver or its name; `auto` picks one.
        gradient: A gradient strategy or its name.
        tolerance: Relative residual to reach, in the forward and the adjoint solve.
        max_steps: Updates at most, likewise.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.
        on_failure: What to do when samples do not converge: `raise`, `warn` or `ignore`.
        symmetric: Whether the Jacobian of `f` in `z` is symmetric positive semidefinite.
        coupled: Whether the whole of `z0` is one problem.
        trace: Whether to keep the path in `Solution.trace`.
        return_solution: Whether to return the `Solution`, which has the equilibrium in `value`, in
            place of the equilibrium alone.
    """
    cell = FixedPointCell(f, symmetric=symmetric, coupled=coupled)
    layer = FunctionLayer(
        cell,
        on_failure,
        solver=solver,
        gradient=gradient,
        tolerance=tolerance,
        max_steps=max_steps,
        stop=stop,
    )
    if return_solution:
        return layer.solve(args, cell.enter(z0), trace=trace)
    return layer(args, cell.enter(z0), trace=trace)
