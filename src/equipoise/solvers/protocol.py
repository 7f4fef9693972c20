"""What every solver shares: when to stop, how a solve ended, and the form of an update rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from equipoise.core.registry import Registry, choose
from equipoise.core.tree import Tree, row_norm
from equipoise.core.validate import require_between, require_count, require_positive

if TYPE_CHECKING:
    from equipoise.solvers.ahead import Ahead, CompiledRuns, Limits
    from equipoise.solvers.problem import Problem

__all__ = ["SOLVERS", "Move", "Point", "Rule", "Solution", "Solver", "Status", "Stop", "Trace"]

Norm = Literal["state", "leaf", "element"]
"""What of a state must reach the tolerance by itself."""
ToleranceOn = Literal["residual", "error"]
"""What the tolerance is for."""
FEW = 16
"""So many numbers are faster read as a list."""
FAR_ABOVE = 10
"""A distance this many times the tolerance is worth a word in `repr`."""


class Status(IntEnum):
    """How the solve of one sample ended.

    The residual `|f(z) - z|` decides, never the length of the last step.
    """

    CONVERGED = 0
    """The residual reached the tolerance."""
    MAX_STEPS = 1
    """The steps ran out while the residual was still falling, or too early to tell."""
    STALLED = 2
    """The residual stopped falling: a cycle, a singular problem, or the limit of the dtype."""
    DIVERGED = 3
    """The residual grew and kept growing, or the iterate ran far away."""
    NONFINITE = 4
    """The map returned NaN or infinity."""


@dataclass(frozen=True)
class Stop:
    """When a solve is over.

    A sample has converged if `|f(z) - z| <= absolute + tolerance * |f(z)|`. Where the sample's own
    path says that this means nothing, `equipoise.solvers.measure` has the details: an iterate that
    has run far away counts only if its residual has fallen too, and a residual of 1e-14 times the
    size of the start is that of an equilibrium at zero.

    Args:
        tolerance: Relative residual to reach.
        absolute: Residual that is always small enough.
        norm: What must reach the tolerance: each `leaf` of the state by itself, so that a large one
            cannot hide a small one; the whole `state`; or each `element`. For a state of one tensor
            the first two are the same.
        max_steps: Updates made at most.
        patience: A sample has stalled if its best residual has not fallen by a thousandth in this
            many updates.
        growth: A residual or an iterate this many times larger than the start, or than 1 if the
            start is smaller, counts as divergence at once, unless the residual has fallen.
        check_every: Updates between two looks at the residuals; looking makes a GPU wait. By
            default 1 on a CPU, 4 elsewhere.
        tolerance_on: What must reach the tolerance: the `residual`, which is cheap; or the `error`,
            the distance to the equilibrium as `Solution.error` estimates it, or as a Lipschitz
            bound below 1 proves it. That is for the forward solve; `trace` ends where the residual
            reached the tolerance.
    """

    tolerance: float = 1e-4
    absolute: float = 0.0
    max_steps: int = 100
    patience: int = 50
    growth: float = 1e8
    check_every: int | None = None
    norm: Norm = "leaf"
    tolerance_on: ToleranceOn = "residual"

    def __post_init__(self) -> None:
        require_positive("Stop.tolerance", self.tolerance)
        require_positive("Stop.absolute", self.absolute, or_zero=True)
        for name in ("max_steps", "patience"):
            require_count(f"Stop.{name}", getattr(self, name))
        require_between("Stop.growth", self.growth, 1, math.inf, "(]")
        if self.check_every is not None:
            require_count("Stop.check_every", self.check_every)
        choose("Stop.norm", self.norm, get_args(Norm))
        choose("Stop.tolerance_on", self.tolerance_on, get_args(ToleranceOn))

    def target(self, scale: Any) -> Any:
        """Return the residual at which a sample of this scale has converged.

        For tensors, arrays and numbers alike.
        """
        return self.absolute + self.tolerance * scale


@dataclass(frozen=True)
class Trace:
    """The path of a solve, one entry for each look at the residuals.

    A finished sample stays where it ended.

    Attributes:
        residual: Relative residuals, shape (looks, batch).
        state: The iterates, as one state tree for each look.
    """

    residual: Tensor
    state: list[Tree]


@dataclass
class Solution:
    """How a solve ended, one entry for each sample.

    Attributes:
        value: The equilibrium, or the best finite iterate where there is none.
        status: `Status` codes, shape (batch,).
        residual: `|f(z) - z| / |f(z)|` at `value`, recomputed, in the norm of `stop`, shape
            (batch,).
        scale: What `residual` is relative to, `|f(z)|` but for equilibria at zero, shape (batch,).
        steps: Updates made, shape (batch,).
        evaluations: Evaluations of the map and products with its Jacobian, shape (batch,). One of
            them may be a last look at the whole batch (see `equipoise.solvers.coupling`).
        trace: The path, if it was asked for.
        states: The iterates after the steps that were asked for, if any were.
        adjoint: The last backward solve through this solution, if there was one.
        stop: The stopping rule.
        solver: Which solver ran last.
        unrolled: Whether its steps were recorded, as many as the gradient strategy said.
        error_bound: A bound of `|z - z*| / |f(z)|`, proved by a Lipschitz constant `L < 1` that the
            cell declares: `residual / (1 - L)`, shape (batch,); None without one.
        estimate: Computes `error`.
        start: Sizes of the start, which equilibria at zero are judged by.
    """

    value: Tree
    status: Tensor
    residual: Tensor
    steps: Tensor
    evaluations: Tensor
    scale: Tensor | None = None
    trace: Trace | None = None
    states: list[Tree] | None = None
    adjoint: Solution | None = None
    stop: Stop = Stop()  # frozen, and checking a new one for each solve takes 10 us
    solver: Solver | None = None
    unrolled: bool = False
    error_bound: Tensor | None = None
    estimate: Callable[[], Tensor] | None = field(default=None, repr=False, compare=False)
    start: np.ndarray | None = field(default=None, repr=False, compare=False)

    @cached_property
    def error(self) -> Tensor:
        """Estimated distance to the equilibrium, `|z - z*| / |f(z)|`, shape (batch,).

        Found when it is first asked for, at the price of some evaluations (see
        `equipoise.solvers.error`), while the weights are those of the solve; never above
        `error_bound`. Infinite where the equilibrium is not isolated to working precision.
        """
        if self.estimate is None:
            raise ValueError(
                "Solution.error is known only where the map is: in the process that solved, for a "
                "forward solve outside of torch.func transforms."
            )
        found = self.estimate()
        return found if self.error_bound is None else torch.minimum(found, self.error_bound)

    def __getstate__(self) -> dict[str, Any]:
        # The map holds weights and the batch.
        return {**vars(self), "estimate": None}

    @property
    def converged(self) -> Tensor:
        """Which samples converged, shape (batch,)."""
        return self.status == Status.CONVERGED

    @property
    def all_converged(self) -> bool:
        """Whether every sample converged."""
        # For a few numbers a list is several times as fast as an operation on tensors.
        few = self.status.numel() <= FEW
        return not (any(self.status.tolist()) if few else bool(self.status.any()))

    def copy(self) -> Solution:
        """Return another solution of the same attributes; `copy.copy` drops the estimate."""
        made = object.__new__(Solution)
        vars(made).update(vars(self))
        return made

    def rows(self, rows: Tensor) -> Solution:
        """Return the solution of some samples, for a state that is one tensor."""
        return Solution(
            self.value[rows],
            self.status[rows],
            self.residual[rows],
            self.steps[rows],
            self.evaluations[rows],
            None if self.scale is None else self.scale[rows],
        )

    def counts(self) -> dict[Status, int]:
        """How many samples ended in which way, for the ways that occurred."""
        found = torch.bincount(self.status, minlength=len(Status)).tolist()
        return {status: found[status] for status in Status if found[status]}

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status.name}" for status, count in self.counts().items())
        if not self.status.numel():
            return "Solution(empty batch)"
        return (
            f"Solution({counts}; worst residual {self.residual.max():.1e}, {self._far()}"
            f"at most {self.steps.max()} steps and {self.evaluations.max()} evaluations)"
        )

    def _far(self) -> str:
        """How far converged samples may be from their equilibria, if that is worth a word."""
        try:
            errors = self.error[self.converged]
        except Exception:  # no reason not to show the rest: the user's own step may raise anything
            return ""
        worst = float(errors.max()) if errors.numel() else 0.0
        if worst <= FAR_ABOVE * self.stop.tolerance:
            return ""
        return f"but about {worst:.0e} from the equilibrium, "


class Point:
    """Where a solve is; what nobody asks for is not computed.

    Args:
        z: The iterate, shape (samples, width).
        f: The map at `z`.
        gap: `f - z`, where it is known.
        norm: The norm of each row, of the coordinates that these are.
        lengths: Returns those of `f - z` and of `f`, given `z` and `f`, faster than `norm` does.
    """

    __slots__ = ("_gap", "_length", "_size", "f", "lengths", "norm", "z")

    def __init__(
        self,
        z: Tensor,
        f: Tensor,
        gap: Tensor | None = None,
        norm: Callable[[Tensor], Tensor] = row_norm,
        lengths: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.z = z
        self.f = f
        self.norm = norm
        self._gap = gap
        self.lengths = lengths
        self._size: Tensor | None = None
        self._length: Tensor | None = None

    @classmethod
    def predicted(cls, move: Move, norm: Callable[[Tensor], Tensor]) -> Point:
        """Return where a rule has gone that knows the gap there, or its length as well."""
        # Near enough: only the scale comes from the value, and the end is verified.
        made = cls(move.z, move.z, move.gap, norm)
        made._size, made._length = move.size, move.length
        return made

    # One of these is made for each step: cached_property takes a lock, and longer than the norm.

    def keep_sizes(self, size: Tensor, length: Tensor | None = None) -> Point:
        """Take the length of the gap, or that of `f`, too, from who knows it; return the point."""
        self._size, self._length = size, length
        return self

    @property
    def gap(self) -> Tensor:
        """`f - z`."""
        if self._gap is None:
            self._gap = self.f - self.z
        return self._gap

    @property
    def size(self) -> Tensor:
        """Length of each row of `gap`, shape (samples,)."""
        if self._size is None:
            if self.lengths is not None and self._gap is None:
                self._size, self._length = self.lengths(self.z, self.f)
            else:
                self._size = self.norm(self.gap)
        return self._size

    @property
    def length(self) -> Tensor:
        """Length of each row of `f`, shape (samples,)."""
        if self._length is None:
            self._length = self.norm(self.f)
        return self._length

    def keep_rows(self, rows: Tensor) -> None:
        """Forget all samples but those in `rows`, one tensor after the other."""
        if self._gap is not None:
            self._gap = self._gap.index_select(0, rows)
        self._size = None if self._size is None else self._size.index_select(0, rows)
        self._length = None if self._length is None else self._length.index_select(0, rows)
        same = self.f is self.z
        self.z = self.z.index_select(0, rows)
        self.f = self.z if same else self.f.index_select(0, rows)


class Move(NamedTuple):
    """Where an update rule goes next.

    Attributes:
        z: The next iterate, shape (samples, width).
        f: The map at `z`, if the rule evaluated it.
        gap: `f(z) - z`, if the rule has it from a recurrence. Without `f` and `gap` the loop
            evaluates the map.
        size: Length of each row of that `gap`, if the rule has it, shape (samples,).
        length: Length of each row of `z`, likewise.
    """

    z: Tensor
    f: Tensor | None = None
    gap: Tensor | None = None
    size: Tensor | None = None
    length: Tensor | None = None


class Rule(ABC):
    """The working memory of one solver during one solve.

    Attributes:
        runs_ahead: Whether `run_ahead` may make steps.
    """

    runs_ahead: ClassVar[bool] = False

    @abstractmethod
    def advance(self, at: Point) -> Move:
        """Return the next iterate, given the present one. Must not write into its tensors."""

    def run_ahead(self, at: Point, runs: CompiledRuns, limits: Limits) -> Ahead | None:
        """Make steps in a compiled loop, if there is one for this rule and its present memory.

        Args:
            at: The present iterate, which must not be written into.
            runs: What there is.
            limits: When to stop; gets the looks passed.
        """
        return None

    @abstractmethod
    def select_rows(self, problem: Problem, rows: Tensor) -> None:
        """Keep only `rows` of the memory; `problem` is what is left of the problem."""


class Solver(ABC):
    """One update rule and its settings; `equipoise.solvers.loop` runs it.

    Concrete solvers are final: compose them.

    Attributes:
        linear: Whether it solves affine equations only (the adjoint of an equilibrium, a Newton
            system).
        needs_symmetric: Whether the Jacobian of the map must be symmetric positive semidefinite.
        tracks_residual: Whether it gives `Move.gap`, so that the loop must recompute the final
            residual.
        runs_all_steps: Whether it uses all its steps: it chooses among fixed points, so reaching
            one is no reason to stop.
        combines: Whether its iterates are combinations of iterates and values, by weights that
            `Problem.pair` is enough for, so that it may run in other coordinates.
        remedy: What helps where its steps run out, if not what helps other solvers.
    """

    linear: ClassVar[bool] = False
    needs_symmetric: ClassVar[bool] = False
    tracks_residual: ClassVar[bool] = False
    runs_all_steps: ClassVar[bool] = False
    combines: ClassVar[bool] = False
    remedy: ClassVar[str] = ""

    def rate(self, lipschitz: float) -> float | None:
        """Return a factor by which each step is proved to shorten the distance to the equilibrium.

        None where none is known, as of all solvers that are not plain iteration.

        Args:
            lipschitz: A Lipschitz constant of the map, below 1.
        """
        return None

    @abstractmethod
    def start(self, problem: Problem, z: Tensor, f: Tensor) -> Rule:
        """Return fresh working memory for a solve of `problem` from `z`, where the map is `f`."""


SOLVERS: Registry[Solver] = Registry("solver", Solver)  # type: ignore[type-abstract]
"""All solvers by name."""
