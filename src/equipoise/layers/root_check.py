"""Whether a point is a root: Newton's step from it, and what `g` does along that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from equipoise.core.tree import row_dot, row_norm, to_numpy
from equipoise.solvers.gmres import GMRES
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.loop import run
from equipoise.solvers.measure import part_norm
from equipoise.solvers.problem import Linearization, Problem, linearize_by_autograd
from equipoise.solvers.protocol import Stop

__all__ = ["MAX_DENSE", "RootCheck", "Verdict", "gain_of"]

FALL = 0.36
"""By how much Newton's step must shorten near a root if it is made, with the Jacobian kept.

To a simple root it falls to 0, to one of multiplicity m to (1 - 1/m)^m < 1/e. Near a pole Newton
steps are short too, but there it falls to more than 1/e.
"""
SLOW = 0.1
"""A step that shortens to more than this is one to a multiple root, or to where `|g|` is least."""
FOLLOWED = 4
"""Further steps that must shorten then.

They lead 16 times nearer to a double root. What still passes without being one is a pair of complex
roots that close to the real numbers.
"""
ROUNDED = 0.75
"""Relative steps shorter than machine epsilon to this power may be rounding of `g` alone.

They need not shorten, but must be longer farther away.
"""
VISIBLE = 32
"""Relative steps longer than this many times machine epsilon can be made without much rounding."""
REACHES = (16.0, 128.0, 1024.0)
"""How many of its steps such a `g` is followed along, at least 64 roundings of `z`."""
MINOR = 0.01
"""Steps of a part this much shorter than the longest may be second-order terms of the others."""
MAX_DENSE = 64
"""States up to this wide have their Newton systems solved by elimination.

