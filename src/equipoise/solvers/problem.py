"""The equations that solvers see: maps on matrices whose rows are independent samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.tree import Layout, Tree, row_norm

if TYPE_CHECKING:
    from equipoise.solvers.ahead import CompiledRuns
    from equipoise.solvers.coordinates import Reduced, ReducedSystem
    from equipoise.solvers.protocol import Point

__all__ = [
    "Equation",
    "Linearization",
    "MapProblem",
    "Problem",
    "Work",
    "linearize_by_autograd",
]


@dataclass(frozen=True)
class Linearization:
    """A map near one point: its value there and products with its Jacobian `J`.

    Attributes:
        value: `f(z)`.
        jvp: `v -> J v`.
        vjp: `v -> J^T v`.
        select_rows: Returns the linearisation of some samples only, given their row numbers;
            without it the loop linearises again.
        graph: The value with its autograd history, where it was recorded.
        point: The leaf of that history that stands for the state, if it has one.
        reduce: Returns the linear equation `v = J v + g` in cheaper coordinates, given `g`; for a
            symmetric `J` on a state of one matrix.
        compiled: Returns compiled runs of linear solvers, if there are any; for a state of one
            matrix.
    """

    value: Tree
    jvp: Callable[[Tree], Tree]
    vjp: Callable[[Tree], Tree]
    select_rows: Callable[[Tensor], Linearization] | None = None
    graph: Tensor | None = None
    point: Tensor | None = None
    reduce: Callable[[Tensor], ReducedSystem] | None = None
    compiled: Callable[[], CompiledRuns | None] | None = None


def linearize_by_autograd(step: Callable[[Tensor], Tensor], z: Tensor) -> Linearization:
    """Linearise `step` at `z` by recording it once.

    `J v` is the derivative of `u -> J^T u`, which is linear in `u`.

    Args:
        step: The map.
        z: Where.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Linearising a step must happen outside of torch.inference_mode, which records "
            "nothing; use torch.no_grad."
        )
    with torch.enable_grad():
        point = z.detach().requires_grad_()
        value = step(point)
    forward: list[tuple[Tensor, Tensor]] = []

    def vjp(v: Tensor) -> Tensor:
        if not value.requires_grad:  # the step ignores its state
            return torch.zeros_like(v)
        (product,) = torch.autograd.grad(value, point, v, retain_graph=True, allow_unused=True)
        return torch.zeros_like(v) if product is None else product

    def jvp(v: Tensor) -> Tensor:
        if not value.requires_grad:
            return torch.zeros_like(v)
        if not forward:
            with torch.enable_grad():
                dummy = torch.zeros_like(value, requires_grad=True)
                (pulled,) = torch.autograd.grad(
                    value, point, dummy, create_graph=True, allow_unused=True
                )
            if pulled is None or not pulled.requires_grad:
                return torch.zeros_like(v)
            forward.append((dummy, pulled))
        dummy, pulled = forward[0]
        (product,) = torch.autograd.grad(pulled, dummy, v, retain_graph=True)
        return product

    return Linearization(value.detach(), jvp, vjp, graph=value, point=point)


