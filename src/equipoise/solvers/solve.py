"""Solving plain functions, and the way from state trees to matrices and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equipoise.core.tree import Layout, Structure, Tree
from equipoise.solvers.auto import pick_forward
from equipoise.solvers.error import offer_error, tighten
from equipoise.solvers.loop import run
from equipoise.solvers.problem import Equation, MapProblem
from equipoise.solvers.protocol import SOLVERS, Solution, Solver, Stop, Trace

__all__ = ["check_context", "solve", "unpack_solution"]


class Function(Equation):
    """A plain function `step(z)` or `step(z, context)` of trees, as an equation on matrices."""

    layout: Layout

    def __init__(
        self, step: Callable[..., Tree], layout: Layout, context: Tree | None, symmetric: bool
    ) -> None:
        structure = Structure(context, "The context")
        self.args = structure.leaves
        self.rows = tuple(not (shared or layout.coupled) for shared in structure.shared)
        self.symmetric = symmetric
        self._step = step
        self.layout = layout
        self._structure = None if context is None else structure
        self.can_drop_rows = context is not None and not layout.coupled
        check_context(structure, layout)

    def bind(self, args: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        step, layout = self._step, self.layout
        if self._structure is None:
            return lambda z: layout.pack(step(layout.unpack(z)), "step", z.shape[0])
        context = self._structure.rebuild(args)
        return lambda z: layout.pack(step(layout.unpack(z), context), "step", z.shape[0])


def check_context(structure: Structure, layout: Layout) -> None:
    """Raise unless every context tensor is batch first (or shared) and on the state's device."""
    for leaf, shared in zip(structure.leaves, structure.shared, strict=True):
        if leaf.device != layout.device:
            raise ValueError(
                f"The state must be on the device of the context; got {layout.device} and "
                f"{leaf.device}."
            )
        if not shared and leaf.layout not in (torch.strided, torch.sparse_coo):
            raise ValueError(
                f"A context tensor must be dense, sparse COO or Shared; got {leaf.layout}, which "
                "has no rows to select. Use to_sparse_coo()."
            )
        if not shared and (leaf.dim() == 0 or leaf.shape[0] != layout.batch):
            raise ValueError(
                "State and context must be batch first with one batch size; got a state of "
                f"{layout.batch} samples and a context "
                f"of shape {tuple(leaf.shape)}. Check z0, or wrap a tensor that belongs to "
                "the whole batch in Shared."
            )


def solve(
    step: Callable[..., Tree],
    z0: Tree,
    solver: str | Solver = "auto",
    stop: Stop | None = None,
    *,
    context: Tree | None = None,
    symmetric: bool = False,
    coupled: bool = False,
    trace: bool = False,
) -> Solution:
    """Solve `z = step(z)`, or `z = step(z, context)`, for each sample of a batch.

    No gradients are recorded; `equipoise.fixed_point` gives them. With a `context`, finished
    samples leave the work and the rows of the context leave with them. Without one the step may
    close over tensors whose rows cannot be dropped, so finished samples are frozen but stay in the
    batch.

    Args:
        step: The map.
        z0: Where to start: one tensor or a tree of tensors, batch first.
        solver: A solver or its name; `auto` picks one.
        stop: When to stop; by default `Stop()`.
        context: What else the step needs, batch first; `()` for a step that needs nothing else.
        symmetric: Whether the Jacobian of the step is symmetric positive semidefinite.
        coupled: Whether the samples depend on each other, so that the batch is one problem with one
            status.
        trace: Whether to keep the path in `Solution.trace`.
    """
    layout = Layout(z0, coupled=coupled)
    if solver == "auto":
        solver = pick_forward(symmetric=symmetric, lipschitz=None)
    chosen = SOLVERS.resolve(solver, also=["auto"])
    equation = Function(step, layout, context, symmetric)
    problem = MapProblem(equation, equation.args)
    stop = stop or Stop()
    flat = run(problem, layout.pack(z0, "z0").detach(), chosen, stop, trace=trace)
    if stop.tolerance_on == "error":
        tighten(problem, flat, None)
    offer_error(problem, flat)
    return unpack_solution(flat, layout)


def unpack_solution(flat: Solution, layout: Layout | None) -> Solution:
    """Return a solution on matrices as one on state trees, detached; without a layout, as it is.

    Kept iterates are left out: who asked for them connects them to what they depend on.
    """
    if layout is None:
        return flat
    trace = flat.trace and Trace(
        flat.trace.residual, [layout.unpack(state) for state in flat.trace.state]
    )
    found = flat.copy()
    found.value, found.trace, found.states = layout.unpack(flat.value.detach()), trace, None
    return found
