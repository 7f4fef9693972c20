"""The one loop that runs every solver: it watches each sample, stops it, lets it leave the work, and says how it ended."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import row_norm
from equipoise.solvers.base import Solution, Solver, Status, Stop, Trace
from equipoise.solvers.problem import Problem

__all__ = ["judge", "run"]

PROGRESS = 0.999
"""A residual has fallen if it is below this fraction of the best one so far."""
CROWDED = 0.5
"""Finished samples leave the work when at most this fraction of the rows is still going; dropping them costs a copy."""


@torch.no_grad()
def run(problem: Problem, z: Tensor, solver: Solver, stop: Stop, *, f: Tensor | None = None, trace: bool = False) -> Solution:
    """Solve a problem on matrices.

    Args:
        problem: The map.
        z: Where to start, shape (samples, width). Never written to.
        solver: The update rule.
        stop: When to stop.
        f: The map at `z`, where it is known.
        trace: Whether to keep the path.
    """
    if solver.linear and not problem.affine:
        raise ValueError(
            f"solver {type(solver).__name__} solves linear equations only; got a nonlinear map. "
            "Use it for the adjoint, Implicit(solver=...), and another one for the forward solve."
        )
    if solver.needs_symmetric and not problem.symmetric:
        raise ValueError(
            f"solver {type(solver).__name__} needs a symmetric positive semidefinite Jacobian; the cell does not declare it. "
            "Set symmetric = True on the cell if it holds, or take another solver."
        )
    solution = _drive(problem, z, solver, stop, f, trace)
    if solver.predicts:
        _verify(problem, solution, solver, stop)
    return solution


@torch.no_grad()
def judge(problem: Problem, z: Tensor, stop: Stop, steps: int) -> Solution:
    """Return what is true of `z` after `steps` updates made elsewhere: converged, short of it, or not finite."""
    f = problem(z)
    residual, scale = row_norm(f - z), problem.scale(f)
    status = torch.where(residual <= stop.absolute + stop.tolerance * scale, int(Status.CONVERGED), int(Status.MAX_STEPS))
    status = torch.where(residual.isfinite(), status, int(Status.NONFINITE))
    made = torch.full_like(status, steps)
    return Solution(z, status, _relative(residual, scale), made, made + 1)


def _drive(problem: Problem, z: Tensor, solver: Solver, stop: Stop, f: Tensor | None, trace: bool) -> Solution:
    watch = Watch(problem, z, stop, trace)
    if z.numel() == 0:
        return watch.solution()
    every = stop.check_every or (1 if z.device.type == "cpu" else 4)
    if f is None:
        f = problem(z)
    rule = solver.start(problem, z, f)
    gap = f - z
    stuck: Tensor | None = None
    for step in range(stop.max_steps + 1):
        if step % every == 0 or step == stop.max_steps:
            keep = watch.look(step, problem, z, f, gap, stuck)
            if keep is not None:
                if not keep.numel():
                    break
                problem, z, f, gap = problem.take(keep), *(part.index_select(0, keep) for part in (z, f, gap))
                rule.take(problem, keep)
        z, known, predicted, stuck = rule.advance(z, f, gap)
        if predicted is None:
            f = problem(z) if known is None else known
            gap = f - z
        else:
            f, gap = z, predicted  # only linear solvers predict, and affine problems are measured without f
    return watch.solution()


def _verify(problem: Problem, solution: Solution, solver: Solver, stop: Stop) -> None:
    """Recompute the residuals of a solver that predicts them; samples that drifted go on from where they are."""
    claimed = solution.status == Status.CONVERGED
    if not claimed.any():
        return
    z = solution.value
    f = problem(z)
    residual, scale = row_norm(f - z), problem.scale(f)
    solution.residual = torch.where(claimed, _relative(residual, scale), solution.residual)
    solution.evaluations += claimed
    short = claimed & ~(residual <= stop.absolute + stop.tolerance * scale)
    if not short.any():
        return
    rows = (short if problem.droppable else torch.ones_like(short)).nonzero().flatten()
    left = stop.max_steps - int(solution.steps[rows].max())
    if left < 1:
        solution.status[rows] = int(Status.MAX_STEPS)
        return
    again = run(problem.take(rows), z[rows], solver, replace(stop, max_steps=left), f=f[rows])
    solution.value = z.index_copy(0, rows, again.value)
    solution.status[rows] = again.status
    solution.residual[rows] = again.residual
    solution.steps[rows] += again.steps
    solution.evaluations[rows] += again.evaluations


def _relative(residual: Tensor, scale: Tensor) -> Tensor:
    return torch.where(residual == 0, torch.zeros_like(residual), residual / scale)


def _numpy(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = (tensor if tensor.is_cpu else tensor.cpu()).numpy()
    return array


def _all(mask: np.ndarray) -> bool:
    """`mask.all()` at a third of its price for the short masks of a solve, which are looked at every step."""
    return b"\0" not in mask.tobytes()


class Watch:
    """What is known of every sample: its best iterate, when it last improved, and how it ended.

    Control runs in NumPy on a few numbers for each sample, because each tensor operation costs as much as a small cell.

    Args:
        problem: The problem as it was at the start.
        z: The start.
        stop: The rules.
        trace: Whether to keep the path.
    """

    def __init__(self, problem: Problem, z: Tensor, stop: Stop, trace: bool) -> None:
        count = z.shape[0]
        self.before = problem.work.count
        self.stop = stop
        self.samples = np.arange(count)  # which sample each row at work is
        self.going = np.ones(count, dtype=bool)  # rows not yet over
        self.idle = False  # whether some rows are over but still in the batch
        self.best = np.full(count, np.inf)
        self.best_scale = np.ones(count)
        self.best_z = z
        self.improved: int | np.ndarray = 0  # step of the last real fall, one for all while they agree
        self.limit = np.full(count, np.inf)
        self.recent: deque[np.ndarray] = deque(maxlen=stop.patience + 1)
        self.value = z
        self.untouched = True  # whether `value` is still the caller's tensor
        self.status = np.zeros(count, dtype=np.int64)
        self.residual = np.zeros(count)
        self.steps = np.zeros(count, dtype=np.int64)
        self.evaluations = np.zeros(count, dtype=np.int64)
        self.path: tuple[list[Tensor], list[np.ndarray]] | None = ([], []) if trace else None

    def look(self, step: int, problem: Problem, z: Tensor, f: Tensor, gap: Tensor, stuck: Tensor | None) -> Tensor | None:
        """Judge the rows at work; return the rows that should go on if the others should leave, or nothing to go on with all."""
        stop = self.stop
        residual, scale = _numpy(row_norm(gap)), _numpy(problem.scale(f))
        if step == 0:
            self.limit = stop.growth * np.maximum(np.maximum(residual, scale), _numpy(row_norm(z)))
        self.recent.append(residual)
        if self.path is not None:
            self._record(z, residual, scale)

        target = stop.absolute + stop.tolerance * scale
        fell = residual < PROGRESS * self.best
        if self.idle:
            fell |= ~self.going
        if _all(fell):
            self.best, self.best_scale, self.best_z, self.improved = residual, scale, z, step
            if stuck is None and not self.idle and step < stop.max_steps and _all(residual > target):
                return None  # the common case: every sample is on its way
        else:
            self._keep_best(step, z, residual, scale, fell)

        converged = residual <= target
        tired = step - self.improved >= stop.patience
        if stuck is not None:
            tired = tired | _numpy(stuck)
        over = converged | ~(residual <= self.limit) | np.isinf(residual) | tired | (step == stop.max_steps)
        over &= self.going
        if not over.any():
            return None
        self._finish(step, problem, residual, converged, over, tired)
        return self._leave(problem)

    def _keep_best(self, step: int, z: Tensor, residual: np.ndarray, scale: np.ndarray, fell: np.ndarray) -> None:
        better = residual < self.best
        if better.any():
            worse = torch.from_numpy((~better).nonzero()[0]).to(z.device)
            self.best_z = z.index_copy(0, worse, self.best_z.index_select(0, worse))
            self.best = np.where(better, residual, self.best)
            self.best_scale = np.where(better, scale, self.best_scale)
        self.improved = np.where(fell, step, self.improved)

    def _finish(
        self,
        step: int,
        problem: Problem,
        residual: np.ndarray,
        converged: np.ndarray,
        over: np.ndarray,
        tired: np.ndarray | bool,
    ) -> None:
        """Write down how the rows in `over` ended."""
        status = np.zeros(len(over), dtype=np.int64)
        failed = over & ~converged
        if not _all(~failed):
            status[failed] = Status.MAX_STEPS
            status[failed & tired] = Status.STALLED
            status[self._growing(step, failed) | (failed & (residual > self.limit))] = Status.DIVERGED
            status[failed & ~np.isfinite(residual)] = Status.NONFINITE
        samples = self.samples[over]
        self.status[samples] = status[over]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(self.best == 0, 0.0, self.best / self.best_scale)
        self.residual[samples] = relative[over]
        self.steps[samples] = step
        self.evaluations[samples] = problem.work.count - self.before
        if len(samples) == len(self.status):
            self.value = self.best_z
        else:
            self.value = torch.empty_like(self.value) if self.untouched else self.value
            rows = torch.from_numpy(over.nonzero()[0]).to(self.value.device)
            where = torch.from_numpy(samples).to(self.value.device)
            self.value.index_copy_(0, where, self.best_z.index_select(0, rows))
            self.untouched = False
        self.going &= ~over
        self.idle = True

    def _growing(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` have residuals that rose ever since they last fell: late ones all above early ones."""
        growing = np.zeros(len(rows), dtype=bool)
        history = np.stack(self.recent)
        improved = np.broadcast_to(self.improved, growing.shape)
        for row in rows.nonzero()[0]:
            since = history[-min(len(history), step - int(improved[row]) + 1) :, row]
            half = len(since) // 2
            if half >= 2 and np.isfinite(since).all():
                growing[row] = since[half:].min() > 1.01 * since[:half].max()
        return growing

    def _leave(self, problem: Problem) -> Tensor | None:
        """Drop the rows that are over, if they are many; return the rows kept."""
        rows = self.going.nonzero()[0]
        if len(rows) and (len(rows) > CROWDED * len(self.going) or not problem.droppable):
            return None
        keep = torch.from_numpy(rows).to(self.best_z.device)
        if isinstance(self.improved, np.ndarray):
            self.improved = self.improved[rows]
        for name in ("samples", "best", "best_scale", "limit", "going"):
            setattr(self, name, getattr(self, name)[rows])
        self.best_z = self.best_z.index_select(0, keep)
        self.idle = False
        self.recent = deque((old[rows] for old in self.recent), maxlen=self.recent.maxlen)
        return keep

    def _record(self, z: Tensor, residual: np.ndarray, scale: np.ndarray) -> None:
        assert self.path is not None
        states, residuals = self.path
        state = states[-1].clone() if states else z.clone()
        line = residuals[-1].copy() if residuals else np.zeros(len(self.status))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(residual == 0, 0.0, residual / scale)
        moving = self.going.nonzero()[0]
        state[torch.from_numpy(self.samples[moving])] = z[torch.from_numpy(moving)]
        line[self.samples[moving]] = relative[moving]
        states.append(state)
        residuals.append(line)

    def solution(self) -> Solution:
        """Everything that was written down."""
        dtype, device = self.value.dtype, self.value.device
        trace = None
        if self.path is not None:
            residuals = np.stack(self.path[1]) if self.path[1] else np.zeros((0, len(self.status)))
            trace = Trace(torch.from_numpy(residuals).to(device, dtype), list(self.path[0]))
        return Solution(
            value=self.value,
            status=torch.from_numpy(self.status).to(device),
            residual=torch.from_numpy(self.residual).to(device, dtype),
            steps=torch.from_numpy(self.steps).to(device),
            evaluations=torch.from_numpy(self.evaluations).to(device),
            trace=trace,
        )
