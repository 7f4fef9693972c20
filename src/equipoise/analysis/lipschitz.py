"""The Lipschitz constant of a whole network, part by part (Euclidean norms, evaluation mode)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.analysis.certificate import require_finite_weights
from equipoise.analysis.torch_bounds import (
    bound_torch_module,
    channel_scales,
    is_isometry,
    torch_kind,
)
from equipoise.core.module_mode import evaluation_mode
from equipoise.core.validate import require_type
from equipoise.layers import Bound, Cell, Chain, Equilibrium, Part, Sum
from equipoise.layers.belief import (
    error_factor_of,
    find_hook,
    find_refusal,
    output_lipschitz_of,
    row_lipschitz_of,
)
from equipoise.layers.lipschitz import round_up, unknown
from equipoise.operators import dense_norm

__all__ = ["NetworkBound", "SolveError", "lipschitz_bound"]

MAX_PAIRED_CLASSES = 100
"""Up to so many classes have a bound for each pair of them."""


@dataclass(frozen=True)
class SolveError:
    """How far the outputs of a network are from those of its exact equilibrium.

    Attributes:
        name: The equilibrium layer.
        factor: The layer's output is off by at most this times `|f(z) - z|`.
        output: A bound of how far all outputs move with the layer's output.
        pairs: A bound of how far the difference of each two outputs does, shape (outputs, outputs).
    """

    name: str
    factor: float
    output: float
    pairs: Tensor | None


@dataclass(frozen=True)
class NetworkBound:
    """How far a network's outputs move with its input: `|y - y'| <= value |x - x'|`.

    Attributes:
        value: The Lipschitz constant, rounded up; infinite if a part has none that is known.
        parts: What it is the product of, in order.
        pairs: Bounds of how far the difference of two outputs moves, shape (outputs, outputs); None
            without a last linear map, or with very many outputs.
        errors: What inexact solves do to the outputs, one for each equilibrium.
    """

    value: float
    parts: tuple[Bound, ...]
    pairs: Tensor | None
    errors: tuple[SolveError, ...]

    @property
    def unknown(self) -> tuple[Bound, ...]:
        """The parts of which no constant is known, with the reason in place of a theorem."""
        return tuple(part for part in self.parts if part.value == math.inf)

    def with_input(self, first: Sequence[Bound]) -> NetworkBound:
        """Return the bound of a network whose inputs go through some maps first.

        Args:
            first: The maps, the first one first.
        """
        factor = _product([part.value for part in first])
        return NetworkBound(
            _product([factor, self.value]),
            (*first, *self.parts),
            None if self.pairs is None else self.pairs * round_up(factor),
            self.errors,
        )


@torch.no_grad()
def lipschitz_bound(model: nn.Module, x: Tensor | None = None) -> NetworkBound:
    """Return a proven Lipschitz constant of a network, or which of its parts has none.

    Parts are asked by their method `output_lipschitz` (see `equipoise.layers.lipschitz`), those of
    torch by a table. Constants of parts in a row are multiplied, batch normalisation is folded into
    the linear map before it, and the last linear map counts by the difference of two of its rows.
    All is for evaluation mode, and for exact equilibria.

    Args:
        model: The network.
        x: A sample or more, for parts whose constant depends on the size of images; by default
            zeros of the shape that the model names as its `input_shape`.
    """
    require_type("lipschitz_bound.model", model, nn.Module, "a module")
    require_finite_weights("lipschitz_bound.model", model)  # a constant says nothing of NaN
    with evaluation_mode(model):  # some parametrised weights change when they are read in training
        return _bound_network(_Walk(model, x))


def _bound_network(walk: _Walk) -> NetworkBound:
    leaves = walk.flatten(walk.model)
    values = walk.bound(leaves)
    steps = [(leaf, bound) for leaf, bound in zip(leaves, values, strict=True) if bound is not None]
    steps = [*walk.find_hooks(), *steps]
    scales = walk.find_last_scales(leaves)
    constants = [bound.value for _, bound in steps]
    return NetworkBound(
        _product(constants),
        tuple(bound for _, bound in steps),
        _pair_bounds(steps, 0, scales),
        tuple(
            SolveError(
                walk.names.get(id(leaf), "equilibrium"),
                error_factor_of(leaf.cell),
                _product(constants[place + 1 :]),
                _pair_bounds(steps, place + 1, scales),
            )
            for place, (leaf, _) in enumerate(steps)
            if isinstance(leaf, Equilibrium)
        ),
    )


class _Walk:
    """Reads expressions of parts, and knows what its modules are called.

    Args:
        model: The network.
        x: A sample, or nothing.
    """

    def __init__(self, model: nn.Module, x: Tensor | None) -> None:
        self.model, self.x = model, x
        self.names = {id(module): name for name, module in model.named_modules()}
        self._shapes: dict[str, set[tuple[int, ...]]] | None = None
        self._refused: set[int] = set()

    def flatten(self, part: Part) -> list[Part]:
        """Return what is done one after the other: modules of torch, equilibria, sums, numbers."""
        if isinstance(part, Chain):
            return [leaf for one in part.parts for leaf in self.flatten(one)]
        if isinstance(part, Bound | Sum | Equilibrium):
            return [part]
        hook = find_hook(part)
        if hook is not None:
            self._refused.add(id(part))
            return [unknown(self._name(part), hook)]
        if torch_kind(part) is nn.Sequential:
            modules = part._modules.values()  # children() leaves out what comes twice
            return [leaf for one in modules if one is not None for leaf in self.flatten(one)]
        if is_isometry(part):
            return []
        reason = find_refusal(part, "output_lipschitz", ("forward", "prepare"))
        if reason is None:
            return self.flatten(part.output_lipschitz())  # type: ignore[operator]
        if torch_kind(part).__module__.startswith("torch."):
            return [part]
        return [unknown(self._name(part), reason)]

    def bound(self, leaves: Sequence[Part]) -> list[Bound | None]:
        """Return a bound of each leaf; None where the one before it has it in its own."""
        found: list[Bound | None] = []
        for place, leaf in enumerate(leaves):
            after = leaves[place + 1] if place + 1 < len(leaves) else None
            if place and self._folded_scales(leaves[place - 1], leaf) is not None:
                found.append(None)
            elif isinstance(leaf, Bound):
                found.append(leaf)
            elif isinstance(leaf, Equilibrium):
                found.append(self._equilibrium(leaf))
            elif isinstance(leaf, Sum):
                found.append(self._sum(leaf))
            else:
                assert isinstance(leaf, nn.Module)
                scales = self._folded_scales(leaf, after)
                name = self._name(leaf)
                found.append(bound_torch_module(leaf, name, partial(self._shape, name), scales))
        return found

    def find_hooks(self) -> list[tuple[Part, Bound]]:
        """Return an unknown part for each module with a hook that no leaf has told of."""
        found: list[tuple[Part, Bound]] = []
        for module in self.model.modules():
            hook = None if id(module) in self._refused else find_hook(module)
            if hook is not None:
                missing = unknown(self._name(module), hook)
                found.append((missing, missing))
        return found

    def find_last_scales(self, leaves: Sequence[Part]) -> Tensor | None:
        """Return what a last normalisation multiplies the rows of the linear map before it by."""
        return self._folded_scales(leaves[-2], leaves[-1]) if len(leaves) > 1 else None

    def _folded_scales(self, first: Part, second: Part | None) -> Tensor | None:
        """The factors of a normalisation after a linear map, if they are of the map's outputs."""
        if not (isinstance(first, nn.Module) and isinstance(second, nn.Module)):
            return None
        kind, scales = torch_kind(first), channel_scales(second)
        if kind not in (nn.Linear, nn.Conv1d, nn.Conv2d) or scales is None:
            return None
        if len(scales) != len(first.weight):  # type: ignore[arg-type]
            return None
        # Axis 1 is normalised, which is that of a linear map's outputs for rows alone.
        shape = self._shape(self._name(first)) if kind is nn.Linear else None
        rows = kind is not nn.Linear or (shape is not None and len(shape) == 2)
        return scales if rows else None

    def _equilibrium(self, layer: Equilibrium) -> Bound:
        name, cell = self._name(layer), layer.cell
        reason = find_refusal(layer, "output_lipschitz", ("forward",))
        if reason is not None:
            self._refused.add(id(layer))
            return unknown(name, reason)
        return self._total(name, output_lipschitz_of(cell))

    def _sum(self, part: Sum) -> Bound:
        terms = [self._total(part.name, one) for one in part.parts]
        missing = [term for term in terms if term.value == math.inf]
        if missing:
            return unknown(part.name, missing[0].theorem)
        value = round_up(math.fsum(term.value for term in terms))
        return Bound(part.name, value, " + ".join(f"{term.value:.4g}" for term in terms))

    def _total(self, name: str, part: Part) -> Bound:
        """The product over an expression as one part, or its first unknown factor."""
        bounds = [bound for bound in self.bound(self.flatten(part)) if bound is not None]
        missing = [bound for bound in bounds if bound.value == math.inf]
        if missing:
            return unknown(name, f"{missing[0].name}: {missing[0].theorem}")
        value = _product([bound.value for bound in bounds])
        if len(bounds) == 1:
            return Bound(name, value, bounds[0].theorem)
        return Bound(name, value, " x ".join(f"{bound.value:.4g}" for bound in bounds))

    def _name(self, module: nn.Module) -> str:
        return self.names.get(id(module)) or type(module).__name__

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a module's input when the network gets a sample; None if it has several."""
        if self._shapes is None:
            self._shapes = _trace_shapes(self.model, self.x)
        several = self._shapes.get(name, set())
        return next(iter(several)) if len(several) == 1 else None


