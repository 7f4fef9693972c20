"""Private copies of modules: other attributes, the same tensors unless told otherwise."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["INTERNAL", "copy_modules", "is_compiled"]

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, NoneType, type, torch.Size, torch.dtype, torch.device}
)
COMPILED = ("_compiled_call_impl", "compiled_step")
"""Attributes that, where a module has them, are called in place of its forward method."""
SLOTS = ("_parameters", "_buffers", "_modules")
INTERNAL = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in sorted(INTERNAL) if name.endswith("hooks"))
"""Dictionaries of hooks; empty ones are shared with the original, which saves most of the time."""


def copy_modules(
    modules: Sequence[nn.Module],
    replaced: dict[int, Any],
    *,
    compiled: bool = True,
    before: Sequence[dict[str, Any]] | None = None,
) -> list[nn.Module]:
    """Copy modules that refer to each other, as far as their attributes reach.

    A copy has attributes of its own, and containers of its own where these are lists, tuples,
    dictionaries or sets. Wherever an attribute, a method bound to a module or a function's closure
    refers to one of the modules, the copy refers to its copy. Tensors and all other objects are
    shared with the original. Nothing is written to the originals.

    Args:
        modules: The modules.
        replaced: What to put in place of some objects, by `id`; most often tensors.
        compiled: Whether the copies are compiled where the originals are.
        before: Attributes that the modules had earlier, for copies of the modules as they were.
    """
    # Nothing of the original's runs: neither __init__ nor __setattr__ nor __getattr__.
    twins = [
        module if isinstance(module, torch.jit.ScriptModule) else object.__new__(type(module))
        for module in modules
    ]
    known = {id(module): twin for module, twin in zip(modules, twins, strict=True)}
    known.update(replaced)
    if not compiled:
        for module in modules:
            if "_orig_mod" in module._modules:  # what torch.compile makes of a module
                known[id(module)] = known[id(module._modules["_orig_mod"])]
    copier = _Copier(known, compiled)
    for number, (module, twin) in enumerate(zip(modules, twins, strict=True)):
        if twin is not module:
            attributes = vars(module).copy()
            if before is not None:
                for name in attributes.keys() - INTERNAL:
                    del attributes[name]
                attributes.update(before[number])
            for name in SLOTS:
                slots = attributes[name]
                attributes[name] = {key: known.get(id(item), item) for key, item in slots.items()}
            for name in HOOKS:
                if attributes[name]:
                    attributes[name] = copier.copy(attributes[name])
            if not compiled:
                for name in COMPILED:
                    attributes.pop(name, None)
            for name in attributes.keys() - INTERNAL:
                value = attributes[name]
                if type(value) not in PLAIN:
                    attributes[name] = copier.copy(value)
            object.__setattr__(twin, "__dict__", attributes)
    return twins


def is_compiled(modules: Sequence[nn.Module]) -> bool:
    """Return whether `torch.compile` made something of one of the modules or of its functions."""
    if "torch._dynamo" not in sys.modules:
        return False
    for module in modules:
        attributes = vars(module).copy()
        if "_orig_mod" in module._modules or not attributes.keys().isdisjoint(COMPILED):
            return True
        functions = [value for value in attributes.values() if isinstance(value, FunctionType)]
        if any(hasattr(function, "_torchdynamo_orig_callable") for function in functions):
            return True
    return False


class _Copier:
    """Copies attributes; `known` says what stands for an object, by `id`."""

    def __init__(self, known: dict[int, Any], compiled: bool) -> None:
        self.known = known
        self.compiled = compiled

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
        original = None if self.compiled else getattr(value, "_torchdynamo_orig_callable", None)
        if original is not None:
            return self.refer(original)
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
