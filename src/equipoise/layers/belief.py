"""What a cell says of itself, asked for and believed only of the code that it was said of.

A subclass inherits methods such as `certificate` and `output_lipschitz` along with the rest. If it
computes something else than the class that wrote them, they say nothing of it; neither do they of
a module whose inputs, outputs or weights a hook may change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from equipoise.core.validate import require_type
from equipoise.layers.certificate import Certificate, Link
from equipoise.layers.lipschitz import Bound, Chain, Part, round_up, unknown

if TYPE_CHECKING:
    from equipoise.layers.cell import Cell
    from equipoise.layers.equilibrium import Equilibrium

__all__ = [
    "certificate_of",
    "contraction_response",
    "error_factor_of",
    "find_hook",
    "find_layer_refusal",
    "find_refusal",
    "input_lipschitz_of",
    "output_lipschitz_of",
    "row_lipschitz_of",
]

STEP = ("step", "inject")
OUTPUT = ("step", "inject", "readout")
LAYER = ("forward", "solve", "map", "_call", "_solve")


def find_hook(module: nn.Module) -> str | None:
    """Return why a module may compute something else than its class, if hooks or attributes do so.

    Args:
        module: The module; those inside it are not looked at.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    kinds = (
        ("forward pre-hook", module._forward_pre_hooks, "its input or its weights"),
        ("forward hook", module._forward_hooks, "its output"),
        ("global forward pre-hook", torch_module._global_forward_pre_hooks, "its input"),
        ("global forward hook", torch_module._global_forward_hooks, "its output"),
    )
    for kind, hooks, what in kinds:
        for hook in hooks.values():
            # The library's own ones look and change nothing.
            if not str(getattr(hook, "__module__", "")).startswith("equipoise."):
                return f"a {kind} may change {what}"
    return None


def find_refusal(owner: object, method: str, needed: Sequence[str]) -> str | None:
    """Return why what a class says must not be believed of an object, if so.

    A subclass that computes something else than the class whose statement it inherits has none. If
    that class left open what is computed, the first one that fills it in is meant.

    Args:
        owner: The object.
        method: The method that says it.
        needed: What it is said of: other methods.
    """
    from equipoise.layers.cell import Cell

    kind = type(owner)
    order = kind.__mro__
    if not callable(getattr(kind, method, None)):
        return f"{kind.__name__} has no {method}"
    says = next(one for one in order if method in vars(one))
    for name in needed:
        if name in vars(owner):
            return f"its {name} was replaced, of which {method} knows nothing"
        below = [one for one in order[: order.index(says)] if name in vars(one)]
        left_open = getattr(says, name, None) in (getattr(Cell, name, None), nn.Module.forward)
        if says is Cell or (left_open and len(below) == 1):
            continue
        if below:
            article = "an" if name[0] in "aeiou" else "a"
            return (
                f"{below[0].__name__} has {article} {name} of its own, of which {method} knows "
                "nothing"
            )
    return find_hook(owner) if isinstance(owner, nn.Module) else None


def find_layer_refusal(layer: Equilibrium) -> str | None:
    """Return why what is said of a layer's cell must not be believed of the layer, if so.

    Args:
        layer: The layer, which may be of a subclass that computes something else.
    """
    reason = find_refusal(layer, "output_lipschitz", LAYER)
    return reason and reason.replace("output_lipschitz", "its cell's certificate")


def certificate_of(cell: Cell) -> Certificate:
    """Return the certificate of a cell; one that proves nothing if it is about another class."""
    name, reason = type(cell).__name__, _find_certificate_refusal(cell)
    if reason is not None:
        remedy = f"Define certificate of {name}."
        return Certificate((Link(name, math.inf),), basis=reason, remedy=remedy)
    found = cell.certificate()
    require_type(f"{name}.certificate", found, Certificate, "a Certificate")
    return found


def _find_certificate_refusal(cell: Cell) -> str | None:
    from equipoise.layers.cell import Cell
    from equipoise.layers.wrappers import Wrapper

    # Some certificates only pass on what another method says.
    behind = {Cell.certificate: "lipschitz", Wrapper.certificate: "_through"}
    method = behind.get(type(cell).certificate, "certificate")
    if method == "_through" and type(cell)._through is Wrapper._through:  # type: ignore[attr-defined]
        return f"{type(cell).__name__} does not say what it does to a Lipschitz constant"
    reason = find_refusal(cell, method, STEP)
    if reason is not None:
        return reason.replace("_through", "certificate")
    for name, module in cell.named_modules():
        hook = find_hook(module)
        if hook is not None:
            return f"{name}: {hook}" if name else hook
    return None


def input_lipschitz_of(cell: Cell) -> Part:
    """Return how far a cell's step moves with the input, if what it says is about itself."""
    reason = find_refusal(cell, "input_lipschitz", STEP)
    return cell.input_lipschitz() if reason is None else unknown(type(cell).__name__, reason)


def output_lipschitz_of(cell: Cell) -> Part:
    """Return how far a cell's output moves with the input, if what it says is about itself."""
    reason = find_refusal(cell, "output_lipschitz", OUTPUT) or find_refusal(
        cell, "input_lipschitz", STEP
    )
    if reason is None and cell.coupled:
        reason = "the samples of a batch depend on each other"
    return cell.output_lipschitz() if reason is None else unknown(type(cell).__name__, reason)


def row_lipschitz_of(cell: Cell, rows: Tensor) -> Tensor | None:
    """Return what a cell says of linear functions of its output, if it is about itself.

    Args:
        cell: The cell.
        rows: As of `Cell.row_lipschitz`.
    """
    reason = find_refusal(cell, "row_lipschitz", OUTPUT)
    return cell.row_lipschitz(rows) if reason is None else None


def error_factor_of(cell: Cell) -> float:
    """Return what a cell says of the error of its output, infinite if it is not about itself."""
    reason = find_refusal(cell, "error_factor", OUTPUT)
    return cell.error_factor() if reason is None else math.inf


def contraction_response(cell: Cell) -> Part:
    """Return `Lip_x / (1 - Lip_z)`, how far the equilibrium of a contraction moves.

    For `z = f(z, x)` and `z' = f(z', x')`, `|z - z'| <= Lip_z |z - z'| + Lip_x |x - x'|`.

    Args:
        cell: The cell, whose certificate has `Lip_z` and which says `Lip_x` itself.
    """
    name = type(cell).__name__
    if cell.coupled:
        return unknown(name, "the samples of a batch depend on each other")
    if not cell.reads_out_the_state:
        return unknown(name, "what it reads out of the equilibrium is not the state itself")
    certificate = certificate_of(cell)
    factor = round_up(certificate.lipschitz)
    if not factor < 1:
        missing = certificate.basis if factor == math.inf else ""
        return unknown(name, missing or "its step is not proved to be a contraction")
    response = Bound(
        f"{name}: 1/(1 - {factor:.6g})",
        round_up(1 / (1 - factor)),
        "|z - z'| <= Lip_x |x - x'| / (1 - Lip_z)",
    )
    return Chain((input_lipschitz_of(cell), response))
