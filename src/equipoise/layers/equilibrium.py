"""The equilibrium layer: a cell, a solver and a gradient strategy as an ordinary module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor, nn

from equipoise.core.module_tensors import ModuleTensors, find_untracked_tensor
from equipoise.core.transforms import full_precision, outside_graphs
from equipoise.core.tree import Layout, Structure, Tree
from equipoise.core.validate import require_type
from equipoise.gradients.base import GRADIENTS, Gradient, Plan
from equipoise.layers.cell import Cell, CellEquation
from equipoise.layers.declarations import lipschitz_number
from equipoise.solvers.auto import pick_forward
from equipoise.solvers.policy import OnFailure, SolveLog
from equipoise.solvers.protocol import SOLVERS, Solution, Solver, Stop
from equipoise.solvers.solve import check_context

__all__ = ["Equilibrium", "SolveOptions"]

TOLERANCE = 1e-4
MAX_STEPS = 100


class SolveOptions(TypedDict, total=False):
    """How an equilibrium is found and differentiated: all arguments of `Equilibrium` but its cell.

    Layers and models take them as `**solve: Unpack[SolveOptions]` and hand them on.

    Attributes:
        solver: A solver or its name; `auto` picks from what the cell declares.
        gradient: A gradient strategy or its name: `implicit`, `unrolled`, ...
        tolerance: Relative residual to reach, in the forward and the adjoint solve.
        max_steps: Updates at most, likewise.
        on_failure: What to do when samples do not converge: `raise`, `warn` or `ignore`.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.
    """

    solver: str | Solver
    gradient: str | Gradient
    tolerance: float
    max_steps: int
    on_failure: OnFailure
    stop: Stop | None


class Equilibrium(nn.Module):
    """Return the solution of `z = cell.step(z, cell.inject(x))` for each sample of a batch.

    Under autocast the injection runs in the lower precision; the solve runs in float32 unless the
    tolerance is ten times coarser than the lower precision, since it could not be reached
    otherwise.

    Args:
        cell: What is iterated.
        solver: A solver or its name; `auto` picks from what the cell declares.
        gradient: A gradient strategy or its name.
        tolerance: Relative residual to reach, in the forward and the adjoint solve.
        max_steps: Updates at most, likewise.
        on_failure: What to do when samples do not converge, forward or backward: `raise`, `warn` or
            `ignore`.
        stop: The stopping rule in full, in place of `tolerance` and `max_steps`.

    Attributes:
        solves: How the solves since the layer was made ended, forward and backward, and who listens
            to them.
    """

    def __init__(
        self,
        cell: Cell,
        solver: str | Solver = "auto",
        gradient: str | Gradient = "implicit",
        tolerance: float = TOLERANCE,
        max_steps: int = MAX_STEPS,
        on_failure: OnFailure = "warn",
        *,
        stop: Stop | None = None,
    ) -> None:
        super().__init__()
        given: object = cell
        if not isinstance(given, Cell):
            hint = "For a plain function use equipoise.solve."
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
        self.solves = SolveLog(on_failure, "Equilibrium")
        self._inspected = False

    @outside_graphs
    def forward(self, x: Tree, z0: Tree | None = None, *, trace: bool = False) -> Tree:
        """Solve for `x`.

        Args:
            x: The input, batch first.
            z0: Where to start, such as the last equilibrium; by default the cell says.
            trace: Whether to keep the path in `last.trace`.
        """
        if torch.compiler.is_exporting():
            raise ValueError(
                "Equilibrium cannot be exported by torch.export: how many steps it makes "
                "depends on the data."
            )
        context = Structure(self.cell.inject(x), "Cell.inject")
        state = Structure(
            self.cell.initial(x, context.rebuild(context.leaves)) if z0 is None else z0, "The state"
        )
        device = next((leaf.device.type for leaf in [*context.leaves, *state.leaves]), "cpu")
        lower = None
        if torch.is_autocast_enabled(device):
            lower = torch.get_autocast_dtype(device)
            lower = None if self.stop.tolerance < 10 * torch.finfo(lower).eps else lower
            for tree in (context, state):
                tree.leaves = [_float(leaf) for leaf in tree.leaves]
        if torch.is_inference_mode_enabled():
            # Newton's method and the cell's own derivatives need recording, which inference tensors
            # refuse.
            with torch.inference_mode(False), torch.no_grad(), full_precision(device):
                for tree in (context, state):
                    tree.leaves = [leaf.clone() for leaf in tree.leaves]
                return self._solve(context, state.rebuild(state.leaves), lower, trace)
        with full_precision(device):
            return self._solve(context, state.rebuild(state.leaves), lower, trace)

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
        self, structure: Structure, start: Tree, lower: torch.dtype | None, trace: bool
    ) -> Tree:
        self._refuse_coupling()
        layout = Layout(start, coupled=self.cell.coupled)
        check_context(structure, layout)
        weights = ModuleTensors(self.cell)
        bound = lipschitz_number(self.cell, self.cell.lipschitz())
        plan = Plan(
            equation=CellEquation(self.cell, layout, structure, weights, lower),
            solver=self.solver or pick_forward(symmetric=self.cell.symmetric, lipschitz=bound),
            stop=self.stop,
            log=self.solves,
            inspect=self._inspect,
            lipschitz=bound,
            trace=trace,
        )
        value = self.gradient.attach(
            plan, layout.pack(start, "z0"), [*structure.leaves, *weights.tensors]
        )
        return self.cell.readout(layout.unpack(value), structure.rebuild(structure.leaves))

    def _refuse_coupling(self) -> None:
        """Refuse batch normalisation by batch statistics in a cell not declared as coupled."""
        for module in () if self.cell.coupled else self.cell.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                module.training or not module.track_running_stats
            ):
                raise ValueError(
                    f"{type(self.cell).__name__}.coupled must be True for batch normalisation "
                    "in training mode, which makes "
                    "samples depend on each other; got False. Set it, or use GroupNorm or "
                    "LayerNorm, or call eval()."
                )

    def _inspect(self, recorded: Tensor, known: Sequence[Tensor]) -> None:
        """Refuse, once, a step whose gradient would silently lack a tensor."""
        if self._inspected:
            return
        found = find_untracked_tensor(recorded, known)
        if found is not None:
            raise ValueError(
                f"{type(self.cell).__name__}.step must use trainable tensors through its "
                "attributes or its context; got one of "
                f"shape {tuple(found.shape)} from elsewhere, whose gradient would be lost. "
                "Make it a parameter, an attribute, or "
                "part of inject's result."
            )
        self._inspected = True

    def extra_repr(self) -> str:
        return f"solver={self.solver or 'auto'}, gradient={self.gradient}, stop={self.stop}"


def _float(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
