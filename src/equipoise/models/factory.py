"""Models by name: one registry drives the API, the listing and the contract tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar, get_args, get_type_hints, is_typeddict

from equipoise.core.registry import choose
from equipoise.models.network import Network

__all__ = ["create_model", "list_models", "model_info", "model_options", "register_model"]

Builder = TypeVar("Builder", bound=Callable[..., Network])

_BUILDERS: dict[str, Callable[..., Network]] = {}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that files a function returning a `Network` under `name`.

    The function's keyword arguments are the model's options, each with a default;
    `**rest: Unpack[SomeTypedDict]` stands for the keys of the typed dictionary. The first line of
    its docstring is what `model_info` says.

    Args:
        name: The name, as `create_model` takes it.
    """

    def add(builder: Builder) -> Builder:
        if name in _BUILDERS:
            raise ValueError(
                f"register_model.name must be new; got {name!r}, which is registered already."
            )
        for option in inspect.signature(builder).parameters.values():
            if option.kind is not option.VAR_KEYWORD and (
                option.kind is not option.KEYWORD_ONLY or option.default is option.empty
            ):
                raise ValueError(
                    "register_model.builder must have only keyword arguments with defaults; "
                    f"got {option.name!r} of {name!r}. "
                    "Write them after a '*'."
                )
        _BUILDERS[name] = builder
        return builder

    return add


def create_model(name: str, **options: Any) -> Network:
    """Return a new model.

    Args:
        name: Its name, one of `list_models()`.
        **options: Its options; `model_options(name)` names them.
    """
    builder = _builder(name)
    known = model_options(name)
    for option in options:
        choose(f"Option of {name}", option, known)
    network = builder(**options)
    network.name = name
    return network


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the models, sorted.

    Args:
        pattern: Shell-style pattern that names must match, such as `opteq-*`.
    """
    return sorted(name for name in _builders() if fnmatchcase(name, pattern))


def model_info(name: str) -> str:
    """Return one line that describes a model.

    Args:
        name: Its name.
    """
    return (inspect.getdoc(_builder(name)) or "").partition("\n")[0]


def model_options(name: str) -> list[str]:
    """Return the names of a model's options, sorted.

    Args:
        name: Its name.
    """
    builder = _builder(name)
    names: list[str] = []
    for option in inspect.signature(builder).parameters.values():
        if option.kind is option.VAR_KEYWORD:
            rest = get_args(get_type_hints(builder)[option.name])
            names += [
                key
                for keys in rest
                if is_typeddict(keys)
                for key in keys.__required_keys__ | keys.__optional_keys__
            ]
        else:
            names.append(option.name)
    return sorted(names)


def _builder(name: str) -> Callable[..., Network]:
    builders = _builders()
    return builders[choose("model", name, builders)]


def _builders() -> dict[str, Callable[..., Network]]:
    """All builders; families register theirs when they are imported, which nobody else has to know."""
    import_module("equipoise.families")
    return _BUILDERS
