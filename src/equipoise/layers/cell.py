"""What is iterated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from equipoise.core.attribute_watch import AttributeWatch
from equipoise.core.module_tensors import ModuleTensors
from equipoise.core.transforms import is_wrapped
from equipoise.core.tree import Layout, Structure, Tree
from equipoise.layers.belief import certificate_of, contraction_response
from equipoise.layers.certificate import Certificate, Link, significant
from equipoise.layers.compiled_step import CompiledStep
from equipoise.layers.declarations import lipschitz_number
from equipoise.layers.lipschitz import Part, round_up, unknown
from equipoise.layers.problem import Problem
from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.coordinates import CoordinateProblem, Coordinates, Reduced
from equipoise.solvers.problem import Equation, Linearization, Work

__all__ = ["Cell", "CellEquation", "forbid_batch_statistics"]


class Cell(nn.Module):
    """The map of an equilibrium network, `z = step(z, inject(x))`: define `inject` and `step`.

    State and context are one tensor or a tree of tensors, real or complex, batch first. Each
    sample is its own problem: row `i` of the result depends on row `i` of the state and the context
    alone, unless the cell declares otherwise. A cell may say what is known of it, by the attributes
    below and by `lipschitz`, `certificate`, `input_lipschitz`, `output_lipschitz`, `problem`,
    `project_`, `norms`, `part_weights` and `contributions`. Everything else in the library asks the
    cell, so that a cell of your own gets what it declares.

    Attributes:
        symmetric: Its Jacobian in the state is symmetric positive semidefinite, so that conjugate
            gradient and accelerated gradient apply; for a complex state, Hermitian.
        coupled: The samples of a batch depend on each other, so that the batch is one problem and
            nothing leaves it.
        linearize_keeps_graph: When gradients are enabled, its `linearize` also gives `graph`, the
            value with its whole autograd history down to context and weights, so that the step need
            not be recorded once more.
        idle_remedy: What to do about a part that is idle, as a sentence; see `contributions`.
    """

    symmetric: bool = False
    coupled: bool = False
    linearize_keeps_graph: bool = False
    idle_remedy: str = ""
    compiled_step: CompiledStep | None = None
    _step_name: str = "Cell.step"  # what messages call the step

    def inject(self, x: Tree) -> Tree:
        """Return everything that does not depend on the state; called once for each solve.

        Tensors that belong to the whole batch, such as normalised weights or the sparse adjacency
        matrix of one graph, go wrapped in `Shared`. Constants that the step needs, such as the
        height and width of an image, go as they are: numbers, strings, `None`, `torch.Size`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define inject(x).")  # abstract

    def step(self, z: Tree, context: Tree) -> Tree:
        """Return the next state; the same tree, shapes, dtype and device as `z`."""
        raise NotImplementedError(
            f"{type(self).__name__} must define step(z, context)."
        )  # abstract

    def initial(self, x: Tree, context: Tree) -> Tree:
        """Return where a solve starts; by default zeros like the context, if that is one tensor."""
        if not isinstance(context, Tensor):
            if not Structure(context, "Cell.inject").leaves:
                raise ValueError(
                    f"{type(self).__name__}.inject must return a tensor, batch first, or "
                    f"{type(self).__name__}.initial a state; got neither for an input of type "
                    f"{type(x).__name__}."
                )
            raise ValueError(
                f"{type(self).__name__}.initial must be defined when inject returns more than "
                "one tensor."
            )
        return torch.zeros_like(context)

    def readout(self, z: Tree, context: Tree) -> Tree:
        """Return the layer's output for an equilibrium; by default the equilibrium itself.

        For cells that iterate something cheaper than what they stand for.
        """
        return z

    def lipschitz(self) -> Tensor | float | None:
        """Return a bound of the Lipschitz constant of `step` in `z`, if one is known and cheap."""
        return None

    def certificate(self) -> Certificate:
        """Return what is proved of the equilibria at the present weights.

        By default what follows from `lipschitz`, which is as true as the cell's declaration.
        """
        name, bound = type(self).__name__, lipschitz_number(self, self.lipschitz())
        if bound is None:
            return Certificate(
                (Link(name, math.inf),), remedy=f"Define lipschitz or certificate of {name}."
            )
        basis = f"{name}.lipschitz declares {significant(bound, 4, up=True)}"
        return Certificate((Link(name, bound),), basis=basis)

    @property
    def reads_out_the_state(self) -> bool:
        """Whether `readout` returns the state itself."""
        return type(self).readout is Cell.readout

    def input_lipschitz(self) -> Part:
        """Return how far `step` moves with the input `x` at a fixed state; by default unknown."""
        return unknown(type(self).__name__, "it does not say how far its step moves with the input")

    def output_lipschitz(self) -> Part:
        """Return how far the layer's output moves with its input.

        By default `Lip_x / (1 - Lip_z)`, of `input_lipschitz` and the certificate.
        """
        return contraction_response(self)

    def row_lipschitz(self, rows: Tensor) -> Tensor | None:
        """Return how far each of some linear functions of the layer's output moves with its input.

        None where nothing better is known than the length of a row times `output_lipschitz`.

        Args:
            rows: The functions, shape (count, length of the output), float64.
        """
        return None

    def error_factor(self) -> float:
        """Return `k` with `|y - y*| <= k |f(z) - z|`, `y` the output for `z` and `y*` the true one.

        By default `1/(1 - Lip_z)` where the step contracts; infinite where none is known.
        """
        factor = round_up(certificate_of(self).lipschitz)
        contracts = factor < 1 and self.reads_out_the_state
        return round_up(1 / (1 - factor)) if contracts else math.inf

    def problem(self, x: Tree) -> Problem:
        """Return what the equilibria at the input `x` solve; by default raises ValueError."""
        raise ValueError(f"No problem is known for {type(self).__name__}.")

    @property
    def projects(self) -> bool:
        """Whether `project_` is to be called after each step of an optimiser."""
        return False

    def project_(self) -> None:
        """Bring the weights back to where the theorems hold, in place; by default does nothing."""

    def norms(self) -> dict[str, float]:
        """Return upper bounds of the norms of the operators by name, for logs."""
        bound = lipschitz_number(self, self.lipschitz())
        return {} if bound is None else {"step": bound}

    @property
    def norm_limit(self) -> float | None:
        """What all of `norms` must stay below for the theory to hold, where one number says that.

        By default 1 for a bound of the step itself, and nothing for norms of a cell's own.
        """
        return 1.0 if type(self).norms is Cell.norms else None

    def part_weights(self) -> dict[str, list[Tensor]]:
        """Return the weights of the step's parts by name, where it has several worth telling apart.

        Logs and reports say how much of the gradient each gets; those of the layers of a
        composition, say.
        """
        return {}

    def contributions(self, z: Tree, context: Tree) -> dict[str, float]:
        """Return how much each part gives to the step at `z`, relative to the step's value.

        The names are those of `part_weights`. A part that gives next to nothing is idle.
        """
        return {}

    def linearize(self, z: Tree, context: Tree) -> Linearization | None:
        """Return the step linearised at `z`, if the cell can do better than autograd.

        It can by keeping its masks, for instance. `value`, `jvp` and `vjp` are on state trees;
        `select_rows` makes the same for some rows of the batch. For a complex state `vjp` is the
        product with the conjugate transpose, as autograd's is.
        """
        return None

    def coordinates(self, z: Tree, context: Tree) -> Coordinates | None:
        """Return the step in cheaper coordinates, for a solve without gradients from `z`.

        For states of one matrix whose samples are independent. What is found in coordinates is
        judged by `step`; where it falls short the solve continues in the state.
        """
        return None

    def compiled_runs(self, z: Tree, context: Tree) -> CompiledRuns | None:
        """Return compiled loops that iterate the step, for a solve without gradients from `z`.

        For states of one matrix whose samples are independent. No sample ends by what they
        computed: `step` is evaluated where one may.
        """
        return None

    def forward(self, z: Tree, context: Tree) -> Tree:
        """Call `step`, so that module hooks and `cell.compile()` work."""
        return self.step(z, context)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step, with the arguments of `torch.compile`.

        Unlike other modules, which share the code of `forward` and the compiler's limit of graphs
        for it, each cell has code of its own.
        """
        self.compiled_step = CompiledStep(partial(torch.compile, *args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled_step is None:
            return super().__call__(*args, **kwargs)
        return self.compiled_step(self, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state.pop("compiled_step", None)
        return state


class CellEquation(Equation):
    """A cell's map on matrices, with the context and the weights as explicit arguments.

    The cell is called itself as long as the weights are its own. With others, a private copy of it
    that holds them is called, so that nobody else who uses the cell sees them.

    Args:
        weights: The cell and its weights.
        layout: The layout of its state.
        context: The structure of its context.
        lower: The precision in which to run the cell under autocast, if any.
    """

    layout: Layout

    def __init__(
        self,
        weights: ModuleTensors,
        layout: Layout,
        context: Structure,
        lower: torch.dtype | None = None,
    ) -> None:
        cell = cast(Cell, weights.module)
        self.cell = cell
        self.module_tensors = weights
        self.weight_count = len(weights.tensors)
        self.layout = layout
        self.context = context
        self.lower = lower
        self.symmetric = cell.symmetric
        self.linearize_keeps_graph = cell.linearize_keeps_graph
        # Asked only where the value comes with its history.
        self.linearize_is_step = self.linearize_keeps_graph and _linearizes_its_step(cell)
        self.can_drop_rows = not cell.coupled
        self.coupled_name = f"{type(cell).__name__}.coupled"
        self.training = cell.training
        self.mutable_args = frozenset(place + len(context.leaves) for place in weights.buffers)
        self.rows = tuple(not (shared or cell.coupled) for shared in context.shared) + (
            False,
        ) * len(weights.tensors)

    def holding(self, args: Sequence[Tensor]) -> CellEquation:
        tensors = args[len(self.context.leaves) :]
        if self.module_tensors.matches(tensors):
            return self
        return self._with_weights(self.module_tensors.bind(tensors))

    def freeze(self, args: Sequence[Tensor]) -> tuple[CellEquation, list[Tensor]]:
        weights = self.module_tensors.freeze()
        return self._with_weights(weights), [*args[: len(self.context.leaves)], *weights.tensors]

    def written(self) -> list[str]:
        return self.module_tensors.written()

    def watch(self, args: Sequence[Tensor], wanted: Sequence[bool]) -> Callable[[Tensor], None]:
        watch = AttributeWatch(self.module_tensors.modules)
        return lambda z: self._refuse_cached(watch, z, args, wanted)

    def _refuse_cached(
        self, watch: AttributeWatch, z: Tensor, args: Sequence[Tensor], wanted: Sequence[bool]
    ) -> None:
        """Raise if the step read a tensor that it had computed from trainable ones and kept.

        A solve runs without gradients, so what the step keeps on the cell knows nothing of what it
        was computed from. A tensor that appeared is harmless if it depends on nothing trainable (a
        random mask), or if the step only writes it (for a log) or computes it at each call.
        """
        appeared = {
            path: tensor
            for path, tensor in watch.appeared().items()
            if tensor.is_floating_point() or tensor.is_complex()
        }
        if not appeared:
            return
        count = len(self.context.leaves)
        leaves = [
            (arg.detach().clone() if place in self.mutable_args else arg.detach()).requires_grad_(
                want and (arg.is_floating_point() or arg.is_complex())
            )
            for place, (arg, want) in enumerate(zip(args, wanted, strict=True))
        ]
        devices = [z.device] if z.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            anew = self.module_tensors.bind(leaves[count:], compiled=False, before=watch.before)
            self._with_weights(anew)._flat(cast(Cell, anew.module)._call_impl, leaves)(z.detach())
            for path, tensor in appeared.items():
                computed = watch.at(path, anew.modules)
                if not isinstance(computed, Tensor) or not computed.requires_grad:
                    continue
                leaf = tensor.detach().clone().requires_grad_()
                if self._reads(tensor, leaf, z, leaves):
                    watch.undo()  # so that the next call is refused as well
                    name = self.cell._step_name.replace("Cell.", f"{type(self.cell).__name__}.")
                    raise ValueError(
                        f"{name} must not keep what it computes from "
                        "trainable tensors, because a solve records nothing; got "
                        f"{watch.name(path)!r} of shape {tuple(tensor.shape)}, through which the "
                        "gradient would be lost. Compute it in inject, and pass it on in Shared."
                    )

    def _reads(self, tensor: Tensor, leaf: Tensor, z: Tensor, args: Sequence[Tensor]) -> bool:
        """Return whether the step's value depends on a tensor that the cell holds."""
        held = self.module_tensors.bind(
            args[len(self.context.leaves) :], compiled=False, others={id(tensor): leaf}
        )
        step = self._with_weights(held)._flat(cast(Cell, held.module)._call_impl, args)
        value = step(z.detach())
        if not value.requires_grad:
            return False
        return torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] is not None

    def _with_weights(self, weights: ModuleTensors) -> CellEquation:
        made = object.__new__(CellEquation)
        vars(made).update(vars(self))
        made.module_tensors, made.cell = weights, cast(Cell, weights.module)
        made.drifts = weights.drifts
        return made

    def bind(self, args: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        held = self.holding(args)
        cell = held.cell
        return held._flat(cell if cell.compiled_step is not None else _call_of(cell), args)

    def uncompiled(self) -> CellEquation:
        plain = self.module_tensors.uncompiled()
        return self if plain is self.module_tensors else self._with_weights(plain)

    def _flat(
        self, function: Callable[[Tree, Tree], Tree], args: Sequence[Tensor]
    ) -> Callable[[Tensor], Tensor]:
        layout, name = self.layout, self.cell._step_name
        context = self._context(args)

        def step(z: Tensor) -> Tensor:
            return layout.pack(function(layout.unpack(z), context), name, samples=z.shape[0])

        def step_matrix(z: Tensor) -> Tensor:
            return layout.pack(function(z, context), name, z.shape[0])

        def step_lower(z: Tensor) -> Tensor:
            with self._precision():
                return step(z)

        if self.lower is not None:
            return step_lower
        return step_matrix if layout.is_matrix else step

    def _context(self, args: Sequence[Tensor]) -> Tree:
        return self.context.rebuild(args[: len(self.context.leaves)])

    def declared(self, z: Tensor, args: Sequence[Tensor]) -> Linearization | None:
        held = self.holding(args)
        with self._precision():
            local = held.cell.linearize(self.layout.unpack(z), self._context(args))
        return None if local is None else self._flatten(local)

    def _precision(self) -> AbstractContextManager[object]:
        """Within it the cell computes as low as it may."""
        if self.lower is None:
            return nullcontext()
        return torch.autocast(self.layout.device.type, self.lower)

    def reduced(self, z: Tensor, args: Sequence[Tensor], work: Work) -> Reduced | None:
        if getattr(self.cell.coordinates, "__func__", None) is Cell.coordinates:
            return None  # what that would say after all that follows
        plain = self.layout.is_matrix and self.lower is None and self.cell.compiled_step is None
        if not plain or any(map(is_wrapped, args)):
            return None
        found = self.holding(args).cell.coordinates(z, self._context(args))
        if found is None:
            return None
        problem = CoordinateProblem(found, symmetric=self.symmetric, work=work)
        return Reduced(problem, found.start, None, found.decode)

    def compiled(self, z: Tensor, args: Sequence[Tensor]) -> CompiledRuns | None:
        plain = self.layout.is_matrix and self.lower is None and self.linearize_is_step
        if not plain or any(map(is_wrapped, args)):
            return None
        return self.holding(args).cell.compiled_runs(z, self._context(args))

    def _flatten(self, local: Linearization) -> Linearization:
        layout = self.layout

        def flat(product: Callable[[Tree], Tree]) -> Callable[[Tensor], Tensor]:
            def flat_product(v: Tensor) -> Tensor:
                return layout.pack(product(layout.unpack(v)), "Cell.linearize")

            def lower_product(v: Tensor) -> Tensor:
                with self._precision():
                    return flat_product(v)

            if self.lower is not None:
                return lower_product
            if layout.is_matrix:
                return lambda v: layout.pack(product(v), "Cell.linearize")
            return flat_product

        plain = layout.is_matrix and self.lower is None
        select_rows = local.select_rows
        with self._precision():
            value = layout.pack(local.value, "Cell.linearize")
            graph = None if local.graph is None else layout.pack(local.graph, "Cell.linearize")
        return Linearization(
            value=value,
            jvp=flat(local.jvp),
            vjp=flat(local.vjp),
            select_rows=None
            if select_rows is None
            else lambda rows: self._flatten(select_rows(rows)),
            graph=graph,
            reduce=local.reduce if plain else None,
            compiled=local.compiled if plain else None,
        )


def _call_of(cell: Cell) -> Callable[[Tree, Tree], Tree]:
    """Return what calling a cell as a module does.

    Without hooks a module calls `forward`. To find that there are none takes torch a microsecond at
    each evaluation, and less if the dictionaries where they would be are at hand.
    """
    call: Callable[[Tree, Tree], Tree] = cell._call_impl
    if type(cell)._call_impl is not nn.Module._call_impl or torch._C._get_tracing_state():
        return call
    before, after = cell._forward_pre_hooks, cell._forward_hooks
    before_backward, after_backward = cell._backward_pre_hooks, cell._backward_hooks
    all_before, all_after = (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
    )
    all_before_backward = torch_module._global_backward_pre_hooks
    all_after_backward = torch_module._global_backward_hooks

    def function(z: Tree, context: Tree) -> Tree:
        hooked = before or after or before_backward or after_backward
        hooked = hooked or all_before or all_after or all_before_backward or all_after_backward
        return call(z, context) if hooked else cell.forward(z, context)

    return function


def _linearizes_its_step(cell: Cell) -> bool:
    """Return whether `step` and `linearize` were written together, and nothing comes between."""
    hooked = cell._forward_hooks or cell._forward_pre_hooks or cell.compiled_step is not None
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    if hooked or everywhere:
        return False
    if not vars(cell).keys().isdisjoint(("step", "linearize", "forward")):
        return False
    names = ("step", "linearize")
    step, linearize = (next(c for c in type(cell).__mro__ if name in vars(c)) for name in names)
    return step is linearize and type(cell).forward is Cell.forward


def forbid_batch_statistics(weights: ModuleTensors) -> ModuleTensors:
    """Return a copy of a cell whose step may not normalise by statistics of the batch.

    That makes samples depend on each other, which only a coupled cell may. The cell itself is
    returned if it has no such modules; its other methods may use those it has.
    """
    if not any(map(_normalises_by_the_batch, weights.modules)):
        return weights
    guarded = weights.bind(weights.tensors)
    name = type(weights.module).__name__

    def refuse(*_: Tensor) -> Tensor:
        raise ValueError(
            f"{name}.coupled must be True for a step with batch normalisation in training mode, "
            "which makes samples depend on each other; got False. Set it, or use GroupNorm or "
            "LayerNorm, or call eval()."
        )

    for module in filter(_normalises_by_the_batch, guarded.modules):
        vars(module)["forward"] = refuse
    return guarded


def _normalises_by_the_batch(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.training or not module.track_running_stats
    )
