"""Whether a network computes what its weights say: closed forms know the weights alone.

A forward hook, or a subclass with another step, makes a network another function. Checks that
rest on closed forms would then be true of a network that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.module_mode import evaluation_mode
from equipoise.core.tree import Structure
from equipoise.core.validate import SettingError
from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium

__all__ = ["ClosedForm", "LayerCall", "call_layer", "require_closed_form"]

SCALES = (0.0, 1.0, 3.0)
"""Of the random states at which steps are compared."""
EXACT = {torch.float64: 1e-9}
ROUGH = 1e-5
"""Relative differences that rounding may make in float64, and in lower precision."""


@dataclass(frozen=True)
class LayerCall:
    """What an equilibrium layer was given and returned when its model was called.

    Attributes:
        x: The layer's input.
        z: What it returned.
        y: What the model returned.
    """

    x: Tensor
    z: Tensor
    y: Tensor


@dataclass(frozen=True)
class ClosedForm:
    """What the statements of a family take a network for, in float64.

    Args:
        kind: The network in a few words with its article, such as "an OptEq".
        formula: What the statements speak of, and nothing else.
        step: From states as rows to the next ones.
        readout: From a state to what the layer returns; by default the state itself.
        head: From what the layer returns to what the model returns, if statements speak of it.
    """

    kind: str
    formula: str
    step: Callable[[Tensor], Tensor]
    readout: Callable[[Tensor], Tensor] = torch.clone
    head: Callable[[Tensor], Tensor] | None = None


@torch.no_grad()
def call_layer(model: nn.Module, layer: nn.Module, x: Tensor) -> LayerCall:
    """Call a model in evaluation mode, and return what one of its layers saw.

    Args:
        model: The model.
        layer: The layer, which may be the model itself.
        x: Samples.
    """
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
        seen.extend((args[0].detach(), z.detach()))

    weight = next(model.parameters(), x)
    hook = layer.register_forward_hook(note)
    try:
        with evaluation_mode(model):
            y = model(x.to(weight.dtype) if x.is_floating_point() else x)
    finally:
        hook.remove()
    return LayerCall(seen[0], seen[1], y)


@torch.no_grad()
def require_closed_form(layer: Equilibrium, cell: Cell, call: LayerCall, form: ClosedForm) -> None:
    """Raise unless a cell's steps, the layer and the model after it do what the weights say.

    Args:
        layer: The layer.
        cell: Its cell, without wrappers that the statements leave out.
        call: What the layer saw just now.
        form: What the weights say.
    """
    with evaluation_mode(layer):
        structure = Structure(cell.inject(call.x), "Cell.inject")
        context = structure.rebuild(structure.leaves)
        start = cell.initial(call.x, context)
        if not isinstance(start, Tensor):
            raise _other(form, "has another state")
        generator = torch.Generator(start.device).manual_seed(0)
        for scale in SCALES:
            drawn = torch.randn(
                start.shape, dtype=start.dtype, device=start.device, generator=generator
            )
            z = scale * drawn
            rows = z.flatten(1).double()
            if not _same(cell(z, context), form.step(rows), rows):
                raise _other(form, "makes another step")
            if not _same(cell.readout(z, context), form.readout(rows), rows):
                raise _other(form, "returns something else than its state")
    if layer.cell is cell and layer.last is not None:
        state = layer.last.value
        if not isinstance(state, Tensor) or not (
            _same(call.z, form.readout(state.flatten(1).double()), state)
            # Some gradients record steps from the equilibrium and return where these end.
            or _same(call.z, _solved_again(layer, call.x), state)
        ):
            raise _other(form, "has a forward hook on its layer, or a forward of its own")
    elif layer._forward_hooks:
        raise _other(form, "has a forward hook on its layer")
    if form.head is not None and not _same(call.y, form.head(call.z.flatten(1).double()), call.z):
        raise _other(form, "has another head")


def _solved_again(layer: Equilibrium, x: Tensor) -> Tensor:
    """What a layer returns, past hooks and a `forward` of its own."""
    with evaluation_mode(layer):
        value: Tensor = layer.solve(x).value
    return value.flatten(1).double()


def _same(found: Any, wanted: Tensor, beside: Tensor) -> bool:
    """Whether two tensors agree up to rounding, relative to them and to what they are made of."""
    if not isinstance(found, Tensor) or found.numel() != wanted.numel():
        return False
    size = float(wanted.norm()) + float(beside.norm())
    gap = float((found.flatten(1).double() - wanted.flatten(1)).norm())
    return gap <= EXACT.get(found.dtype, ROUGH) * size


def _other(form: ClosedForm, what: str) -> SettingError:
    return SettingError(
        "verify.network",
        "compute what its weights say",
        None,
        f"The statements speak of {form.formula} and nothing else.",
        got=f"{form.kind} that {what}",
    )