@torch.no_grad()
def _trace_shapes(model: nn.Module, x: Tensor | None) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of all modules' inputs for a sample; empty if nobody names one."""
    if x is None:
        shape = getattr(model, "input_shape", None)
        if shape is None:
            return {}
        x = torch.zeros(1, *shape, dtype=next(model.parameters()).dtype)
    found: dict[str, set[tuple[int, ...]]] = {}
    trial = copy.deepcopy(model).eval()

    def listen(name: str, module: nn.Module) -> None:
        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                found.setdefault(name, set()).add(tuple(inputs[0].shape))

        module.register_forward_pre_hook(keep)

    for name, module in trial.named_modules():
        listen(name, module)
        if isinstance(module, Equilibrium):
            module.solves.on_failure = "ignore"
    trial(x[:1])
    return found


def _pair_bounds(
    steps: Sequence[tuple[Part, Bound]], first: int, scales: Tensor | None
) -> Tensor | None:
    """How far the difference of two outputs moves with the input of part `first` of a chain.

    Args:
        steps: The chain.
        first: The part.
        scales: What the outputs of the last part are multiplied by, if it is a linear map.
    """
    if first >= len(steps):
        return None
    last, bound = steps[-1]
    rest = steps[first:-1]
    before = _product([one.value for _, one in rest])
    if before == math.inf:
        return None
    if isinstance(last, nn.Module) and torch_kind(last) is nn.Linear:
        weight: Tensor = last.weight.detach().double()  # type: ignore[operator]
        weight = weight if scales is None else weight * scales[:, None]
        if not 1 < len(weight) <= MAX_PAIRED_CLASSES:
            return None
        rows = weight[:, None] - weight
        pairs: Tensor = torch.linalg.vector_norm(rows, dim=2) * round_up(before)
        # All outputs together move by the norm of the weights.
        pairs = pairs.clamp_max(math.sqrt(2) * round_up(before * float(dense_norm(weight))))
        inner, outer = (rest[-1][0], rest[:-1]) if rest else (None, ())
    elif isinstance(last, Equilibrium) and bound.value < math.inf:
        count = _output_count(last)
        if count is None or not 1 < count <= MAX_PAIRED_CLASSES:
            return None
        eye = torch.eye(count, dtype=torch.float64)
        rows = eye[:, None] - eye
        pairs = math.sqrt(2) * round_up(before * bound.value) * (1 - eye)
        inner, outer = last, rest
    else:
        return None
    if isinstance(inner, Equilibrium):
        sharper = _row_bounds(inner.cell, rows)
        if sharper is not None:
            pairs = torch.minimum(pairs, sharper * round_up(_product([b.value for _, b in outer])))
    return pairs


def _row_bounds(cell: Cell, rows: Tensor) -> Tensor | None:
    """What a cell says of the differences of outputs, each pair asked once."""
    count = len(rows)
    upper = torch.triu_indices(count, count, 1)
    found = row_lipschitz_of(cell, rows[upper[0], upper[1]])
    if found is None:
        return None
    whole = torch.zeros(count, count, dtype=torch.float64)
    whole[upper[0], upper[1]] = found.double().cpu()
    both: Tensor = whole + whole.T
    return both


def _output_count(layer: Equilibrium) -> int | None:
    """How many numbers a layer's output has, if the layer says so."""
    count = getattr(layer, "out_features", None)
    return count if isinstance(count, int) else None


def _product(values: Sequence[float]) -> float:
    """A product, rounded up; infinite if a factor is, whatever the others are."""
    if any(value == math.inf for value in values):
        return math.inf
    return round_up(math.prod(values)) if values else 1.0
