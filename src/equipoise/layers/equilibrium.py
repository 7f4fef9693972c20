"""The equilibrium layer: a cell, a solver and a gradient strategy as an ordinary module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from equipoise.core.module_tensors import ModuleTensors, find_untracked_tensor
from equipoise.core.transforms import full_precision, is_transformed, outside_graphs
from equipoise.core.tree import Layout, Structure, Tree
from equipoise.core.validate import SettingError, require_count, require_type
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.gradients.start import StartStates
from equipoise.layers.belief import output_lipschitz_of
from equipoise.layers.cell import Cell, CellEquation, forbid_batch_statistics
from equipoise.layers.declarations import lipschitz_number
from equipoise.layers.lipschitz import Part
from equipoise.layers.options import CallOptions, Settings, resolve_options
from equipoise.solvers.auto import pick_forward
from equipoise.solvers.policy import OnFailure, SolveLog
from equipoise.solvers.protocol import SOLVERS, Solution, Solver, Stop
from equipoise.solvers.solve import check_context

__all__ = ["Equilibrium"]

TOLERANCE = 1e-4
MAX_STEPS = 100
FindStarts = Callable[[Tensor], StartStates | None]
"""Returns where the solves of one call start, given the cell's own start, on matrices."""


class Equilibrium(nn.Module):
    """Return the solution of `z = cell.step(z, cell.inject(x))` for each sample of a batch.

    Under autocast the injection runs in the lower precision. In bfloat16 so does the cell within
    the solves, if their tolerances are at least twice its precision (0.016), since they could not
    be reached otherwise. States and what solvers keep stay in float32; residuals are those of the
    rounded step, and the true ones may be two or three times as large.

    Args:
        cell: What is iterated.
        solver: A solver, its name, or a table such as `{"name": "anderson", "memory": 3}`; `auto`
            picks from what the cell declares.
        gradient: A gradient strategy, its name, or a table.
        tolerance: Relative residual to reach, in the forward and the adjoint solve.
        max_steps: Updates at most, likewise.
        on_failure: What to do when samples do not converge, forward or backward: `raise`, `warn` or
            `ignore`.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.
        eval_options: Options that differ while the layer is in evaluation mode, such as
            `{"tolerance": 1e-6, "solver": "newton"}`.

    Attributes:
        solves: How the solves since the layer was made ended, forward and backward, and who listens
            to them.
    """

    def __init__(
        self,
        cell: Cell,
        solver: str | Mapping[str, Any] | Solver = "auto",
        gradient: str | Mapping[str, Any] | Gradient = "implicit",
        tolerance: float = TOLERANCE,
        max_steps: int = MAX_STEPS,
        on_failure: OnFailure = "warn",
        *,
        stop: Stop | None = None,
        eval_options: CallOptions | None = None,
    ) -> None:
        super().__init__()
        given: object = cell
        if not isinstance(given, Cell):
            hint = "For a plain function use equipoise.fixed_point."
            hint = "Compile with cell.compile()." if hasattr(given, "_orig_mod") else hint
            hint = f"Write {given.__name__}(...)." if isinstance(given, type) else hint
            raise ValueError(f"Equilibrium.cell must be a Cell; got {type(given).__name__}. {hint}")
        if stop is not None:
            require_type("Equilibrium.stop", stop, Stop, "a Stop")
        if stop is not None and (tolerance, max_steps) != (TOLERANCE, MAX_STEPS):
            raise ValueError(
                "Equilibrium.stop must be given without tolerance and max_steps, which it "
                "contains; got both."
            )
        self.cell = cell
        self.solver = None if solver == "auto" else SOLVERS.resolve(solver, also=["auto"])
        self.gradient = GRADIENTS.resolve(gradient)
        self.stop = stop or Stop(tolerance=tolerance, max_steps=max_steps)
        self.eval_options = resolve_options("Equilibrium.eval_options", eval_options or {})
        self.solves = SolveLog(on_failure, "Equilibrium")
        self._find_starts: FindStarts | None = None

    @outside_graphs
    def forward(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        trace: bool = False,
        states: Sequence[int] | None = None,
        states_gradient: str | Mapping[str, Any] | Gradient | None = None,
        context: Tree = None,
        **options: Unpack[CallOptions],
    ) -> Tree:
        """Solve for `x` and return the output.

        With `states` return a pair: the output, and a list of what it would be at the solver's
        iterates after so many steps, for losses along the path. Each is differentiated by the
        gradient strategy as if it were the equilibrium; for `Unrolled` that is the iterate's own
        derivative. A sample that has ended stays where it did.

        Args:
            x: The input, batch first.
            z0: Where to start, such as the last equilibrium; by default the cell says.
            trace: Whether to keep the path in `last.trace`.
            states: Numbers of steps, rising, such as `[2, 4, 8]`.
            states_gradient: The gradient strategy of these alone; by default that of the output.
                `jacobian_free` returns one step from each, differentiated, and solves nothing.
            context: `cell.inject(x)`, where it is known already; by default it is computed.
            **options: Settings of this call alone; see `CallOptions`.
        """
        found = self._call(x, z0, trace, states, options, context, states_gradient)
        return found.output if states is None else (found.output, found.states)

    @outside_graphs
    def solve(
        self,
        x: Tree,
        z0: Tree | None = None,
        *,
        trace: bool = False,
        states: Sequence[int] | None = None,
        **options: Unpack[CallOptions],
    ) -> Solution:
        """Solve for `x` and return how it ended, with the output in `value`.

        `layer.solve(x).value` is `layer(x)`, gradients included. Unlike `last`, which any other
        call replaces, what is returned belongs to this call, also when several threads share a
        layer. Its `adjoint` is there after `backward()`.

        Args:
            x: The input, batch first.
            z0: Where to start, such as the last equilibrium; by default the cell says.
            trace: Whether to keep the path in `trace`.
            states: Numbers of steps after which to keep the iterate in `states`; see `forward`.
            **options: Settings of this call alone; see `CallOptions`.
        """
        found = self._call(x, z0, trace, states, options)
        if found.plan.solution is None or found.plan.members > 1:
            raise ValueError(
                "Equilibrium.solve must be called outside of vmap, which solves for its members "
                "one by one. Call the layer itself."
            )
        solution = replace(found.plan.solution, value=found.output, states=found.states)
        found.plan.returned = weakref.ref(solution)
        return solution

    def _call(
        self,
        x: Tree,
        z0: Tree | None,
        trace: bool,
        states: Sequence[int] | None,
        options: CallOptions,
        injected: Tree = None,
        states_gradient: str | Mapping[str, Any] | Gradient | None = None,
    ) -> _Call:
        if torch.compiler.is_exporting():
            raise ValueError(
                "Equilibrium cannot be exported by torch.export: how many steps it makes "
                "depends on the data."
            )
        self.check(x, z0)
        settings = self._settings(options)
        asked = None if states is None else _checked_states(states, settings)
        if states_gradient is not None:
            settings = settings._replace(states_gradient=GRADIENTS.resolve(states_gradient))
        injected = self.cell.inject(x) if injected is None else injected
        context = Structure(injected, "Cell.inject")
        remembers = self._find_starts is not None and z0 is None
        start = self.cell.initial(x, context.rebuild(context.leaves)) if z0 is None else z0
        state = Structure(start, "The state", constants=False)
        device = next((leaf.device.type for leaf in [*context.leaves, *state.leaves]), "cpu")
        lower = None
        if torch.is_autocast_enabled(device):
            lower = settings.lower_precision(device)
            # A solve that runs low takes what was injected as it is.
            for tree in (context, state) if lower is None else (state,):
                tree.leaves = [_float(leaf) for leaf in tree.leaves]
        if torch.is_inference_mode_enabled():
            # Newton's method and the cell's own derivatives need recording, which inference tensors
            # refuse.
            with torch.inference_mode(False), torch.no_grad(), full_precision(device):
                for tree in (context, state):
                    tree.leaves = [leaf.clone() for leaf in tree.leaves]
                start = state.rebuild(state.leaves)
                return self._solve(context, start, remembers, lower, trace, asked, settings)
        for tree in (context, state):
            # Tensors made in inference mode cannot be kept for backward, their copies can.
            tree.leaves = [leaf.clone() if leaf.is_inference() else leaf for leaf in tree.leaves]
        with full_precision(device):
            start = state.rebuild(state.leaves)
            return self._solve(context, start, remembers, lower, trace, asked, settings)

    def _settings(self, options: CallOptions) -> Settings:
        """The settings of a call with these options."""
        settings = Settings(self.solver, self.gradient, self.stop, self.solves.on_failure)
        if self.eval_options and not self.training:
            settings = settings.refined("Equilibrium.eval_options", self.eval_options)
        return settings.refined("A call of Equilibrium", options) if options else settings

    @contextmanager
    def starting_from(self, find: FindStarts) -> Iterator[None]:
        """Let calls that are given no `z0` start where `find` says, while the context lasts.

        Args:
            find: Called with the cell's own start as a matrix, one row for each sample; returns
                None to start there.
        """
        before, self._find_starts = self._find_starts, find
        try:
            yield
        finally:
            self._find_starts = before

    @property
    def last(self) -> Solution | None:
        """The last `Solution`, detached; after `backward()` it has the `adjoint` solve's."""
        return self.solves.last

    def check(self, x: Tree, z0: Tree | None = None) -> None:
        """Raise unless `x` is an input of this layer and `z0` a state; by default anything is."""

    def map(self, x: Tree) -> Callable[[Tree], Tree]:
        """Return `z -> f(z, x)`, injecting once; for penalties, diagnostics and plots."""
        structure = Structure(self.cell.inject(x), "Cell.inject")
        context = structure.rebuild(structure.leaves)
        return lambda z: self.cell(z, context)

    def _solve(
        self,
        structure: Structure,
        start: Tree,
        remembers: bool,
        lower: torch.dtype | None,
        trace: bool,
        states: tuple[int, ...] | None,
        settings: Settings,
    ) -> _Call:
        layout = Layout(start, coupled=self.cell.coupled)
        check_context(structure, layout)
        weights = ModuleTensors(self.cell)
        if weights.lazy:  # modules such as LazyLinear get their sizes from a first call
            with torch.no_grad():
                self.cell(start, structure.rebuild(structure.leaves))
            weights = ModuleTensors(self.cell)
        if not self.cell.coupled:
            weights = forbid_batch_statistics(weights)
        bound = lipschitz_number(self.cell, self.cell.lipschitz())
        plan = Plan(
            equation=CellEquation(weights, layout, structure, lower),
            solver=settings.solver or self._pick(bound),
            stop=settings.stop,
            log=self.solves,
            on_failure=settings.on_failure,
            inspect=self._inspect,
            lipschitz=bound,
            trace=trace,
            states=states or (),
        )
        args = [*structure.leaves, *weights.tensors]
        z0 = layout.pack(start, "z0")
        if remembers and self._find_starts is not None and not is_transformed(z0, *args):
            plan.starts = self._find_starts(z0.detach())
            z0 = z0 if plan.starts is None else plan.starts.forward(z0)
        wanted = [arg.requires_grad for arg in args] if torch.is_grad_enabled() else []
        check = plan.equation.watch(args, wanted) if any(wanted) else None
        self._begin(plan, z0, args)
        value = settings.gradient.attach(plan, z0, args)
        if check is not None:
            check(z0)
        context = structure.rebuild(structure.leaves)
        output = self.cell.readout(layout.unpack(value), context)
        if states is None:
            return _Call(output, plan)
        if plan.members > 1:
            raise ValueError(
                "Equilibrium.states must be asked for outside of vmap, which solves for its "
                "members one by one."
            )
        along = (settings.states_gradient or settings.gradient).attach_states(plan, args)
        return _Call(output, plan, [self.cell.readout(layout.unpack(z), context) for z in along])

    def _pick(self, bound: float | None) -> Solver:
        return pick_forward(symmetric=self.cell.symmetric, lipschitz=bound)

    @property
    def solver_in_use(self) -> Solver:
        """The solver of a call without options, in the present mode; what `auto` picks."""
        bound = lipschitz_number(self.cell, self.cell.lipschitz())
        return self._settings({}).solver or self._pick(bound)

    def output_lipschitz(self) -> Part:
        """Return how far the output moves with the input, as the cell says."""
        return output_lipschitz_of(self.cell)

    def _begin(self, plan: Plan, z0: Tensor, args: Sequence[Tensor]) -> None:
        """Called before each solve, with what it is about to be done with."""

    def _inspect(self, recorded: Tensor, known: Sequence[Tensor]) -> None:
        """Refuse a step whose gradient would silently lack a tensor."""
        found = find_untracked_tensor(recorded, known)
        if found is not None:
            raise ValueError(
                f"{type(self.cell).__name__}.step must use trainable tensors through its "
                "attributes or its context; got one of "
                f"shape {tuple(found.shape)} from elsewhere, whose gradient would be lost. "
                "Make it a parameter, an attribute, or "
                "part of inject's result."
            )

    def extra_repr(self) -> str:
        text = f"solver={self.solver or 'auto'}, gradient={self.gradient}, stop={self.stop}"
        return f"{text}, eval_options={self.eval_options}" if self.eval_options else text


class _Call(NamedTuple):
    """What one call of a layer gives: its output, the plan of the solve behind it, and states."""

    output: Tree
    plan: Plan
    states: list[Tree] | None = None


def _checked_states(states: Sequence[int], settings: Settings) -> tuple[int, ...]:
    """Return numbers of steps; raise unless a solve may make them and they rise."""
    key, most = "Equilibrium.states", settings.gradient.step_limit(settings.stop)
    require_type(key, states, Sequence, "a list of steps")
    for step in states:
        require_count(key, step, most)
    if any(first >= second for first, second in pairwise(states)):
        raise SettingError(key, "rise", states, "Sort it, and leave out what is there twice.")
    return tuple(states)


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
