"""Private copies of modules: other attributes, the same tensors unless told otherwise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copy_modules"]

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, NoneType, type, torch.Size, torch.dtype, torch.device}
)
SLOTS = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in sorted(INTERNAL) if name.endswith("hooks"))
"""Dictionaries of hooks; empty ones are shared with the original, which saves most of the time."""


def copy_modules(modules: Sequence[nn.Module], replaced: dict[int, Any]) -> list[nn.Module]:
    """Copy modules that refer to each other, as far as their attributes reach.

    A copy has attributes of its own, and containers of its own where these are lists, tuples,
    dictionaries or sets. Wherever an attribute, a method bound to a module or a function's closure
    refers to one of the modules, the copy refers to its copy. Tensors and all other objects are
    shared with the original. Nothing is written to the originals.

    Args:
        modules: The modules.
        replaced: What to put in place of some objects, by `id`; most often tensors.
    """
    # Nothing of the original's runs: neither __init__ nor __setattr__ nor __getattr__.
    twins = [
        module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        for module in modules
    ]
    known = {id(module): twin for module, twin in zip(modules, twins, strict=True)}
    known.update(replaced)
    copier = _Copier(known)
    for module, twin in zip(modules, twins, strict=True):
        if twin is not module:
            attributes = vars(module).copy()
            for name in SLOTS:
                slots = attributes[name]
                attributes[name] = {key: known.get(id(item), item) for key, item in slots.items()}
            for name in HOOKS:
                if attributes[name]:
                    attributes[name] = copier.copy(attributes[name])
            for name in attributes.keys() - INTERNAL:
                value = attributes[name]
                if type(value) not in PLAIN:
                    attributes[name] = copier.copy(value)
            object.__setattr__(twin, "__dict__", attributes)
    return twins


class _Copier:
    """Copies attributes; `known` says what stands for an object, by `id`."""

    def __init__(self, known: dict[int, Any]) -> None:
        self.known = known

    def copy(self, value: Any) -> Any:
        """Return the copy of an attribute."""
        if type(value) in PLAIN:
            return value
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, Tensor):
            return value
        if isinstance(value, dict | list | set):
            made = self.known[id(value)] = copy.copy(value)
            if isinstance(made, dict):
                for key, item in list(made.items()):
                    made[key] = self.copy(item)
            elif isinstance(made, list):
                made[:] = [self.copy(item) for item in made]
            elif any(id(item) in self.known for item in made):
                items = [self.copy(item) for item in made]
                made.clear()
                made.update(items)
            return made
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return self.refer(value)

    def refer(self, value: Any) -> Any:
        """Return a callable that refers to the copies wherever `value` refers to the originals."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, MethodType):
            owner = self.refer(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if isinstance(value, partial):
            args = tuple(self.refer(arg) for arg in value.args)
            keywords = {name: self.refer(arg) for name, arg in value.keywords.items()}
            return partial(self.refer(value.func), *args, **keywords)
        if isinstance(value, FunctionType) and value.__closure__ is not None:
            return self._function(value)
        return value

    def _function(self, value: FunctionType) -> FunctionType:
        self.known[id(value)] = value  # so that a function that refers to itself comes to an end
        closure = []
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                closure.append(cell)
                continue
            other = self.refer(content)
            closure.append(cell if other is content else CellType(other))
        if all(new is old for new, old in zip(closure, value.__closure__ or (), strict=True)):
            return value
        made = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(closure)
        )
        made.__kwdefaults__ = value.__kwdefaults__
        vars(made).update({name: self.refer(item) for name, item in vars(value).items()})
        self.known[id(value)] = made
        return made
