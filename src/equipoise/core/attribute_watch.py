"""Tensors that modules put on themselves while they are at work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from equipoise.core.module_copy import INTERNAL

__all__ = ["AttributeWatch"]

Path = tuple[int, str, tuple[Any, ...]]
"""Where a tensor is: the number of the module, the attribute, and the way into its containers."""


class AttributeWatch:
    """Remembers what a tree of modules has on itself, and says which tensors came later.

    Attributes may lie in lists, tuples and dictionaries; other objects are not looked into.

    Args:
        modules: The modules.

    Attributes:
        modules: The modules.
        before: Their attributes when the watch began, with containers of their own.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.before = [_attributes(module) for module in modules]

    def appeared(self) -> dict[Path, Tensor]:
        """Return the tensors without gradients that were not there, by where they are."""
        found: dict[Path, Tensor] = {}
        for number, (module, before) in enumerate(zip(self.modules, self.before, strict=True)):
            for name, value in vars(module).copy().items():
                if name in INTERNAL and name != "_buffers":
                    continue
                old = before.get(name)
                if value is old or not isinstance(value, Tensor | dict | list | tuple):
                    continue
                known = {id(tensor) for _, tensor in _tensors(old)}
                for way, tensor in _tensors(value):
                    if id(tensor) not in known and not tensor.requires_grad:
                        found[number, name, way] = tensor
        return found

    def at(self, path: Path, modules: Sequence[nn.Module]) -> Any:
        """Return what copies of the modules have where a tensor appeared, or None."""
        number, name, way = path
        value = vars(modules[number]).get(name)
        for key in way:
            try:
                value = value[key]  # type: ignore[index]
            except (LookupError, TypeError):
                return None
        return value

    def name(self, path: Path) -> str:
        """Return what to call a tensor that appeared."""
        _, name, way = path
        return str(way[0]) if name == "_buffers" else name

    def undo(self) -> None:
        """Give the modules back what they had."""
        for module, before in zip(self.modules, self.before, strict=True):
            own = vars(module)
            for name in own.keys() - INTERNAL - before.keys():
                del own[name]
            own.update(before)


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = vars(module).copy()  # another thread may set one
    found = {name: _kept(value) for name, value in own.items() if name not in INTERNAL}
    found["_buffers"] = own["_buffers"].copy()
    return found


def _kept(value: Any) -> Any:
    """A value in containers of its own; what is in them is shared."""
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) is list:
        return [_kept(item) for item in value]
    return value


def _tensors(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in a value, with the keys that lead to them."""
    if isinstance(value, Tensor):
        yield way, value
    elif isinstance(value, dict):
        for key, item in list(value.items()):
            yield from _tensors(item, (*way, key))
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from _tensors(item, (*way, key))