Krylov methods solve the largest equations first, so that among equations of very different scales
their rough steps are no Newton steps.
"""


def gain_of(g: Tensor, pull: Callable[[Tensor], Tensor]) -> Tensor:
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
class Verdict:
    """What is known of each row of a point.

    Attributes:
        gain: The factor `b` there.
        step: Newton's step, NaN where there is none.
        size: Norms of the parts of the state, shape (rows, parts).
        relative: Length of Newton's step over that of the state, of the worst part.
        passed: Which parts have a step within the tolerance, shape (rows, parts).
        reached: Which rows are roots.
    """

    gain: Tensor
    step: Tensor
    size: np.ndarray
    relative: np.ndarray
    passed: np.ndarray
    reached: np.ndarray

    def replace_rows(self, rows: np.ndarray, other: Verdict) -> None:
        """Take `rows`, a mask, from another verdict."""
        for own in fields(self):
            mine, theirs = getattr(self, own.name), getattr(other, own.name)
            mask = torch.from_numpy(rows).to(mine.device) if isinstance(mine, Tensor) else rows
            mine[mask] = theirs[mask]


class RootCheck:
    """Judges points by Newton's step `d`, the solution of `J d = -g`.

    A point is a root if `d` is at most `tolerance` times as long as `z`, in each part of the state
    that `stop.norm` names, and if it leads somewhere better: with `e = -J^-1 g(z + d)`, the step
    that would be next with the same Jacobian, `|e| <= FALL |d|` (Deuflhard, 2011, section 3.3). If
    `d` is so short that `g` is rounding alone, then in place of that the step from `z + m d` must
    be at least `(m - 1) / 2` times as long, for some `m` and `-m` so large that it is not. Near a
    pole it is shorter on both sides.

    Args:
        g: The function on matrices.
        problem: A problem with the layout and the rows of `g`.
        stop: The stopping rule.
    """

    def __init__(self, g: Callable[[Tensor], Tensor], problem: Problem, stop: Stop) -> None:
        self.g = g
        self.problem = problem
        self.stop = stop

    def columns(self, z: Tensor) -> list[int]:
        """Return how many columns each part of the state has."""
        width = z.shape[1]
        if self.stop.norm == "element":
            return [1] * width
        columns = self.problem.columns
        return [width] if self.stop.norm == "state" or len(columns) < 2 else list(columns)

    def norm(self, matrix: Tensor) -> np.ndarray:
        """Return the norms of the parts of each row, shape (rows, parts)."""
        element = self.stop.norm == "element"
        return part_norm(matrix, None if element else tuple(self.columns(matrix)))

    @torch.no_grad()
    def judge(self, z: Tensor, floor: np.ndarray | float = 0.0) -> Verdict:
        """Return what is true of `z`.

        Args:
            z: The point.
            floor: Steps of parts that are short enough whatever the length of the state.
        """
        size = self.norm(z)
        if not z.numel():
            empty = np.zeros(len(z))
            return Verdict(z.new_ones(len(z)), z, size, empty, size <= 0, empty <= 0)
        g, gain, step, solve = self._newton(z)
        length = self.norm(step)
        length[~np.isfinite(length)] = np.inf
        unit = np.maximum(np.maximum(size, self.norm(z + step)), floor / self.stop.tolerance)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(length == 0, 0.0, length / unit)
        relative[np.isnan(relative)] = np.inf
        passed = (length <= self.stop.target(unit)) & np.isfinite(relative)
        worst = relative.max(axis=1)
        good = passed.all(axis=1) & np.isfinite(to_numpy(g)).all(axis=1)
        unsure = good & (worst > 0)
        if unsure.any():
            good &= ~unsure | self._leads_on(z, step, solve, unit, relative)
        return Verdict(gain, step, size, worst, passed, good)

    def _leads_on(
        self,
        z: Tensor,
        step: Tensor,
        solve: Callable[[Tensor], Tensor],
        unit: np.ndarray,
        relative: np.ndarray,
    ) -> np.ndarray:
        """Return whether the steps lead towards roots, or `g` is rounding and a root is here."""
        worst = relative.max(axis=1, keepdims=True)
        own = np.maximum(relative, MINOR * worst)
        unit = np.where(unit > 0, unit, 1.0)

        def along(m: float | Tensor) -> np.ndarray:
            """Return the lengths of the next steps from `z + m d`, relative to the state."""
            lengths: np.ndarray = self.norm(solve(self.g(z + m * step))) / unit
            return lengths

        shortened = along(1.0)
        found: np.ndarray = (shortened <= FALL * own).all(axis=1)
        eps = torch.finfo(z.dtype).eps
        # The point at the end of a step this short is off by much of the step.
        found &= worst[:, 0] > VISIBLE * eps
        slow = found & (shortened > SLOW * own).any(axis=1)
        if slow.any():
            found &= ~slow | self._keeps_on(z + step, unit)
        rounded = worst[:, 0] <= eps**ROUNDED
        if (rounded & ~found).any():
            least = np.maximum(1.0, 4 * eps / np.where(worst > 0, worst, 1.0))
            major = relative > MINOR * worst
            for reach in REACHES:
                m = reach * least
                column = torch.from_numpy(m).to(z)
                grown = np.minimum(along(column), along(-column)) >= 0.5 * (m - 1) * relative
                found |= rounded & (grown | ~major).all(axis=1)
        return found

    def _keeps_on(self, z: Tensor, unit: np.ndarray) -> np.ndarray:
        """Return whether Newton's steps from `z` on shorten as they do towards a multiple root."""
        kept = np.ones(len(z), dtype=bool)
        for _ in range(FOLLOWED):
            _, _, step, solve = self._newton(z)
            length = self.norm(step) / unit
            z = z + step
            after = self.norm(solve(self.g(z))) / unit
            own = np.maximum(length, MINOR * length.max(axis=1, keepdims=True))
            over = length.max(axis=1) <= VISIBLE * torch.finfo(z.dtype).eps
            kept &= over | (after <= FALL * own).all(axis=1)
        return kept

    def _newton(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return `g`, its gain, Newton's step and `g -> -J^-1 g` at `z`."""
        local = linearize_by_autograd(self.g, z)
        g: Tensor = local.value
        gain = gain_of(g, local.vjp)
        solve = self._solver(z, local, gain)
        step = torch.where((g == 0).all(dim=1, keepdim=True), 0.0, solve(g))
        return g, gain, step, solve

    def _solver(self, z: Tensor, local: Linearization, gain: Tensor) -> Callable[[Tensor], Tensor]:
        """Return `g -> -J^-1 g`, NaN where there is no solution."""
        width = z.shape[1]
        if width <= MAX_DENSE:
            return _dense_solver(z, local)
        b = gain[:, None]
        shifted = Linearization(
            local.value, lambda v: v - b * local.jvp(v), lambda v: v - b * local.vjp(v)
        )
        # Accurately, since what a rough solve leaves out is long where J is nearly singular.
        inner = GMRES(memory=50)
        exact = Stop(100 * torch.finfo(z.dtype).eps, absolute=0.0, max_steps=200, norm="state")

        def solve(g: Tensor) -> Tensor:
            right = -b * g
            system = LinearProblem(
                self.problem, z, right, transpose=False, local=shifted, forcing=True
            )
            found = run(system, torch.zeros_like(z), inner, exact, f=right)
            return torch.where((found.residual <= 1e-3)[:, None], found.value, torch.nan)

        return solve


def _dense_solver(z: Tensor, local: Linearization) -> Callable[[Tensor], Tensor]:
    """Return `g -> -J^-1 g` by elimination, with each equation in units of its gradient."""
    samples, width = z.shape
    matrix = z.new_empty(samples, width, width)
    for index in range(width):
        one = torch.zeros_like(z)
        one[:, index] = 1
        matrix[:, index] = local.vjp(one)
    rows = matrix.abs().amax(dim=2)
    unit = torch.where((rows > 0) & rows.isfinite(), rows, 1.0)
    matrix = matrix / unit[:, :, None]
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    eps = torch.finfo(z.dtype).eps

    def solve(g: Tensor) -> Tensor:
        right = -g / unit
        found: Tensor = torch.linalg.lu_solve(lu, pivots, right.unsqueeze(2)).squeeze(2)
        most = right.abs().amax(dim=1)

        def solved() -> Tensor:
            left = torch.einsum("bij,bj->bi", matrix, found) - right
            return left.abs().amax(dim=1) <= 1e-3 * most

        finite = matrix.isfinite().all(dim=2).all(dim=1) & right.isfinite().all(dim=1)
        rows = (~solved() & finite).nonzero().flatten()
        if rows.numel():
            inverse = torch.linalg.pinv(matrix[rows], rtol=10 * width * eps)
            found[rows] = torch.einsum("bij,bj->bi", inverse, right[rows])
        return torch.where(solved()[:, None], found, torch.nan)

    return solve