class Equation(ABC):
    """`z = f(z, args)` on matrices, with every tensor it depends on made explicit.

    Attributes:
        rows: For each argument, whether its first axis is the batch.
        weight_count: How many arguments, the last ones, are weights.
        symmetric: Whether the Jacobian in `z` is symmetric positive semidefinite.
        can_drop_rows: Whether samples may leave the batch.
        mutable_args: Indices of arguments that evaluating may write to.
        linearize_keeps_graph: Whether `declared` gives a `graph` when gradients are enabled.
        layout: How the state's tensors lie in the rows; nothing if the rows are the state.
        linearize_is_step: Whether the value that `declared` gives is known to be that of the map.
        drifts: Whether evaluating moves the map, as power iterations on a weight do.
        coupled_name: What to set to True if samples depend on each other, for error messages.
        training: Whether a module in training mode is behind it.
        lower: The precision in which the map computes, if that is lower than its values'.
    """

    rows: tuple[bool, ...] = ()
    weight_count: int = 0
    mutable_args: frozenset[int] = frozenset()
    symmetric: bool = False
    can_drop_rows: bool = True
    linearize_keeps_graph: bool = False
    linearize_is_step: bool = False
    layout: Layout | None = None
    drifts: bool = False
    coupled_name: str = "coupled"
    training: bool = False
    lower: torch.dtype | None = None

    @abstractmethod
    def bind(self, args: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `z -> f(z, args)`."""

    def holding(self, args: Sequence[Tensor]) -> Equation:
        """Return the equation of a cell that holds the weights in `args`; by default itself."""
        return self

    def freeze(self, args: Sequence[Tensor]) -> tuple[Equation, Sequence[Tensor]]:
        """Return the equation and its arguments such that later changes of the cell do not matter.

        By default as they are.
        """
        return self, args

    def written(self) -> list[str]:
        """Return the names of what was written to since the equation was frozen, where known."""
        return []

    def watch(
        self, args: Sequence[Tensor], wanted: Sequence[bool]
    ) -> Callable[[Tensor], None] | None:
        """Watch for what evaluating keeps that gradients should flow through.

        Args:
            args: The arguments.
            wanted: Which of them gradients may be asked for.

        Returns:
            What to call with a state after the evaluations; it raises ValueError. By default None.
        """
        return None

    def uncompiled(self) -> Equation:
        """Return the equation without compiled code, for derivatives; by default itself.

        Compiled code can be differentiated once only, and its graph be used once only.
        """
        return self

    def declared(self, z: Tensor, args: Sequence[Tensor]) -> Linearization | None:
        """Return the linearisation in `z`, if the equation knows better than autograd."""
        return None

    def reduced(self, z: Tensor, args: Sequence[Tensor], work: Work) -> Reduced | None:
        """Return the problem in cheaper coordinates, to be solved from `z`, if there are any.

        Args:
            z: The start.
            args: The arguments.
            work: The counter of evaluations to continue.
        """
        return None

    def compiled(self, z: Tensor, args: Sequence[Tensor]) -> CompiledRuns | None:
        """Return compiled runs of solvers with this map, for states such as `z`, if it has any."""
        return None

    def unpack(self, z: Tensor) -> Tree:
        """Return rows as the state that they stand for.

        With coupled samples there is one row, the whole batch.
        """
        return z if self.layout is None else self.layout.unpack(z)

    def pack(self, state: Tree, owner: str = "Cell.step") -> Tensor:
        """Return a state, made by `owner`, as rows."""
        flat: Tensor = state if self.layout is None else self.layout.pack(state, owner)
        return flat


class Problem(ABC):
    """An equation with its arguments: what a solver runs on.

    Attributes:
        args: Every tensor that the map depends on, besides the state.
        weight_count: How many of them, the last ones, are weights.
        mutable_args: Indices of arguments that evaluating may write to.
        symmetric: Whether the Jacobian is symmetric positive semidefinite.
        affine: Whether the map is affine.
        can_drop_rows: Whether samples may leave the batch.
        coupled: Whether the samples depend on each other, so that the batch is one row.
        coupled_name: What declares that, for error messages.
        linearize_keeps_graph: Whether `declared` gives a `graph` when gradients are enabled.
        drifts: Whether evaluating moves the map, as power iterations on a weight do.
        evaluations_to_select: Evaluations of each row that is left, which `select_rows` makes.
        work: Counter of evaluations and Jacobian products, shared with the problems made from this
            one by `select_rows`.
        constant: The constant term of an affine map, which its residuals are relative to as well.
        halves: Whether `pair` gives the two halves of rows.
        factor: By how much products of what `pair` gives must be multiplied.
    """

    args: Sequence[Tensor]
    weight_count: int = 0
    mutable_args: frozenset[int] = frozenset()
    symmetric: bool = False
    affine: bool = False
    can_drop_rows: bool = True
    coupled: bool = False
    coupled_name: str = "coupled"
    linearize_keeps_graph: bool = False
    drifts: bool = False
    evaluations_to_select: float = 0.0
    work: Work
    constant: Tensor | None = None
    halves: bool = False
    factor: float = 1.0

    @abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """Evaluate the map."""

    @property
    def records_end(self) -> bool:
        """Whether `evaluate_last` differs from a call."""
        return False

    def evaluate_last(self, z: Tensor) -> Tensor:
        """Evaluate the map where a solve is likely to end."""
        return self(z)

    @abstractmethod
    def linearize(self, z: Tensor) -> Linearization:
        """Evaluate the map and linearise it."""

    @abstractmethod
    def declared(self, z: Tensor) -> Linearization | None:
        """Return the linearisation, if the problem knows better than autograd."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> Problem:
        """Return the problem of some samples only."""

    @abstractmethod
    def with_args(self, args: Sequence[Tensor]) -> Problem:
        """Return the same equation with other arguments, in all of which it is differentiable."""

    def uncompiled(self) -> Problem:
        """Return the problem without compiled code, for derivatives; by default itself."""
        return self

    def with_own_buffers(self) -> Problem:
        """Return the problem with copies of what evaluating writes to, if it does.

        A function that `torch.func` transforms may write only to tensors that it made itself.
        """
        if not self.drifts:
            return self
        return self.with_args(
            [
                arg.clone() if index in self.mutable_args else arg
                for index, arg in enumerate(self.args)
            ]
        )

    def watch_copy(self, wanted: Sequence[bool]) -> Callable[[Tensor], None] | None:
        """Watch a private copy of a cell that is at work here; the layer watches its own cell.

        Args:
            wanted: Which arguments gradients may be asked for.

        Returns:
            What to call with a state after the solve, if there is a copy.
        """
        return None

    @abstractmethod
    def freeze(self) -> Problem:
        """Return the problem as it is now, such that later changes of the cell do not matter."""

    def written(self) -> list[str]:
        """Return the names of what was written to since the problem was frozen, where known."""
        return []

    def cost_per_row(self, width: int) -> int:
        """Return how many numbers evaluating one row touches at least; `width` are its state's."""
        return width

    def copying(self) -> Problem:
        """Return the problem with values in memory of their own.

        By default they are in any case.
        """
        return self

    def pair(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return two matrices by which rows are multiplied: the first of `u`, the second of `v`.

        Their product is the inner product of the states that `u` and `v` stand for, up to a
        positive factor that is the same for all.
        """
        if not self.halves:
            return rows, rows
        first, second = rows.chunk(2, dim=1)
        return first, second

    def norm(self, rows: Tensor) -> Tensor:
        """Return the norm of each row, shape (samples,)."""
        return row_norm(rows)

    def reduced(self, z: Tensor) -> Reduced | None:
        """Return the problem in cheaper coordinates, to be solved from `z`, if there are any."""
        return None

    def compiled(self, z: Tensor) -> CompiledRuns | None:
        """Return compiled runs of solvers with this map, for states such as `z`, if it has any."""
        return None

    def scale(self, at: Point) -> Tensor:
        """What residuals are relative to, shape (samples,)."""
        return at.length

    @property
    def columns(self) -> tuple[int, ...]:
        """How many columns each tensor of the state has; empty if that is not known."""
        return ()

    def scaled(self, unit: Tensor) -> Problem:
        """Return the problem in units of its rows, `y -> f(unit y) / unit`.

        Args:
            unit: The units, as a column.
        """
        return ScaledProblem(self, unit)

    def unpack(self, z: Tensor) -> Tree:
        """Return rows as the state that they stand for, for what needs its shape."""
        return z

    def pack(self, state: Tree, owner: str = "Cell.step") -> Tensor:
        """Return a state, made by `owner`, as rows."""
        flat: Tensor = state
        return flat


class Work:
    """A counter of map evaluations and Jacobian products.

    Attributes:
        count: How many there were.
        rows_left: How many samples there were when some last left the batch.
    """

    def __init__(self) -> None:
        self.count = 0
        self.rows_left: int | None = None


class MapProblem(Problem):
    """A nonlinear equation with its arguments.

    Args:
        equation: The equation.
        args: Its arguments.
        work: The counter to continue; by default a new one.
        copies: Whether to copy each value, for a step that reuses its memory.
    """

    def __init__(
        self,
        equation: Equation,
        args: Sequence[Tensor],
        work: Work | None = None,
        *,
        copies: bool = False,
    ) -> None:
        self.equation = equation
        self.copies = copies
        # Evaluates where a solve may end, if it can.
        self.recorder: Callable[[Tensor], Tensor | None] | None = None
        self.args = args
        self.weight_count = equation.weight_count
        self.mutable_args = equation.mutable_args
        self.symmetric = equation.symmetric
        self.can_drop_rows = equation.can_drop_rows
        self.coupled = equation.layout is not None and equation.layout.coupled
        self.coupled_name = equation.coupled_name
        self.linearize_keeps_graph = equation.linearize_keeps_graph
        self.drifts = equation.drifts
        self.work = work or Work()
        self._held: Equation | None = None
        self._evaluate: Callable[[Tensor], Tensor] | None = None

    # In Python 3.11 cached_property takes a lock, which is what a small problem would wait for.

    @property
    def _bound(self) -> Equation:
        if self._held is None:
            self._held = self.equation.holding(self.args)
        return self._held

    @property
    def _step(self) -> Callable[[Tensor], Tensor]:
        if self._evaluate is None:
            step = self._bound.bind(self.args)
            self._evaluate = (lambda z: step(z).clone()) if self.copies else step
        return self._evaluate

    def __call__(self, z: Tensor) -> Tensor:
        self.work.count += 1
        return (self._evaluate or self._step)(z)

    @property
    def records_end(self) -> bool:
        return self.recorder is not None

    def evaluate_last(self, z: Tensor) -> Tensor:
        value = None if self.recorder is None else self.recorder(z)
        if value is None:
            return self(z)
        self.work.count += 1
        return value

    def inspect_first(self, inspect: Callable[[Tensor], None]) -> None:
        """Evaluate once with gradients enabled, at the next call, and show `inspect` the value.

        That costs nothing where nothing requires a gradient.
        """
        step = self._step

        def first(z: Tensor) -> Tensor:
            self._evaluate = step
            with torch.enable_grad():
                value = step(z.detach())
            inspect(value)
            return value.detach()

        self._evaluate = first

    def linearize(self, z: Tensor) -> Linearization:
        self.work.count += 1
        return self.declared(z) or linearize_by_autograd(self.uncompiled()._step, z)

    def declared(self, z: Tensor) -> Linearization | None:
        return self._bound.declared(z, self.args)

    def select_rows(self, rows: Tensor) -> Problem:
        self.work.rows_left = len(rows)
        args = [
            arg.index_select(0, rows) if batched else arg
            for arg, batched in zip(self.args, self.equation.rows, strict=True)
        ]
        return MapProblem(self._bound, args, self.work, copies=self.copies)

    def cost_per_row(self, width: int) -> int:
        # A dense layer uses each weight for each row; a convolution uses it at each pixel.
        weights = sum(
            arg.numel()
            for arg, batched in zip(self.args, self.equation.rows, strict=True)
            if not batched
        )
        return max(width, weights)

    def copying(self) -> Problem:
        return MapProblem(self.equation, self.args, self.work, copies=True)

    def with_args(self, args: Sequence[Tensor]) -> Problem:
        return MapProblem(self.equation, args, copies=self.copies)

    def uncompiled(self) -> MapProblem:
        plain = self._bound.uncompiled()
        return self if plain is self._bound else MapProblem(plain, self.args, self.work)

    def watch_copy(self, wanted: Sequence[bool]) -> Callable[[Tensor], None] | None:
        bound = self._bound
        return None if bound is self.equation else bound.watch(self.args, wanted)

    def freeze(self) -> Problem:
        return MapProblem(*self._bound.freeze(self.args))

    def written(self) -> list[str]:
        return self.equation.written()

    def reduced(self, z: Tensor) -> Reduced | None:
        return None if self.copies else self._bound.reduced(z, self.args, self.work)

    def compiled(self, z: Tensor) -> CompiledRuns | None:
        return None if self.copies else self._bound.compiled(z, self.args)

    @property
    def columns(self) -> tuple[int, ...]:
        return () if self.equation.layout is None else self.equation.layout.columns

    def unpack(self, z: Tensor) -> Tree:
        return self.equation.unpack(z)

    def pack(self, state: Tree, owner: str = "Cell.step") -> Tensor:
        return self.equation.pack(state, owner)


class ScaledProblem(Problem):
    """`y = f(u y) / u`, with a unit `u` for each row: where `f` has rows of an extreme size.

    Its Jacobian is that of `f`.

    Args:
        base: The problem.
        unit: The units, as a column.
    """

    def __init__(self, base: Problem, unit: Tensor) -> None:
        self.base = base
        self.unit = unit
        self.args = base.args
        self.mutable_args = base.mutable_args
        self.symmetric = base.symmetric
        self.can_drop_rows = base.can_drop_rows
        self.coupled, self.coupled_name = base.coupled, base.coupled_name
        self.drifts = base.drifts
        self.work = base.work

    def __call__(self, z: Tensor) -> Tensor:
        return self.base(z * self.unit) / self.unit

    def linearize(self, z: Tensor) -> Linearization:
        return self._in_units(self.base.linearize(z * self.unit), self.unit)

    def declared(self, z: Tensor) -> Linearization | None:
        local = self.base.declared(z * self.unit)
        return None if local is None else self._in_units(local, self.unit)

    def _in_units(self, local: Linearization, unit: Tensor) -> Linearization:
        select_rows = local.select_rows
        return Linearization(
            local.value / unit,
            local.jvp,
            local.vjp,
            None
            if select_rows is None
            else lambda rows: self._in_units(select_rows(rows), unit[rows]),
        )

    def select_rows(self, rows: Tensor) -> Problem:
        return ScaledProblem(self.base.select_rows(rows), self.unit[rows])

    def with_args(self, args: Sequence[Tensor]) -> Problem:
        return ScaledProblem(self.base.with_args(args), self.unit)

    def freeze(self) -> Problem:
        return ScaledProblem(self.base.freeze(), self.unit)

    def written(self) -> list[str]:
        return self.base.written()

    @property
    def columns(self) -> tuple[int, ...]:
        return self.base.columns

    def scaled(self, unit: Tensor) -> Problem:
        return ScaledProblem(self.base, self.unit * unit)

    def unpack(self, z: Tensor) -> Tree:
        return self.base.unpack(z * self.unit)

    def pack(self, state: Tree, owner: str = "Cell.step") -> Tensor:
        return self.base.pack(state, owner) / self.unit
