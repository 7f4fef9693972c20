"""The tensors that a module depends on: collected, and swapped for others during a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from equipoise.core.transforms import is_wrapped

__all__ = ["ModuleTensors", "find_untracked_tensor"]


class ModuleTensors:
    """Every tensor that a module's forward may read through its attributes.

    These are the parameters and buffers of the module and its children, and plain tensor attributes
    that require gradients (a hyper-network's output, say). A tensor used in several places is
    listed once and swapped in all of them.

    Args:
        module: The module to look into.

    Attributes:
        tensors: The tensors.
        buffers: Indices of those that are buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.buffers: set[int] = set()
        self._slots: list[tuple[dict[str, Any], str, int]] = []
        seen: dict[int, int] = {}
        for child in module.modules():
            extra = {
                name: value
                for name, value in vars(child).items()
                if isinstance(value, Tensor) and value.requires_grad
            }
            for slots, names in (
                (child._parameters, child._parameters),
                (child._buffers, child._buffers),
                (vars(child), extra),
            ):
                for name in names:
                    tensor = slots[name]
                    if tensor is None:
                        continue
                    index = seen.setdefault(id(tensor), len(self.tensors))
                    if index == len(self.tensors):
                        self.tensors.append(tensor)
                    self._slots.append((slots, name, index))
                    if slots is child._buffers:
                        self.buffers.add(index)

    def matches(self, tensors: Sequence[Tensor], *, values: bool = False) -> bool:
        """Return whether `tensors` are the objects that the module holds now.

        With `values`, others in the same memory will do.
        """
        pairs = [(slots[name], tensors[index]) for slots, name, index in self._slots]
        return all(own is other or (values and _is_alias(own, other)) for own, other in pairs)

    @contextmanager
    def bind(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let the module use `tensors` in place of its own within a `with` block."""
        before = [(slots, name, slots[name]) for slots, name, _ in self._slots]
        try:
            for slots, name, index in self._slots:
                slots[name] = tensors[index]
            yield
        finally:
            for slots, name, tensor in before:
                slots[name] = tensor


def _is_alias(one: Tensor, other: Tensor) -> bool:
    if is_wrapped(one) or is_wrapped(other):
        return False
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def find_untracked_tensor(recorded: Tensor, known: Sequence[Tensor]) -> Tensor | None:
    """Return a trainable tensor that `recorded` was computed from and that is not in `known`."""
    familiar = {id(tensor) for tensor in known}
    todo, seen = [recorded.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in familiar:
            return cast(Tensor, leaf)
        todo.extend(edge for edge, _ in node.next_functions)
    return None
