"""The one loop that runs every solver: it monitors each sample, stops it, and says how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core.module_tensors import versions, written_since
from equipoise.solvers.buffers import ReusedMemory, ReuseGuard
from equipoise.solvers.coordinates import ExtremeUnits
from equipoise.solvers.coupling import check_whole_batch, refuse_coupling
from equipoise.solvers.few_samples import PROGRESS
from equipoise.solvers.kernels import Lengths, find_lengths
from equipoise.solvers.measure import assess
from equipoise.solvers.monitor import Monitor
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Point, Rule, Solution, Solver, Status, Stop

__all__ = ["judge", "run"]

NEAR_ROUNDING = 1000
"""A relative residual of so many roundings may have stalled because of them."""


@torch.no_grad()
def run(
    problem: Problem,
    z: Tensor,
    solver: Solver,
    stop: Stop,
    *,
    f: Tensor | None = None,
    near: bool = False,
    trace: bool = False,
    states: Sequence[int] = (),
    check: Callable[[], bool] = lambda: True,
) -> Solution:
    """Solve a problem on matrices.

    Args:
        problem: The map.
        z: Where to start, shape (samples, width). Never written to.
        solver: The update rule.
        stop: When to stop.
        f: The map at `z`, where it is known.
        near: Whether the solve is likely to end where it starts.
        trace: Whether to keep the path.
        states: The steps after which to keep the iterate in `Solution.states`.
        check: Asked when samples ended apart from each other: whether to spend an evaluation on
            seeing that they are independent.
    """
    if solver.linear and not problem.affine:
        raise ValueError(
            f"solver {type(solver).__name__} solves linear equations only; got a nonlinear map. "
            "Use it for the adjoint, Implicit(solver=...), and another one for the forward solve."
        )
    if solver.needs_symmetric and not problem.symmetric:
        raise ValueError(
            f"solver {type(solver).__name__} needs a symmetric positive semidefinite "
            "Jacobian; the cell does not declare it. "
            "Set symmetric = True on the cell if it holds, or take another solver."
        )
    if solver.combines and not trace and not states and stop.norm != "element" and z.numel():
        found = _run_reduced(problem, z, solver, stop)
        if found is not None:
            return found
    try:
        try:
            monitor = _drive(problem, z, solver, stop, f, trace, states, near=near)
        except ReusedMemory:
            problem = problem.copying()
            monitor = _drive(problem, z, solver, stop, f, trace, states, guarded=False)
        solution, start, apart = monitor.solution(), monitor.start, monitor.ended_apart()
        # Every sample had ended before the steps that were never made.
        solution.states = [monitor.kept.get(step, solution.value) for step in states]
        del monitor  # and its iterates: what follows may evaluate the whole batch, and solve again
        if solver.tracks_residual and z.numel():
            _verify(problem, solution, solver, stop, start)
        elif apart and check():
            check_whole_batch(problem, solution, stop, start)
    except RuntimeError as error:
        left = problem.work.rows_left
        if left is not None and left < len(z) and not hasattr(error, "__notes__"):
            error.add_note(
                f"The step worked for {len(z)} samples, and failed for {left} when the others had "
                "ended and left the batch. If it keeps a tensor of the whole batch, such as a "
                "dropout mask, pass that on from inject; if its samples depend on each other, set "
                f"{problem.coupled_name} to True."
            )
        raise
    solution.stop, solution.solver, solution.start = stop, solver, start
    return solution


def _run_reduced(problem: Problem, z: Tensor, solver: Solver, stop: Stop) -> Solution | None:
    """Solve in the cheaper coordinates of a problem, if it has any, and verify in the state."""
    reduced = problem.reduced(z)
    if reduced is None:
        return None
    try:
        monitor = _drive(
            reduced.problem, reduced.start, solver, stop, reduced.f, False, guarded=False
        )
    except ExtremeUnits:
        return None
    solution, start = monitor.solution(), monitor.start
    del monitor
    solution.value = reduced.decode(solution.value)
    _verify(problem, solution, solver, stop, start, unsure=True)
    solution.stop, solution.solver, solution.start = stop, solver, start
    return solution


@torch.no_grad()
def judge(problem: Problem, z: Tensor, solver: Solver, stop: Stop, steps: int) -> Solution:
    """Return what is true of `z` after `steps` updates made elsewhere.

    Each sample has converged, has not yet, or is not finite.
    """
    residual, scale, reached = assess(problem, z, problem(z), stop)
    status = torch.where(reached, int(Status.CONVERGED), int(Status.MAX_STEPS))
    status = torch.where(residual.isfinite(), status, int(Status.NONFINITE))
    made = torch.full_like(status, steps)
    return Solution(
        z,
        status,
        residual,
        made,
        made + 1,
        scale=scale,
        stop=stop,
        solver=solver,
        unrolled=True,
    )


def _drive(
    problem: Problem,
    z: Tensor,
    solver: Solver,
    stop: Stop,
    f: Tensor | None,
    trace: bool,
    states: Sequence[int] = (),
    *,
    guarded: bool = True,
    near: bool = False,
) -> Monitor:
    every = stop.check_every or (1 if z.device.type == "cpu" else 4)
    monitor = Monitor(problem, z, stop, every, trace, solver.runs_all_steps, near)
    if z.numel() == 0:
        return monitor
    if f is None:
        fixed = [z]
        fixed += [arg for i, arg in enumerate(problem.args) if i not in problem.mutable_args]
        before = versions(fixed)
        f = problem.evaluate_last(z) if near else problem(z)
        written = {id(tensor) for tensor in written_since(before)}
        if written:
            count = len(problem.args) - problem.weight_count
            if written.isdisjoint(map(id, [z, *problem.args[:count]])):
                raise ValueError(
                    "Weights must not change while a step runs; got one that was written to, by "
                    "the step itself or by another thread. Threads that solve while another one "
                    "trains need a copy of the layer."
                )
            raise ValueError(
                "A step must not change its state or context in place; got one that does. "
                "Write z + 1, not z.add_(1)."
            )
    # An affine map adds its constant term, and so returns memory of its own.
    guard = ReuseGuard(z) if guarded and not problem.affine else None
    if guard is not None:
        guard.check(f, z)
    rule = solver.start(problem, z, f)
    lengths = find_lengths(problem, z)
    at = Point(z, f, None, problem.norm, lengths)
    del z, f  # as below: so that each is free before the next is made
    # Every look of a path is wanted.
    alone = every == 1 and not trace and not states and not solver.runs_all_steps
    able = alone and rule.runs_ahead and monitor.may_run_ahead()
    runs = problem.compiled(at.z) if able else None
    step = -1
    while step < stop.max_steps:
        step += 1
        if states and step in states:
            monitor.keep_state(step, at.z)
        if step % every == 0 or step == stop.max_steps:
            keep = monitor.look(step, problem, at)
            if monitor.unit_change is not None:
                unit, monitor.unit_change = monitor.unit_change, None
                problem, at, rule = _change_units(problem, at, rule, solver, unit)
                keep = monitor.look(step, problem, at)
            if keep is not None:
                if not keep.numel():
                    break
                problem = problem.select_rows(keep)
                monitor.keep_rows(at, keep)
                rule.select_rows(problem, keep)
                runs = None if runs is None else problem.compiled(at.z)
        if runs is not None and step < stop.max_steps and monitor.may_run_ahead():
            limits = monitor.limits(step, problem, at)
            ahead = rule.run_ahead(at, runs, limits)
            if ahead is not None and ahead.steps:
                problem.work.count += ahead.evaluations
                monitor.pass_looks(ahead, limits)
                step += ahead.steps
                at = ahead.at or _evaluate(problem, ahead.z, monitor, lengths)
                if not ahead.seen:
                    step -= 1  # this step's look is still to be made
                    continue
        move = rule.advance(at)
        if move.gap is not None:
            at = Point.predicted(move, problem.norm)
            del move
            continue
        z, f = move.z, move.f
        del at, move  # what the rule does not keep is free before the next evaluation
        at = _evaluate(problem, z, monitor, lengths, f)
        del z, f
        if guard is not None:
            guard.check(at.f, at.z, monitor.best_z)
    return monitor


def _evaluate(
    problem: Problem,
    z: Tensor,
    monitor: Monitor,
    lengths: Lengths | None,
    f: Tensor | None = None,
) -> Point:
    """Return the point `z`, evaluating the map there unless it is known."""
    if f is None:
        last = monitor.recorded and monitor.ends_soon()
        f = problem.evaluate_last(z) if last else problem(z)
    return Point(z, f, None, problem.norm, lengths)


def _change_units(
    problem: Problem, at: Point, rule: Rule, solver: Solver, unit: Tensor
) -> tuple[Problem, Point, Rule]:
    """Return problem, point and rule in units of `unit`; what the rule remembers is forgotten."""
    problem = problem.scaled(unit)
    at = Point(at.z / unit, at.f / unit, at.gap / unit, at.norm)
    if solver.runs_all_steps:  # it counts its steps
        rule.select_rows(problem, torch.arange(len(unit), device=unit.device))
        return problem, at, rule
    return problem, at, solver.start(problem, at.z, at.f)


def _verify(
    problem: Problem,
    solution: Solution,
    solver: Solver,
    stop: Stop,
    start: np.ndarray,
    *,
    unsure: bool = False,
) -> None:
    """Recompute the residuals of a solve that predicts them.

    Samples that have drifted continue from where they are; with `unsure` those too whose residual
    stalled where rounding may be the reason.
    """
    before: Tensor | None = None
    if unsure and not solution.all_converged:
        near = solution.residual <= NEAR_ROUNDING * torch.finfo(solution.residual.dtype).eps
        solution.status[near & (solution.status == Status.STALLED)] = int(Status.CONVERGED)
    while True:
        z = solution.value
        f = problem.evaluate_last(z)
        solution.residual, solution.scale, reached = assess(problem, z, f, stop, start)
        solution.evaluations += 1
        if bool(reached.all()):
            return
        short = solution.converged & ~reached
        if before is None:
            before = torch.full_like(solution.residual, torch.inf)
            if bool(short.any()):
                refuse_coupling(problem, z, f, solution.residual, short, stop)
        # Starting again has not helped: the recurrence drifts faster than it converges.
        stuck = short & ~(solution.residual < PROGRESS * before)
        finite = solution.residual.isfinite()
        solution.status[stuck & finite] = int(Status.STALLED)
        solution.status[stuck & ~finite] = int(Status.NONFINITE)
        before = solution.residual
        rows = (short & solution.converged).nonzero().flatten()
        if not rows.numel():
            return
        left = stop.max_steps - int(solution.steps[rows].max())
        if left < 1:
            solution.status[rows] = int(Status.MAX_STEPS)
            return
        again_rows = rows if problem.can_drop_rows else torch.arange(len(z), device=z.device)
        again = _drive(
            problem.select_rows(again_rows),
            z[again_rows],
            solver,
            replace(stop, max_steps=left),
            f[again_rows],
            False,
        ).solution()
        again = again if problem.can_drop_rows else again.rows(rows)
        solution.value = z.index_copy(0, rows, again.value)
        solution.status[rows] = again.status
        solution.steps[rows] += again.steps
        solution.evaluations[rows] += again.evaluations
