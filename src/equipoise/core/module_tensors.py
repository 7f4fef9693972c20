"""The tensors that a module depends on, and private copies of the module that hold others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from equipoise.core.module_copy import INTERNAL, copy_modules, is_compiled

__all__ = ["ModuleTensors", "find_untracked_tensor", "versions", "written_since"]

LAZY: tuple[type, ...] = (UninitializedParameter, UninitializedBuffer)


class ModuleTensors:
    """Every tensor that a module's forward may read through its attributes.

    These are the parameters and buffers of the module and its children, and plain tensor attributes
    that require gradients (a hyper-network's output, say). A tensor used in several places is
    listed once. The module is never written to: those that hold other tensors are copies.

    Args:
        module: The module to look into.

    Attributes:
        module: The module.
        modules: The module and its children, each once.
        tensors: The tensors.
        buffers: Indices of those that are buffers.
        drifts: Whether the module, when it was frozen, had just written to its buffers.
        lazy: Whether there are parameters without shape yet, which are not listed.
    """

    drifts = False
    lazy = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors: list[Tensor] = []
        self.buffers: set[int] = set()
        self.modules = _tree(module)
        self._constants: list[Tensor] = []
        seen: dict[int, int] = {}

        def add(tensor: Tensor) -> int:
            index = seen.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
            return index

        for child in self.modules:
            for parameter in child._parameters.values():
                if type(parameter) in LAZY:
                    self.lazy = True
                elif parameter is not None:
                    add(parameter)
            for buffer in child._buffers.values():
                if buffer is not None and type(buffer) not in LAZY:
                    self.buffers.add(add(buffer))
            for tensor in _plain_tensors(child).values():
                if tensor.requires_grad:
                    add(tensor)
                else:
                    self._constants.append(tensor)
        self._versions = versions(self.tensors[index] for index in self.buffers)

    def matches(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether `tensors` are the listed ones, the very objects."""
        return all(own is other for own, other in zip(self.tensors, tensors, strict=True))

    def bind(
        self,
        tensors: Sequence[Tensor],
        *,
        compiled: bool = True,
        others: dict[int, Tensor] | None = None,
        before: Sequence[dict[str, Any]] | None = None,
    ) -> ModuleTensors:
        """Return a private copy of the module as it is now, with `tensors` for the listed ones.

        Args:
            tensors: One for each of those listed.
            compiled: Whether the copy is compiled where the module is.
            others: What to put in place of further tensors, by `id`.
            before: Attributes that the modules had earlier, for a copy of the module as it was.
        """
        pairs = zip(self.tensors, tensors, strict=True)
        made = ModuleTensors.__new__(ModuleTensors)
        replaced = {id(own): other for own, other in pairs if own is not other}
        replaced.update(others or {})
        made.modules = copy_modules(self.modules, replaced, compiled=compiled, before=before)
        made.module, made.tensors, made.buffers = made.modules[0], list(tensors), self.buffers
        made._constants, made.drifts = self._constants, self.drifts
        made._versions = versions(made.tensors[index] for index in made.buffers)
        return made

    def uncompiled(self) -> ModuleTensors:
        """Return itself, or a private copy that is not compiled if something in the module is."""
        compiled = is_compiled(self.modules)
        return self.bind(self.tensors, compiled=False) if compiled else self

    def freeze(self) -> ModuleTensors:
        """Return a private copy of the module as it is now, with the same tensors.

        Buffers that were written to since they were listed (by the module itself, as running
        statistics are) are copied too, because they will be written to again.
        """
        written = {id(tensor) for tensor in written_since(self._versions)}
        for child in self.modules if written else ():
            # Batch normalisation counts its writes to one buffer, not those to the others.
            own = {id(buffer) for buffer in child._buffers.values() if buffer is not None}
            written |= set() if written.isdisjoint(own) else own
        made = self.bind([t.clone() if id(t) in written else t for t in self.tensors])
        made.drifts = self.drifts or bool(written)
        made._versions = versions(
            (*(made.tensors[index] for index in self.buffers), *self._constants)
        )
        return made

    def written(self) -> list[str]:
        """Return the names of the buffers and attributes that were written to since `freeze`."""
        found = {id(tensor) for tensor in written_since(self._versions)}
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, child in self.module.named_modules()
            for name, tensor in (*child._buffers.items(), *_plain_tensors(child).items())
            if id(tensor) in found
        ]


def _tree(module: nn.Module) -> list[nn.Module]:
    """The module and its children, each once; several times as fast as `modules()`."""
    found = {id(module): module}
    todo = [module]
    while todo:
        for child in todo.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                todo.append(child)
    return list(found.values())


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors that are attributes but neither parameters nor buffers."""
    attributes = vars(module).copy()  # another thread may set one
    return {
        name: value
        for name, value in attributes.items()
        if name not in INTERNAL and isinstance(value, Tensor)
    }


def versions(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """Return tensors with how often each was written to; inference tensors do not count that."""
    return [(t, t._version) for t in tensors if not t.is_inference()]


def written_since(known: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Return the tensors that were written to since `versions` listed them."""
    return [tensor for tensor, version in known if tensor._version != version]


def find_untracked_tensor(recorded: Tensor, known: Sequence[Tensor]) -> Tensor | None:
    """Return a trainable tensor that `recorded` was computed from and that is not in `known`."""
    familiar = {id(tensor) for tensor in known}
    todo, seen = [recorded.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        todo += [edge for edge, _ in edges]
        leaf = None if edges else getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in familiar:
            return cast(Tensor, leaf)
    return None
