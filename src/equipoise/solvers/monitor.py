"""What a solve knows of each sample, and when it stops one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.solvers.ahead import Ahead, Limits
from equipoise.solvers.dropping import DropRule
from equipoise.solvers.few_samples import PROGRESS, FewSamples
from equipoise.solvers.history import History
from equipoise.solvers.kernels import as_rows, find_kernels
from equipoise.solvers.measure import FALL, Measure, as_array, pick_measure
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Point, Solution, Status, Stop, Trace

__all__ = ["Monitor"]

FIRST_FALL = 0.01
"""What the first step is expected to make of a residual."""
NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
"""What states are made of, for NumPy."""
NONE_LEFT = torch.empty(0, dtype=torch.int64)
"""The rows to continue with at the end."""
MAX_FEW_SAMPLES = 4
"""Up to this many samples, plain Python numbers are faster than arrays."""


def _all(mask: np.ndarray) -> bool:
    # For 5 to 256 samples this takes 1 us where mask.all() takes 5, twice in each look.
    return bool(np.count_nonzero(mask) == len(mask))


def _filled(shape: int, value: float, dtype: type = float) -> np.ndarray:
    # np.full and np.ones take several times as long for a few numbers.
    made: np.ndarray = np.empty(shape, dtype)
    made.fill(value)
    return made


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
        runs_all_steps: Whether each sample runs to the last step, and its last iterate is returned
            in place of the best one.
        near: Whether the solve is likely to end where it starts.
    """

    def __init__(
        self,
        problem: Problem,
        z: Tensor,
        stop: Stop,
        every: int,
        trace: bool,
        runs_all_steps: bool = False,
        near: bool = False,
    ) -> None:
        count = z.shape[0]
        self.runs_all_steps = runs_all_steps
        self.near = near and problem.records_end
        self.waiting: np.ndarray | None = None  # rows that had converged at the start
        self.before = problem.work.count
        self.stop = stop
        self.affine = problem.affine
        self.samples = np.arange(count)  # which sample each row at work is
        self.going = _filled(count, True, bool)  # rows not yet over
        self.idle = False  # whether some rows are over but still in the batch
        self.best = _filled(count, np.inf)
        self.best_scale = _filled(count, 1.0)
        self.best_z = z
        self.mark = self.best  # the residual at the last real fall
        # The look of the last real fall, one for all while they agree.
        self.improved: int | np.ndarray = 0
        self.patience = -(-stop.patience // every)  # in looks
        # A solver that leaves fixed points may start at zero, where its first step sets the scale.
        self.start_looks = 2 if runs_all_steps else 1
        self.measure = pick_measure(stop, problem, z, self.start_looks)
        self.units: Tensor | None = None  # of the rows, as a column, where they are not 1
        self.unit_change: Tensor | None = None
        self.history = History(min(self.patience, stop.max_steps), count)
        self.value: Tensor | None = None
        self.drop_rule: DropRule | None = None
        self.finishes = 0  # looks at which some sample ended
        self.status = np.zeros(count, dtype=np.int64)
        self.numbers = np.zeros((2, count))
        self.residual, self.scale = self.numbers
        self.start = np.zeros(self.measure.start.shape)  # the sizes of the start
        self.counts = np.zeros((2, count), dtype=np.int64)
        self.steps, self.evaluations = self.counts
        self.path: tuple[list[Tensor], list[np.ndarray]] | None = ([], []) if trace else None
        self.kept: dict[int, Tensor] = {}  # whole iterates, by step
        self.few = self._few(count)
        plain = type(self.measure) is Measure and self.path is None and not runs_all_steps
        self.kernels: Any = find_kernels(z) if plain else None
        # The largest residual in units of the smallest target, now and at the look before.
        self.excess = self.last_excess = np.nan
        self.recorded = problem.records_end

    def ends_soon(self) -> bool:
        """Return whether all samples will have converged at the next look, as it seems.

        Residuals are expected to fall as they did last. Asked only where `recorded`.
        """
        fall = self.excess / self.last_excess if self.history.looks > 1 else FIRST_FALL
        return bool(self.excess * fall <= 1)

    def _note_excess(self, residual: np.ndarray, scale: np.ndarray) -> None:
        self.last_excess = self.excess
        target = self.stop.target(float(scale.min()))
        self.excess = float(residual.max()) / target if target > 0 else np.inf

    def look(self, step: int, problem: Problem, at: Point) -> Tensor | None:
        """Judge the rows at work.

        Return the rows to continue with if the others should leave the batch, nothing to continue
        with all, and no rows at the end. If it sets `unit_change` it has judged nothing: the rows
        are too large or too small to square, and it must be called again with the problem and the
        point in units that many times larger.
        """
        stop, z, measure = self.stop, at.z, self.measure
        size, norm = measure.read(problem, at)
        if self.recorded:
            self._note_excess(as_array(size), as_array(norm))
        if self.few is not None:
            if 0 < step < stop.max_steps:
                numbers, scales = size.tolist(), norm.tolist()
                if self.few.follow(numbers, scales, self.mark, measure.guard):
                    self._remember(numbers)
                    self.best_z, self.improved = z, self.history.looks
                    return None
                if self._all_end(step, problem, z, numbers, scales):
                    return NONE_LEFT
            followed = self.few.pop()
            if followed is not None:
                self.best, self.best_scale = followed
                self.mark = self.best
        residual, scale = as_array(size), as_array(norm)
        begins = self.history.looks < self.start_looks
        if begins:
            if self._change_units(residual, scale, at):
                return None
            measure.begin(residual, scale, at)
        fell = residual < PROGRESS * self.mark
        if self.idle:
            fell |= ~self.going
        all_fell = _all(fell)
        if all_fell and self.path is None and step < stop.max_steps:
            waiting = residual > measure.guard + stop.tolerance * scale
            if self.idle:
                waiting |= ~self.going
            if _all(waiting):  # the common case: every sample is on its way
                self._remember(residual)
                self.best, self.best_scale, self.best_z = residual, scale, z
                self.mark, self.improved = residual, self.history.looks
                return self._leave(step, problem) if self.idle else None
            if self.kernels is not None and step > 0 and not begins:
                ended = self._end_rows(step, problem, z, residual, scale)
                if ended is not None:
                    return self._leave(step, problem) if self.idle else None
        if self._change_units(residual, scale, at):
            return None
        return self._judge(step, problem, at, residual, scale, fell)

    def _all_end(
        self, step: int, problem: Problem, z: Tensor, residual: list[float], scale: list[float]
    ) -> bool:
        """Write down the end if a few samples converge at once, in Python numbers.

        Says False, and changes nothing, where anything else is to be seen: `_judge` decides then.
        """
        assert self.few is not None
        together = len(residual) == len(self.status) and self.waiting is None
        if not together or self.runs_all_steps or not self.few.fell(residual, self.mark):
            return False
        units = self.measure.plainly_reached(residual, scale)
        if units is None:
            return False
        self.best_z = z
        self.residual[:] = [now / unit for now, unit in zip(residual, units, strict=True)]
        self.scale[:] = units
        self.start = self.measure.start
        self.steps[:] = step
        self.evaluations[:] = problem.work.count - self.before
        self._end()
        return True

    def _end_rows(
        self, step: int, problem: Problem, z: Tensor, residual: np.ndarray, scale: np.ndarray
    ) -> int | None:
        """Do the same for many samples, of which some may be on their way, in one compiled call.

        Says how many end, or None, without having changed anything, where `_judge` must decide.
        """
        stop, measure = self.stop, self.measure
        if measure.units is not None or self.waiting is not None:
            return None
        value = self.value
        if value is None:
            value = z.new_empty(len(self.status), z.shape[1])
        unit = np.empty(len(residual))
        ended: int = self.kernels.end_rows(
            residual,
            scale,
            self.going,
            self.mark.astype(float),
            measure.start,
            measure.first,
            measure.worst,
            self.samples,
            stop.absolute,
            stop.tolerance,
            PROGRESS,
            measure.settled / stop.tolerance,
            FALL,
            measure.eps,
            measure.low,
            measure.high,
            stop.growth,
            step,
            problem.work.count - self.before,
            as_rows(z),
            unit,
            self.numbers,
            self.counts,
            self.start,
            value.numpy(),
        )
        if ended < 0:
            return None
        self._remember(residual)
        self.best, self.best_scale, self.best_z = residual, unit, z
        self.mark, self.improved = residual, self.history.looks
        if ended:
            self.value, self.idle, self.few = value, True, None
            self.finishes += 1
        return ended

    def _judge(
        self,
        step: int,
        problem: Problem,
        at: Point,
        residual: np.ndarray,
        scale: np.ndarray,
        fell: np.ndarray,
    ) -> Tensor | None:
        stop, z, measure = self.stop, at.z, self.measure
        self._remember(residual)
        unit, reached = measure.judge(residual, scale, self.history.recent)
        if self.path is not None:
            self._record(z, residual, scale)
        far = measure.far(residual, scale, self.history.recent)
        if np.count_nonzero(far):
            runs = self.history.rising() if self.affine else ~fell
            far &= runs | ~np.isfinite(residual + scale)
        converged = reached & ~far
        last = step == stop.max_steps
        if _all(fell):
            self.best, self.best_scale, self.best_z = residual, unit, z
            self.mark, self.improved = residual, self.history.looks
        else:
            chosen = ~far if self.runs_all_steps and last else converged
            self._keep_best(z, residual, unit, fell, chosen)
        waited, self.waiting = self.waiting, None
        if waited is not None:
            converged |= waited  # their best iterate is at least as good as that
        elif self.near and step == 0 and not last and not _all(converged) and self.ends_soon():
            # The others are expected to end with the next evaluation. Where all wait for it, it is
            # one at the solutions of all, which backward can use.
            self.waiting, converged = converged, np.zeros_like(converged)
        stalled = self.history.looks - self.improved >= self.patience
        over = converged | far | last
        growing = np.zeros(len(residual), dtype=bool)
        if self.runs_all_steps:
            over = far | last
        elif last or np.any(stalled):
            asked = (over | stalled) & self.going & ~converged
            growing = self.history.growing(asked, self.improved)
            # What still grows below 1 may level off there, as a saturating step does, and what has
            # come down may only waver: it is too early to tell.
            below = np.maximum(residual, scale) < 1
            early = growing & (below | measure.may_waver(residual, scale, self.best)) & ~far
            if early.any():
                growing &= ~early
                stalled &= ~early
                self.improved = np.where(early, self.history.looks, self.improved)
            over |= stalled
        over &= self.going
        if not over.any():
            return self._leave(step, problem) if self.idle else None
        self._finish(step, problem, residual, converged, over, stalled, far, growing)
        return self._leave(step, problem)

    def may_run_ahead(self) -> bool:
        """Return whether the next looks may be passed if every sample is on its way."""
        plain = type(self.measure) is Measure and self.measure.units is None
        return plain and self.waiting is None and not self.idle

    def limits(self, step: int, problem: Problem, at: Point) -> Limits:
        """Return between which residuals looks decide nothing; `at` was looked at."""
        if self.few is not None:
            followed = self.few.pop()
            if followed is not None:
                self.best, self.best_scale = followed
                self.mark = self.best
        if self.few is not None and not self.recorded:
            self._note_excess(as_array(at.size), as_array(problem.scale(at)))
        return Limits(
            tolerance=self.stop.tolerance,
            absolute=self.stop.absolute,
            progress=PROGRESS,
            guard=self.measure.guard,
            best=self.mark,
            excess=(self.excess, self.last_excess),
            steps=self.stop.max_steps - step,
        )

    def pass_looks(self, ahead: Ahead, limits: Limits) -> None:
        """Take in the looks that a run has passed."""
        if not ahead.looks:
            return
        for residual in limits.sizes[: ahead.looks]:
            self._remember(residual)
        self.best, self.best_scale = limits.sizes[ahead.looks - 1], limits.scales[ahead.looks - 1]
        self.mark, self.best_z, self.improved = self.best, ahead.good, self.history.looks
        self.excess, self.last_excess = limits.excess.tolist()

    def _change_units(self, residual: np.ndarray, scale: np.ndarray, at: Point) -> bool:
        """Return whether the rows need other units, and note by how much."""
        change = self.measure.change_units(residual, scale, self.going, at)
        if change is None:
            return False
        self.unit_change = change
        self.units = change if self.units is None else self.units * change
        self.best_z = self.best_z / change
        return True

    def _true(self, z: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return iterates, of all rows or of some, in the units of the problem."""
        if self.units is None:
            return z
        return z * (self.units if rows is None else self.units.index_select(0, rows))

    def _few(self, count: int) -> FewSamples | None:
        small = 0 < count <= MAX_FEW_SAMPLES and self.path is None
        return FewSamples(self.stop) if small else None

    def _remember(self, residual: np.ndarray | list[float]) -> None:
        if self.history.is_full:
            self.measure.remember(self.history.recent)
        self.history.add(residual)

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
        self.improved = np.where(fell, self.history.looks, self.improved)
        self.mark = np.where(fell, residual, self.mark)

    def _finish(
        self,
        step: int,
        problem: Problem,
        residual: np.ndarray,
        converged: np.ndarray,
        over: np.ndarray,
        stalled: np.ndarray | bool,
        far: np.ndarray,
        growing: np.ndarray,
    ) -> None:
        """Write down how the rows in `over` ended."""
        status = np.zeros(len(over), dtype=np.int64)
        failed = over & ~converged
        if not _all(~failed):
            status[failed] = Status.MAX_STEPS
            if not self.runs_all_steps:
                status[failed & stalled] = Status.STALLED
                status[failed & growing] = Status.DIVERGED
            status[failed & far] = Status.DIVERGED
            status[failed & ~np.isfinite(residual)] = Status.NONFINITE
        samples = self.samples[over]
        self.status[samples] = status[over]
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(self.best == 0, 0.0, self.best / self.best_scale)
        self.residual[samples] = relative[over]
        self.scale[samples] = self.best_scale[over]
        self.start[samples] = self.measure.start[over]
        self.steps[samples] = step
        self.evaluations[samples] = problem.work.count - self.before
        if len(samples) == len(self.status):
            self._end()
        else:
            if self.value is None:
                self.value = self.best_z.new_empty(len(self.status), self.best_z.shape[1])
            rows = torch.from_numpy(over.nonzero()[0]).to(self.value.device)
            where = torch.from_numpy(samples).to(self.value.device)
            self.value.index_copy_(0, where, self._true(self.best_z.index_select(0, rows), rows))
            self.going &= ~over
            self.finishes += 1
            self.idle = True
            self.few = None

    def _end(self) -> None:
        """Keep the iterates of all samples, which end at once."""
        # A copy, because a step may return somebody else's memory.
        self.value = self.best_z.clone() if self.units is None else self._true(self.best_z)
        self.going[:] = False
        self.finishes += 1
        self.idle = True
        self.few = None

    def _leave(self, step: int, problem: Problem) -> Tensor | None:
        """Drop the rows that are over, if that pays, and then return the rows kept.

        All but their best iterates: `keep_rows` does that.
        """
        rows = self.going.nonzero()[0]
        if not len(rows):
            return NONE_LEFT
        if not problem.can_drop_rows:
            return None
        if self.drop_rule is None:
            self.drop_rule = DropRule(problem, self.best_z.shape[1])
        needed = int(self.steps.sum()) + step * len(rows)
        if not self.drop_rule.is_due(problem, step, len(self.going), len(rows), needed):
            return None
        keep = torch.from_numpy(rows).to(self.best_z.device)
        if isinstance(self.improved, np.ndarray):
            self.improved = self.improved[rows]
        for name in ("samples", "best", "best_scale", "mark", "going"):
            setattr(self, name, getattr(self, name)[rows])
        self.measure.select_rows(rows)
        self.units = None if self.units is None else self.units.index_select(0, keep)
        self.idle = False
        self.few = self._few(len(rows))
        self.history.select_rows(rows)
        return keep

    def keep_rows(self, at: Point, rows: Tensor) -> None:
        """Keep only `rows` of the point and of the best iterates, which often are one tensor."""
        same = self.best_z is at.z
        if same:
            self.best_z = self.best_z.new_empty(0)  # the whole is free once the point has let it go
        at.keep_rows(rows)
        self.best_z = at.z if same else self.best_z.index_select(0, rows)

    def keep_state(self, step: int, z: Tensor) -> None:
        """Keep the iterate of all samples after `step` updates.

        Those that are over stay where they ended.
        """
        z = self._true(z)
        state = z.clone() if self.value is None else self.value.clone()
        if self.value is not None:
            moving = self.going.nonzero()[0]
            samples = torch.from_numpy(self.samples[moving]).to(z.device)
            state[samples] = z[torch.from_numpy(moving).to(z.device)]
        self.kept[step] = state

    def _record(self, z: Tensor, residual: np.ndarray, scale: np.ndarray) -> None:
        assert self.path is not None
        states, residuals = self.path
        z = self._true(z)
        state = states[-1].clone() if states else z.clone()
        line = residuals[-1].copy() if residuals else np.zeros(len(self.status))
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(residual == 0, 0.0, residual / scale)
        moving = self.going.nonzero()[0]
        state[torch.from_numpy(self.samples[moving])] = z[torch.from_numpy(moving)]
        line[self.samples[moving]] = relative[moving]
        states.append(state)
        residuals.append(line)

    def ended_apart(self) -> bool:
        """Return whether converged samples were judged while others were not where they ended."""
        apart = self.finishes > 1 or bool(self.status.any())
        return apart and not bool(self.status.all())

    def solution(self) -> Solution:
        """Everything that was written down."""
        value = self._true(self.best_z) if self.value is None else self.value
        dtype, device = value.dtype, value.device

        # NumPy converts a few numbers in a fraction of the time that torch takes.
        with np.errstate(over="ignore"):
            sizes = self.residual.astype(NUMPY[dtype]), self.scale.astype(NUMPY[dtype])
        numbers = self.status, *sizes, self.steps, self.evaluations
        tensors = [torch.from_numpy(each) for each in numbers]
        if device.type != "cpu":
            tensors = [each.to(device) for each in tensors]
        status, residual, scale, steps, evaluations = tensors

        trace = None
        if self.path is not None:
            residuals = np.stack(self.path[1]) if self.path[1] else np.zeros((0, len(self.status)))
            trace = Trace(torch.from_numpy(residuals).to(device, dtype), list(self.path[0]))
        return Solution(
            value=value,
            status=status,
            residual=residual,
            scale=scale,
            steps=steps,
            evaluations=evaluations,
            trace=trace,
        )
