"""What following a network's `forward` would leave out: hooks, and values written over in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from equipoise.core.validate import SettingError
from equipoise.families.opteq.affine_map import Affine
from equipoise.layers.belief import find_hook
from equipoise.models.model import Model

__all__ = ["InPlaceTracer", "SharedMemory", "require_plain_calls"]


class _Proxy(fx.Proxy):
    """A value that tells `x += y`, which changes all other names of `x` too, from `x + y`."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class InPlaceTracer(fx.Tracer):
    """Follows a `forward`, with `x += y` as what it is."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return the value of a node."""
        return _Proxy(node, self)


class SharedMemory:
    """Which values lie in the same memory, or may."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[Affine, int]] = {}  # values are kept, or ids would be reused

    def join(self, value: Affine, other: Affine) -> None:
        """Say that a new value lies where another one does.

        Args:
            value: The value that is there.
            other: The new one.
        """
        _, place = self._places.setdefault(id(value), (value, id(value)))
        self._places[id(other)] = other, place

    def is_shared(self, value: object, other: object) -> bool:
        """Whether two values may lie in the same memory."""
        first, second = self._places.get(id(value)), self._places.get(id(other))
        return first is not None and second is not None and first[1] == second[1]


def require_plain_calls(
    net: nn.Module, owner: str, input_shape: Sequence[int] | None = None
) -> None:
    """Raise unless calling a network's parts is calling the `forward` of their classes.

    Args:
        net: The network.
        owner: Who asks, for messages.
        input_shape: The shape of a sample, if it is known.
    """
    for name, module in net.named_modules():
        place = f"{owner}.net.{name}" if name else f"{owner}.net"
        reason = find_hook(module)
        if reason is not None:
            raise SettingError(
                place,
                "be what the forward of its class computes, which is what is converted",
                None,
                "Remove hooks first; those of weight or spectral normalisation and of pruning by "
                "torch.nn.utils.remove_weight_norm, remove_spectral_norm and prune.remove.",
                got=f"{type(module).__name__}: {reason}",
            )
        if isinstance(module, Model) and not _is_prepared(module, net, input_shape):
            got = f"{type(module).__name__}, whose prepare changes them"
            raise SettingError(place, "take samples as they are", None, got=got)


def _is_prepared(module: Model, net: nn.Module, input_shape: Sequence[int] | None) -> bool:
    """Whether the `prepare` of a model leaves samples as they are."""
    if type(module).prepare is Model.prepare:
        return True
    if module is not net or input_shape is None:
        return False
    like = next(own.detach() for own in net.parameters())
    x = torch.linspace(-1, 2, 2 * torch.Size(input_shape).numel()).to(like)
    x = x.reshape(2, *input_shape)
    return torch.equal(module.prepare(x), x)
