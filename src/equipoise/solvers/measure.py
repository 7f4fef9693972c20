"""How far each sample is from its equilibrium: the numbers that decide when it has converged."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import row_norm, to_numpy
from equipoise.solvers.problem import Problem
from equipoise.solvers.protocol import Point, Stop

__all__ = ["Measure", "PartMeasure", "as_array", "assess", "part_norm", "pick_measure"]

SETTLED = 1e-14
"""A residual this small beside the start is that of an equilibrium at zero."""
FALL = 0.1
"""A residual has fallen if it is at most this fraction of the first one."""
NEAR = 10.0
"""A residual is near its target if it is at most this many times as large."""
WAVER = 2.0
"""A residual that has fallen only wavers if it is at most this many times the best one."""


def _all(mask: np.ndarray) -> bool:
    # For 5 to 256 samples this takes 1 us where mask.all() takes 5.
    return bool(np.count_nonzero(mask) == len(mask))


@cache
def comfortable(dtype: torch.dtype) -> tuple[float, float]:
    """Return the norms between which a solver may square what it meets.

    Residuals smaller by machine epsilon do not underflow then, and nothing overflows.
    """
    limits = torch.finfo(dtype)
    return limits.tiny**0.5 / limits.eps, limits.max**0.5 * limits.eps


def pick_measure(stop: Stop, problem: Problem, z: Tensor, start_looks: int = 1) -> Measure:
    """Return the measure by which `stop` judges the samples of a problem that start at `z`."""
    if stop.norm == "element":
        return PartMeasure(stop, z, start_looks, None)
    columns = problem.columns
    if stop.norm == "state" or len(columns) < 2:
        return Measure(stop, z, start_looks)
    return PartMeasure(stop, z, start_looks, columns)


class Measure:
    """Residual and scale of each sample, by the norm of its whole state.

    A sample has converged if `r <= absolute + tolerance * u`, where `r = |f(z) - z|` and `u` is
    `|f(z)|`, but in two rare cases, which the sample's own path decides:

    - `u` is at least `settled * start / tolerance`, with `start` the size of the first point and
      `settled = min(1e-14, tolerance / 1000)`: this lets equilibria at zero converge.
    - If `|f(z)|` exceeds `start`, then `r <= max(absolute + tolerance * max(start, worst),
      first / 10)` must hold as well, with `first` the first residual and `worst` the largest
      so far: an iterate that runs away makes any residual relatively small, and is believed only if
      the residual itself has fallen. Beyond `2 * start`, `r` counts as at least `eps |f(z)|`, below
      which rounding hides it.

    A sample that has run beyond `growth` has diverged unless its residual has fallen in this sense.

    Numbers are true sizes, also where the solve runs in units of its own (`units`).

    Args:
        stop: The stopping rule.
        z: The start, shape (samples, width).
        start_looks: How many looks set the size of the start.
    """

    def __init__(self, stop: Stop, z: Tensor, start_looks: int = 1) -> None:
        self.stop = stop
        self.start_looks = start_looks
        self.low, self.high = comfortable(z.dtype)
        self.eps = torch.finfo(z.dtype).eps
        self.settled = min(SETTLED, 1e-3 * stop.tolerance)
        self.units: np.ndarray | None = None
        self.start = self.first = self.worst = np.zeros(self._shape(z))
        # A residual above `guard + tolerance * scale` is surely not there yet.
        self.guard = np.zeros(z.shape[0])  # len of a tensor takes ten times as long

    def _shape(self, z: Tensor) -> tuple[int, ...]:
        return (z.shape[0],)

    def read(self, problem: Problem, at: Point) -> tuple[Tensor | np.ndarray, Tensor | np.ndarray]:
        """Return the residual and the scale of each row."""
        if self.units is None:
            return at.size, problem.scale(at)
        return self._true(at.size), self._true(problem.scale(at))

    def _true(self, size: Tensor) -> np.ndarray:
        array: np.ndarray = to_numpy(size).astype(float)
        if self.units is None:
            return array
        with np.errstate(over="ignore"):
            array *= self.units
        return array

    def begin(self, residual: np.ndarray, scale: np.ndarray, at: Point) -> None:
        """Note the size of a point that the solve starts from."""
        length = self._true(at.norm(at.z))
        self.start = np.maximum(np.maximum(self.start, scale), np.maximum(residual, length))
        self.first = np.maximum(self.first, residual)
        low = self.low if self.units is None else self.low * self.units
        self.guard = np.maximum(self.stop.absolute + self.settled * self.start, low)

    def judge(
        self, residual: np.ndarray, scale: np.ndarray, recent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what each residual is relative to, and which are small enough.

        Args:
            residual: Residuals, as `read` gives them.
            scale: Scales, likewise.
            recent: Residuals of this look and those since `remember`, shape (looks, rows), with NaN
                for none.
        """
        unit = np.maximum(scale, self.settled / self.stop.tolerance * self.start)
        reached: np.ndarray = residual <= self.stop.target(unit)
        beyond = reached & (scale > self.start)
        if np.count_nonzero(beyond):
            # Most have fallen from the first residual, and are not large enough to hide anything.
            beyond &= (residual > FALL * self.first) | (scale > 2 * self.start)
            if np.count_nonzero(beyond):
                self.remember(recent)
                reached &= self._has_fallen(residual, scale) | ~beyond
        return unit, reached

    def plainly_reached(self, residual: list[float], scale: list[float]) -> list[float] | None:
        """Return what each residual is relative to if all are small enough, beyond any doubt.

        In Python numbers, which are faster than arrays for a few samples. None if some is not, or
        if one of the rare cases has to be looked at, by `change_units`, `judge` and `far`.
        """
        stop, units = self.stop, []
        if self.units is not None:
            return None
        most, settled = min(self.high, stop.growth), self.settled / stop.tolerance
        starts = zip(self.start.tolist(), self.first.tolist(), self.worst.tolist(), strict=True)
        for now, size, (start, first, worst) in zip(residual, scale, starts, strict=True):
            unit = max(size, settled * start)
            known = self.low < now < stop.growth and size < most and start < math.inf
            if not known or not now <= stop.absolute + stop.tolerance * unit:
                return None
            if size > start:  # what `_has_fallen` asks; `worst` may be larger, not smaller
                enough = max(stop.target(max(start, worst)), FALL * first)
                if now > enough or (size > 2 * start and self.eps * size > enough):
                    return None
            units.append(unit)
        return units

    def ordinary(self, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return which rows, if they were the start, would be in neither of the rare cases.

        Of these only the residual and the scale matter, and not `|z| <= residual + scale`.
        """
        zero = self.settled / self.stop.tolerance * np.maximum(self.start, residual + scale)
        ordinary: np.ndarray = (residual > self.low) & (scale < self.high) & (scale >= zero)
        return ordinary

    def _has_fallen(self, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return which residuals are small not only because the iterate has run away."""
        enough = self.stop.target(np.maximum(self.start, self.worst))
        first, rounding = self._fell_from(residual)
        hidden = np.where(scale > 2 * self.start, self.eps * scale, 0.0)
        fallen: np.ndarray = residual <= np.maximum(enough, FALL * first)
        fallen &= hidden <= np.maximum(enough, FALL * rounding)
        return fallen

    def _fell_from(self, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return from where residuals must have fallen, and what hides in rounding likewise."""
        return self.first, self.first

    def remember(self, recent: np.ndarray) -> None:
        """Note residuals of looks that were not judged."""
        self.worst = np.maximum(self.worst, np.fmax.reduce(recent, axis=0))

    def far(self, residual: np.ndarray, scale: np.ndarray, recent: np.ndarray) -> np.ndarray:
        """Return which rows have run away, or are not finite; arguments as of `judge`."""
        if _all(residual < self.stop.growth) and _all(scale < self.stop.growth):
            return np.zeros(len(residual), dtype=bool)
        # Infinity is not less than itself.
        limit = self.stop.growth * np.maximum(self.start, 1.0)
        far: np.ndarray = ~(np.maximum(residual, scale) <= limit) | np.isinf(residual)
        if np.count_nonzero(far):
            self.remember(recent)
            far &= ~self._has_fallen(residual, scale) | ~np.isfinite(residual + scale)
        return far

    def may_waver(self, residual: np.ndarray, scale: np.ndarray, best: np.ndarray) -> np.ndarray:
        """Return which residuals rise no further than those that waver about where they came to.

        They are near their target, or have fallen and are not far above the best one.

        Args:
            residual: Residuals, as `read` gives them.
            scale: Scales, likewise.
            best: The smallest residuals so far.
        """
        fell = (residual <= FALL * self.first) & (residual <= WAVER * best)
        return self._is_near(residual, scale) | fell

    def _is_near(self, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return which residuals are near their target.

        It is that of an iterate no larger than the start: one that runs away makes any near.
        """
        near: np.ndarray = residual <= NEAR * self.stop.target(np.minimum(scale, self.start))
        return near

    def _sizes(self, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Return the larger of `|f(z)|` and `|f(z) - z|`."""
        sizes: np.ndarray = np.maximum(residual, scale)
        return sizes

    def change_units(
        self, residual: np.ndarray, scale: np.ndarray, going: np.ndarray, at: Point
    ) -> Tensor | None:
        """Return by which factors the units of the rows change, as a column, if some must.

        Squares of a very large or very small row would overflow or vanish; in units of its largest
        entry, rounded to a power of two, they do not.
        """
        if self.units is None and _all(residual > self.low) and _all(scale < self.high):
            return None
        sizes = self._sizes(residual, scale)
        if self.units is not None:
            sizes = sizes / self.units
        strange = going & ~((sizes > self.low) & (sizes < self.high))
        if not strange.any() or not at.z.shape[1]:
            return None
        largest = to_numpy(torch.maximum(at.f.abs(), at.z.abs()).amax(dim=1)).astype(float)
        # Rows of zeros, and rows that are not finite, have no better unit.
        strange &= (largest > 0) & np.isfinite(largest)
        change = np.ones(len(largest))
        change[strange] = np.exp2(np.floor(np.log2(largest[strange])))
        if (change == 1).all():
            return None
        self.units = change if self.units is None else change * self.units
        return torch.from_numpy(change).to(at.z.device, at.z.dtype).unsqueeze(1)

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep only `rows`."""
        for name in ("start", "first", "worst", "guard"):
            setattr(self, name, getattr(self, name)[rows])
        self.units = None if self.units is None else self.units[rows]


class PartMeasure(Measure):
    """The same for each leaf of the state, or for each of its entries; the worst of them decides.

    With `r_l` and `u_l` of the parts as in `Measure`, the scale of a sample is `|u|`, and its
    residual is `|u| max_l r_l / u_l`.

    Args:
        stop: The stopping rule.
        z: The start, shape (samples, width).
        start_looks: How many looks set the size of the start.
        columns: How many columns each leaf has; if None, each entry is a part.
    """

    def __init__(
        self, stop: Stop, z: Tensor, start_looks: int, columns: tuple[int, ...] | None
    ) -> None:
        self.columns = columns
        super().__init__(stop, z, start_looks)
        self.reached = np.zeros(len(z), dtype=bool)
        self.is_far = np.zeros(len(z), dtype=bool)
        self.is_near = np.zeros(len(z), dtype=bool)
        self.fell = np.zeros(len(z), dtype=bool)
        self.whole = np.zeros(len(z))

    def _shape(self, z: Tensor) -> tuple[int, ...]:
        return len(z), z.shape[1] if self.columns is None else len(self.columns)

    def _norm(self, matrix: Tensor) -> np.ndarray:
        norm = part_norm(matrix, self.columns)
        if self.units is None:
            return norm
        with np.errstate(over="ignore"):
            norm *= self.units[:, None]
        return norm

    def read(self, problem: Problem, at: Point) -> tuple[np.ndarray, np.ndarray]:
        residual, scale = self._norm(at.gap), self._norm(at.f)
        if problem.constant is not None:
            scale = np.maximum(scale, self._norm(problem.constant))
        size = np.maximum(residual, scale)
        if self.start_looks:
            self.start_looks -= 1
            self.start = np.maximum(self.start, np.maximum(size, self._norm(at.z)))
            self.first = np.maximum(self.first, residual)
        fallen = self._has_fallen(residual, scale)
        self.is_near = np.logical_and.reduce(self._is_near(residual, scale), axis=1)
        self.fell = np.logical_and.reduce(residual <= FALL * self.first, axis=1)
        self.worst = np.maximum(self.worst, residual)
        unit = np.maximum(scale, self.settled / self.stop.tolerance * self.start)
        reached = (residual <= self.stop.target(unit)) & (fallen | (scale <= self.start))
        self.reached = reached.all(axis=1)
        limit = self.stop.growth * np.maximum(self.start, 1.0)
        lost = ~np.isfinite(size)
        self.is_far = (~(size <= limit) & ~fallen | lost).any(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(residual == 0, 0.0, residual / unit).max(axis=1)
        whole, self.whole = _length(unit), _length(size)
        # Only here are the sizes of whole rows seen.
        sizes = self.whole if self.units is None else self.whole / self.units
        unsure = ~((sizes > self.low) & (sizes < self.high)) | (self.stop.absolute > 0)
        self.guard = np.where(unsure, np.inf, 0.0)
        return relative * whole, whole

    def begin(self, residual: np.ndarray, scale: np.ndarray, at: Point) -> None:
        pass

    def plainly_reached(self, residual: list[float], scale: list[float]) -> list[float] | None:
        return None

    def judge(
        self, residual: np.ndarray, scale: np.ndarray, recent: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return scale, self.reached

    def remember(self, recent: np.ndarray) -> None:
        pass

    def _fell_from(self, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A part that is at rest at first gets its residual when other parts move, and is measured
        # by the largest first residual of any part.
        largest = self.first.max(axis=1, keepdims=True)
        rested = self.first <= self.eps**2 * largest
        rises = residual > self.worst / FALL
        first = np.where(rested, self.worst, self.first)
        return np.where(rises, largest, first), np.where(rises | rested, largest, first)

    def far(self, residual: np.ndarray, scale: np.ndarray, recent: np.ndarray) -> np.ndarray:
        return self.is_far

    def may_waver(self, residual: np.ndarray, scale: np.ndarray, best: np.ndarray) -> np.ndarray:
        wavers: np.ndarray = self.is_near | (self.fell & (residual <= WAVER * best))
        return wavers

    def _sizes(self, residual: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return self.whole


def assess(
    problem: Problem, z: Tensor, f: Tensor, stop: Stop, start: np.ndarray | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the residual of each row of `z`, what it is relative to, and which have converged.

    Args:
        problem: The problem.
        z: Where.
        f: The map at `z`.
        stop: The stopping rule.
        start: The sizes of the start, where there was one.
    """
    at, measure, going = Point(z, f), pick_measure(stop, problem, z), np.ones(len(z), dtype=bool)
    measure.start = measure.start + start
    residual, scale = (as_array(numbers) for numbers in measure.read(problem, at))
    if not isinstance(measure, PartMeasure) and _all(measure.ordinary(residual, scale)):
        numbers = residual / scale, scale, residual <= stop.target(scale)
        return tuple(torch.from_numpy(each).to(z.device) for each in numbers)  # type: ignore[return-value]
    change = measure.change_units(residual, scale, going, at)
    if change is not None:
        at, problem = Point(z / change, f / change), problem.scaled(change)
        residual, scale = (as_array(numbers) for numbers in measure.read(problem, at))
    measure.begin(residual, scale, at)
    unit, reached = measure.judge(residual, scale, residual[None])
    reached &= np.isfinite(residual)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(residual == 0, 0.0, residual / unit)
    return (
        torch.from_numpy(relative).to(z.device, z.dtype),
        torch.from_numpy(unit).to(z.device, z.dtype),
        torch.from_numpy(reached).to(z.device),
    )


def as_array(numbers: Tensor | np.ndarray) -> np.ndarray:
    """Return numbers as an array."""
    return numbers if isinstance(numbers, np.ndarray) else to_numpy(numbers)


def _length(parts: np.ndarray) -> np.ndarray:
    """Return the norm of each row, right over the whole range of the dtype."""
    largest = parts.max(axis=1, keepdims=True)
    unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    length: np.ndarray = np.sqrt(np.square(parts / unit).sum(axis=1)) * unit[:, 0]
    return length


def part_norm(matrix: Tensor, columns: tuple[int, ...] | None) -> np.ndarray:
    """Return the norms of the parts of each row, right over the whole range of the dtype."""
    if columns is None:
        entries: np.ndarray = to_numpy(matrix.abs()).astype(float)
        return entries
    parts = torch.split(matrix, list(columns), dim=1)
    norm: np.ndarray = to_numpy(torch.stack([row_norm(part) for part in parts], 1)).astype(float)
    limits = torch.finfo(matrix.dtype)
    sure = (norm > (limits.tiny / limits.eps) ** 0.5) & np.isfinite(norm)
    for index in (~sure).any(axis=0).nonzero()[0]:
        norm[:, index] = _length(to_numpy(parts[index].abs()).astype(float))
    return norm
