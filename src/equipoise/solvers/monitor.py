"""What a solve knows of each sample, and when it lets one go."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import row_norm, to_numpy
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Point, Solution, Status, Stop, Trace

__all__ = ["Monitor"]

PROGRESS = 0.999
"""A residual has fallen if it is below this fraction of the best one so far."""
CROWDED = 0.5
"""Finished samples leave the work when at most this fraction of the rows is still going; dropping them costs a copy."""
MAX_HISTORY = 1000
"""Residuals of a sample kept at most, to tell growth from standstill."""
MAX_FEW_SAMPLES = 4
"""Up to this many samples, plain Python numbers are faster than arrays."""


def _all(mask: np.ndarray) -> bool:
    """`mask.all()` at a third of its price for the short masks of a solve, which are looked at every step."""
    return b"\0" not in mask.tobytes()


class Monitor:
    """What is known of every sample: its best iterate, when it last improved, and how it ended.

    Control runs in NumPy on a few numbers for each sample, because each tensor operation costs as
    much as a small cell.

    Args:
        problem: The problem as it was at the start.
        z: The start.
        stop: The rules.
        every: Steps from one look to the next.
        trace: Whether to keep the path.
        runs_all_steps: Whether a sample goes on to the last step, and its last iterate is returned
            in place of the best one.
    """

    def __init__(
        self,
        problem: Problem,
        z: Tensor,
        stop: Stop,
        every: int,
        trace: bool,
        runs_all_steps: bool = False,
    ) -> None:
        count = z.shape[0]
        self.runs_all_steps = runs_all_steps
        self.before = problem.work.count
        self.stop = stop
        self.samples = np.arange(count)  # which sample each row at work is
        self.going = np.ones(count, dtype=bool)  # rows not yet over
        self.idle = False  # whether some rows are over but still in the batch
        self.best = np.full(count, np.inf)
        self.best_scale = np.ones(count)
        self.quick: tuple[list[float], list[float]] | None = (
            None  # newer values of these two, while there are few samples
        )
        self.best_z = z
        self.mark = self.best  # the residual at the last real fall
        self.improved: int | np.ndarray = (
            0  # the look of the last real fall, one for all while they agree
        )
        self.patience = -(-stop.patience // every)  # in looks
        self.limit = np.zeros(count)
        # One ring in place of an array for each look: small blocks that outlive big ones would
        # fragment the heap.
        self.recent = np.full((min(self.patience, stop.max_steps, MAX_HISTORY) + 1, count), np.nan)
        self.looks = 0
        self.value: Tensor | None = None
        self.status = np.zeros(count, dtype=np.int64)
        self.residual = np.zeros(count)
        self.steps = np.zeros(count, dtype=np.int64)
        self.evaluations = np.zeros(count, dtype=np.int64)
        self.few = 0 < count <= MAX_FEW_SAMPLES and not trace
        self.path: tuple[list[Tensor], list[np.ndarray]] | None = ([], []) if trace else None

    def look(self, step: int, problem: Problem, at: Point) -> Tensor | None:
        """Judge the rows at work; return the rows that should go on if the others should leave, or nothing to go on with all."""
        stop, z = self.stop, at.z
        norm = problem.scale(at.f)
        if self.few and 0 < step < stop.max_steps and self._on_their_way(at, norm):
            return None
        residual, scale = to_numpy(at.size), to_numpy(norm)
        if self.quick is not None:
            self.best, self.best_scale = np.array(self.quick[0]), np.array(self.quick[1])
            self.mark, self.quick = self.best, None
        if (
            self.looks <= self.runs_all_steps
        ):  # a solver that leaves fixed points may start at zero, where its first step sets the scale
            size = np.maximum(np.maximum(residual, scale), to_numpy(row_norm(z))).astype(float)
            self.limit = np.maximum(self.limit, stop.growth * size)
        self._remember(residual)
        if self.path is not None:
            self._record(z, residual, scale)

        target = stop.target(scale)
        fell = residual < PROGRESS * self.mark
        if self.idle:
            fell |= ~self.going
        every_one_fell = _all(fell)
        if every_one_fell:
            self.best, self.best_scale, self.best_z = residual, scale, z
            self.mark, self.improved = residual, self.looks
            waiting = residual > target
            if self.idle:
                waiting |= ~self.going
            if step < stop.max_steps and _all(waiting):
                return None  # the common case: every sample is on its way

        # An iterate that has run far away makes any residual relatively small; infinity is not less
        # than itself.
        far = ~(np.maximum(residual, scale) <= self.limit) | np.isinf(residual)
        converged = (residual <= target) & ~far
        last = step == stop.max_steps
        if not every_one_fell:
            self._keep_best(
                z, residual, scale, fell, ~far if self.runs_all_steps and last else converged
            )
        tired = self.looks - self.improved >= self.patience
        over = far | last if self.runs_all_steps else converged | far | tired | last
        over &= self.going
        if not over.any():
            return None
        self._finish(step, problem, residual, converged, over, tired, far)
        return self._leave(problem)

    def _on_their_way(self, at: Point, norm: Tensor) -> bool:
        """Whether each of a few samples has come nearer and none has arrived: the common case, in plain numbers for speed."""
        low, slope = self.stop.absolute, self.stop.tolerance
        residual, scale = at.size.tolist(), norm.tolist()
        bests = self.mark.tolist() if self.quick is None else self.quick[0]
        for length, unit, best in zip(residual, scale, bests, strict=True):
            if not low + slope * unit < length < PROGRESS * best:
                return False
        self._remember(residual)
        self.quick, self.best_z, self.improved = (residual, scale), at.z, self.looks
        return True

    def _remember(self, residual: np.ndarray | list[float]) -> None:
        self.recent[self.looks % len(self.recent)] = residual
        self.looks += 1

    def _keep_best(
        self,
        z: Tensor,
        residual: np.ndarray,
        scale: np.ndarray,
        fell: np.ndarray,
        chosen: np.ndarray,
    ) -> None:
        better = (residual < self.best) | chosen
        if better.any():
            worse = torch.from_numpy((~better).nonzero()[0]).to(z.device)
            self.best_z = z.index_copy(0, worse, self.best_z.index_select(0, worse))
            self.best = np.where(better, residual, self.best)
            self.best_scale = np.where(better, scale, self.best_scale)
        self.improved = np.where(fell, self.looks, self.improved)
        self.mark = np.where(fell, residual, self.mark)

    def _finish(
        self,
        step: int,
        problem: Problem,
        residual: np.ndarray,
        converged: np.ndarray,
        over: np.ndarray,
        tired: np.ndarray | bool,
        far: np.ndarray,
    ) -> None:
        """Write down how the rows in `over` ended."""
        status = np.zeros(len(over), dtype=np.int64)
        failed = over & ~converged
        if not _all(~failed):
            status[failed] = Status.MAX_STEPS
            if not self.runs_all_steps:
                status[failed & tired] = Status.STALLED
                status[self._growing(failed)] = Status.DIVERGED
            status[failed & far] = Status.DIVERGED
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
            if self.value is None:
                self.value = self.best_z.new_empty(len(self.status), self.best_z.shape[1])
            rows = torch.from_numpy(over.nonzero()[0]).to(self.value.device)
            where = torch.from_numpy(samples).to(self.value.device)
            self.value.index_copy_(0, where, self.best_z.index_select(0, rows))
        self.going &= ~over
        self.idle = True
        self.few = False

    def _growing(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` have residuals that rose ever since they last fell: the last third above the first."""
        growing = np.zeros(len(rows), dtype=bool)
        history = np.roll(self.recent, -(self.looks % len(self.recent)), axis=0)[-self.looks :]
        improved = np.broadcast_to(self.improved, growing.shape)
        for row in rows.nonzero()[0]:
            since = history[-(self.looks - int(improved[row]) + 1) :, row]
            part = max(len(since) // 3, 2)
            if len(since) >= 4 and np.isfinite(since).all():
                # The second test tells a slow climb from a cycle whose later values happen to be
                # high.
                growing[row] = (
                    since[-part:].min() > 1.01 * since[:part].max()
                    and since[-1] > 1.001 * since[-part]
                )
        return growing

    def _leave(self, problem: Problem) -> Tensor | None:
        """Drop the rows that are over, if they are many; return the rows kept."""
        rows = self.going.nonzero()[0]
        if not len(rows):
            return torch.empty(0, dtype=torch.int64)
        if len(rows) > CROWDED * len(self.going) or not problem.can_drop_rows:
            return None
        keep = torch.from_numpy(rows).to(self.best_z.device)
        if isinstance(self.improved, np.ndarray):
            self.improved = self.improved[rows]
        for name in ("samples", "best", "best_scale", "mark", "limit", "going"):
            setattr(self, name, getattr(self, name)[rows])
        self.best_z = self.best_z.index_select(0, keep)
        self.idle = False
        self.few = len(rows) <= MAX_FEW_SAMPLES and self.path is None
        self.recent = self.recent[:, rows]
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
        value = self.best_z if self.value is None else self.value
        dtype, device = value.dtype, value.device
        trace = None
        if self.path is not None:
            residuals = np.stack(self.path[1]) if self.path[1] else np.zeros((0, len(self.status)))
            trace = Trace(torch.from_numpy(residuals).to(device, dtype), list(self.path[0]))
        return Solution(
            value=value,
            status=torch.from_numpy(self.status).to(device),
            residual=torch.from_numpy(self.residual).to(device, dtype),
            steps=torch.from_numpy(self.steps).to(device),
            evaluations=torch.from_numpy(self.evaluations).to(device),
            trace=trace,
        )
