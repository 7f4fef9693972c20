"""Models by name: those that are registered, plug-ins, and functions in code of your own.

`create_model("opteq-digits")` makes a registered model, or one that an installed package adds by an
entry point of the group `equipoise.models`. `create_model("package.module:function")` and
`create_model("file.py:function")` run a module or a file and call the function in it: so a model
outside of this package can be used wherever a name can be written, in a config too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from equipoise.core.named_code import is_code_name, load_code, to_short_name
from equipoise.core.option import Option, keyword_options
from equipoise.core.plugin import find_plugins, load_plugin, plugin_code
from equipoise.core.registry import choose
from equipoise.core.validate import SettingError
from equipoise.models.model import Model

__all__ = [
    "MODEL_PLUGINS",
    "create_model",
    "describe_options",
    "find_model_code",
    "list_models",
    "model_family",
    "model_info",
    "model_options",
    "model_size",
    "register_model",
    "require_model",
]

Builder = TypeVar("Builder", bound=Callable[..., Model])

MODEL_PLUGINS = "equipoise.models"
"""The group of entry points by which installed packages add models."""

_BUILDERS: dict[str, Callable[..., Model]] = {}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Return a decorator that registers a function that returns a `Model` under `name`.

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
        _require_options("register_model.builder", name, builder)
        _BUILDERS[name] = builder
        return builder

    return add


def create_model(name: str, **options: Any) -> Model:
    """Return a new model.

    Args:
        name: One of `list_models()`, or `package.module:function` or `file.py:function` for a
            function that returns a `Model` and takes its options as keyword arguments with
            defaults.
        **options: Its options; `model_options(name)` names them.
    """
    builder = _find_builder("model", name)
    known = keyword_options(builder)
    for option in options:
        choose(f"Option of {name}", option, known)
    try:
        model: object = builder(**options)
    except Exception as error:
        if isinstance(error, ValueError) or name in _registered():
            raise
        # A sentence that says whose function failed: the reader wrote it, and we did not.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(f"model {name!r} could not be made; its function raised {reason}.") from (
            error
        )
    if not isinstance(model, Model):
        raise SettingError(
            f"model {name!r}",
            "return a Model",
            model,
            "Derive its class from equipoise.Model.",
            got=type(model).__name__,
        )
    model.name = to_short_name(name)
    return model


def list_models(pattern: str = "*", *, plugins: bool = True) -> list[str]:
    """Return the names of the models that are registered or that packages add, sorted.

    Args:
        pattern: Shell-style pattern that names must match, such as `opteq-*`.
        plugins: Whether to count in those that packages add.
    """
    names = {*_registered(), *(find_plugins(MODEL_PLUGINS) if plugins else ())}
    return sorted(name for name in names if fnmatchcase(name, pattern))


def model_info(name: str) -> str:
    """Return one line that describes a model.

    Args:
        name: Its name, as `create_model` takes it.
    """
    return (inspect.getdoc(_find_builder("model", name)) or "").partition("\n")[0]


def model_family(name: str) -> str:
    """Return the family that a registered model belongs to: the folder in which it is written.

    Args:
        name: Its name; of a model in code of your own the result is empty.
    """
    module = "" if is_code_name(name) else _find_builder("model", name).__module__
    prefix = "equipoise.families."
    return module.removeprefix(prefix).partition(".")[0] if module.startswith(prefix) else ""


def model_size(name: str) -> int:
    """Return how many parameters a model has with its default options, without making them.

    Args:
        name: Its name, as `create_model` takes it.
    """
    with torch.device("meta"), _NoDraws():
        return sum(parameter.numel() for parameter in create_model(name).parameters())


class _NoDraws(TorchFunctionMode):
    """Leaves out the draws of first weights, which tensors without memory do not need.

    There torch would import its compiler for them, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def model_options(name: str) -> list[str]:
    """Return the names of a model's options, sorted.

    Args:
        name: Its name, as `create_model` takes it.
    """
    return list(describe_options(name))


def describe_options(name: str) -> dict[str, Option]:
    """Return what is known about a model's options, by name.

    Args:
        name: Its name, as `create_model` takes it.
    """
    return keyword_options(_find_builder("model", name))


def require_model(key: str, name: str) -> None:
    """Raise unless there is a model of that name.

    Args:
        key: The setting that holds the name, for the message.
        name: The name, as `create_model` takes it.
    """
    _find_builder(key, name)


def find_model_code(name: str) -> str:
    """Return the code behind a model's name, as `package.module:name`; empty if it is registered.

    Args:
        name: The name, as `create_model` takes it.
    """
    if name in _registered():
        return ""
    return name if is_code_name(name) else plugin_code(MODEL_PLUGINS, name)


def _find_builder(key: str, name: str) -> Callable[..., Model]:
    builders = _registered()
    if name in builders:
        return builders[name]
    if is_code_name(name):
        return _adopt(key, name, load_code(key, name))
    plugins = find_plugins(MODEL_PLUGINS)
    choose(key, name, {*builders, *plugins})
    return _adopt(key, name, load_plugin(key, name, plugins[name]))


def _registered() -> dict[str, Callable[..., Model]]:
    """All registered builders; families register theirs when they are imported."""
    import_module("equipoise.families")
    return _BUILDERS


def _adopt(key: str, name: str, builder: object) -> Callable[..., Model]:
    """Return a function from outside, once it is seen to be one that takes only options."""
    if not callable(builder):
        kind = type(builder).__name__
        raise SettingError(key, "name a function", name, got=f"{name!r}, which is a {kind}")
    _require_options(key, name, builder)
    return builder  # that it returns a Model is seen when it is called


def _require_options(key: str, name: str, builder: Callable[..., Model]) -> None:
    """Raise unless everything that a builder takes is an option with a default."""
    for option in inspect.signature(builder).parameters.values():
        if option.kind is not option.VAR_KEYWORD and (
            option.kind is not option.KEYWORD_ONLY or option.default is option.empty
        ):
            raise SettingError(
                key,
                "have only keyword arguments with defaults",
                option.name,
                "Write them after a '*'.",
                got=f"{option.name!r} of {name!r}",
            )
