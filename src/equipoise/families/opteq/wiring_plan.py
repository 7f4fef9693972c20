"""Which layer of a deep OptEq computes what of a feed-forward network, and where it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from equipoise.core.validate import SettingError
from equipoise.families.opteq.affine_map import Affine, Term
from equipoise.families.opteq.network_graph import Graph
from equipoise.families.opteq.wiring import Injection, Readout, Slot, Units, Wiring
from equipoise.prox.activation import Activation, Identity, LeakyReLU, ReLU

__all__ = ["WiredLayer", "wire"]

REGIONS = 3
"""Parts of the state that layers use in turn; see `equipoise.families.opteq.wiring`."""


@dataclass(frozen=True)
class WiredLayer:
    """One layer: an operator, what the input adds, and an activation."""

    operator: Wiring
    inputs: Injection
    activation: Activation


def wire(graph: Graph, owner: str) -> tuple[int, list[WiredLayer], Readout]:
    """Return the length of the state, the layers, and what reads the output from the last state.

    Args:
        graph: The network.
        owner: Who asks, for messages.
    """
    assert graph.output is not None
    schedule = _schedule(graph)
    needed = _last_uses(graph, schedule)
    slots: dict[int, Slot] = {}
    plans: list[tuple[Activation, list[Units], dict[int, Slot]]] = []
    sizes = [0] * REGIONS
    for layer, (activation, new) in enumerate(schedule):
        units: list[Units] = []
        held: dict[int, Slot] = {}
        room = 0
        carried = [source for source in slots if needed[source] > layer]
        if layer == len(schedule) - 1 and any(term.source == 0 for term in graph.output.terms):
            carried.append(0)  # the input is at hand in every layer, but not behind the last one
        for source in [*new, *carried]:
            own = source in new
            value = graph.sources[source - 1][1] if own else _carry(graph, source)
            held[source] = Slot(room, value.shape)
            room += held[source].size
            if own:
                units.append(Units(held[source], value))
            else:
                signed = not graph.is_positive(source)
                units += _carrying(held[source], value, activation, owner, signed=signed)
        sizes[layer % REGIONS] = max(sizes[layer % REGIONS], room)
        plans.append((activation, units, slots))
        slots = held
    starts = [sum(sizes[:region]) for region in range(REGIONS)]
    layers = []
    for layer, (activation, units, before) in enumerate(plans):
        moved = [replace(own, own=_shift(own.own, starts[layer % REGIONS])) for own in units]
        reads = {key: _shift(slot, starts[(layer - 1) % REGIONS]) for key, slot in before.items()}
        operator = Wiring(moved, reads, sum(sizes), graph.input_shape, graph.like)
        layers.append(WiredLayer(operator, Injection(moved), activation))
    last = starts[(len(plans) - 1) % REGIONS]
    return (
        sum(sizes),
        layers,
        Readout(graph.output, {key: _shift(slot, last) for key, slot in slots.items()}),
    )


def _schedule(graph: Graph) -> list[tuple[Activation, list[int]]]:
    """The activations that each layer computes: all that are ready and of one kind."""
    done: set[int] = {0}
    waiting = list(range(1, len(graph.sources) + 1))
    layers = []
    while waiting:
        ready = [
            source
            for source in waiting
            if all(term.source in done for term in graph.sources[source - 1][1].terms)
        ]
        activation = graph.sources[ready[0] - 1][0]
        chosen = [source for source in ready if graph.sources[source - 1][0] == activation]
        layers.append((activation, chosen))
        done |= set(chosen)
        waiting = [source for source in waiting if source not in done]
    return layers


def _last_uses(graph: Graph, schedule: list[tuple[Activation, list[int]]]) -> dict[int, int]:
    """The number of the last layer that reads a value; the output counts as a further layer."""
    uses = dict.fromkeys(range(len(graph.sources) + 1), -1)
    for layer, (_, sources) in enumerate(schedule):
        for source in sources:
            for term in graph.sources[source - 1][1].terms:
                uses[term.source] = layer
    assert graph.output is not None
    for term in graph.output.terms:
        uses[term.source] = len(schedule)
    return uses


def _carry(graph: Graph, source: int) -> Affine:
    shape = graph.sources[source - 1][1].shape if source else graph.input_shape
    return Affine((Term(source),), graph.like.new_zeros(shape))


def _carrying(
    own: Slot, value: Affine, activation: Activation, owner: str, *, signed: bool
) -> list[Units]:
    """Units that pass a value on: `s(a)` or `s(a) - s(-a)`, where that is a multiple of `a`."""
    if isinstance(activation, Identity) or (not signed and isinstance(activation, ReLU)):
        return [Units(own, value, carried=True)]
    if not isinstance(activation, ReLU | LeakyReLU):
        raise SettingError(
            f"{owner}.net",
            "have ReLU, leaky ReLU or no activations where a shortcut leads past them",
            None,
            "Units of other activations cannot pass a value on.",
            got=type(activation).__name__,
        )
    slope = activation.negative_slope if isinstance(activation, LeakyReLU) else 0.0
    factor = 1 / math.sqrt(1 + slope)
    return [Units(own, value, sign * factor, carried=True) for sign in (1, -1)]


def _shift(slot: Slot, by: int) -> Slot:
    return Slot(slot.first + by, slot.shape)
