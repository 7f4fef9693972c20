"""Convolutional and residual networks as deep OptEqs (OptEq, Lemma 2 and the remark after it)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from equipoise.core.validate import require_count, require_type
from equipoise.families.opteq.cell import OptEqCell
from equipoise.families.opteq.layer import OptEqLayer
from equipoise.families.opteq.network_reader import read_graph
from equipoise.families.opteq.wiring_plan import wire
from equipoise.layers.options import SolveOptions
from equipoise.operators import Dense, Operator
from equipoise.prox.activation import Identity

__all__ = ["convert_network"]


def convert_network(net: object, input_shape: Sequence[int], solve: SolveOptions) -> nn.Sequential:
    """Return the deep OptEq of a convolutional or residual network, and a head.

    Args:
        net: The network, in evaluation mode.
        input_shape: The shape of a sample.
        solve: How the equilibrium is found.
    """
    require_type("to_opteq.net", net, nn.Module, "a torch module")
    require_type("to_opteq.input_shape", input_shape, Sequence, "the shape of a sample")
    for size in input_shape:
        require_count("to_opteq.input_shape", size)
    graph = read_graph(net, input_shape, "to_opteq")  # type: ignore[arg-type]
    size, layers, head = wire(graph, "to_opteq")
    forgetting = _Nothing(size, 1)
    forgetting.weight = nn.Parameter(graph.like.new_zeros(1, size))
    cell = OptEqCell(
        [forgetting, *(own.operator for own in layers)],
        [_Zero(), *(own.inputs for own in layers)],
        [Identity(), *(own.activation for own in layers)],
        alpha=1.0,
        norm="none",
    )
    named = {"equilibrium": OptEqLayer(cell, None, 1.0, **solve), "head": head, "last": graph.last}
    return nn.Sequential(
        OrderedDict((name, module) for name, module in named.items() if module is not None)
    )


class _Nothing(Dense):
    """The matrix of the layer that forgets the state, for inputs of any shape."""

    def check(self, x: Tensor) -> None:
        Operator.check(self, x)


class _Zero(nn.Module):
    """What the input adds to the layer that forgets."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 1)
