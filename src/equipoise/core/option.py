"""What functions and dataclasses say about their options: types, defaults and a line each."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

__all__ = ["Option", "field_options", "keyword_options"]

NO_DEFAULT: Any = object()
WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        kind: Its type, in words.
        text: What it means, on one line.
        default: Its default; `NO_DEFAULT` if it has none, or it is not known.
    """

    kind: str
    text: str
    default: Any = NO_DEFAULT

    @property
    def has_default(self) -> bool:
        """Whether there is a default that is known."""
        return self.default is not NO_DEFAULT


def field_options(kind: type) -> dict[str, Option]:
    """Return the fields of a dataclass as options, in their order.

    Args:
        kind: The dataclass, whose docstring explains them under `Args`.
    """
    texts, hints = _texts(kind), get_type_hints(kind)
    found = {}
    for each in fields(kind):
        if not each.init:
            continue
        default = each.default
        if default is MISSING and each.default_factory is not MISSING:
            default = each.default_factory()
        found[each.name] = Option(
            _words(hints[each.name]),
            texts.get(each.name, ""),
            NO_DEFAULT if default is MISSING else default,
        )
    return found


def keyword_options(function: Callable[..., object]) -> dict[str, Option]:
    """Return the keyword arguments of a function as options, sorted.

    `**rest: Unpack[SomeTypedDict]` stands for the keys of the typed dictionary.

    Args:
        function: The function, whose docstring explains them under `Args`.
    """
    texts = _texts(function)
    found: dict[str, Option] = {}
    for each in inspect.signature(function).parameters.values():
        if each.kind is not each.VAR_KEYWORD:
            hint = _hints(function).get(each.name, Any)
            default = NO_DEFAULT if each.default is each.empty else each.default
            found[each.name] = Option(_words(hint), texts.get(each.name, ""), default)
            continue
        for keys in get_args(_hints(function).get(each.name)):
            if is_typeddict(keys):
                inner = _texts(keys)
                found |= {
                    name: Option(_words(hint), inner.get(name, ""))
                    for name, hint in _hints(keys).items()
                }
    return dict(sorted(found.items()))


def _hints(owner: Any) -> Mapping[str, Any]:
    try:
        return get_type_hints(owner)
    except (NameError, TypeError):  # names that only type checkers import
        return getattr(owner, "__annotations__", {})


def _texts(owner: Any) -> dict[str, str]:
    """What a docstring says under `Args` and `Attributes`, with that of its bases."""
    found: dict[str, str] = {}
    for base in _bases(owner):
        found |= _texts(base)
    name, section = "", False
    for line in inspect.cleandoc(owner.__doc__ or "").splitlines():
        entry = re.match(r"    \*{0,2}(\w+): (.*)", line)
        if re.fullmatch(r"(Args|Attributes):", line):
            section, name = True, ""
        elif line.strip() and not line.startswith(" "):
            section = False
        elif section and entry:
            name = entry[1]
            found[name] = entry[2].strip()
        elif section and name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _bases(owner: Any) -> list[Any]:
    """The bases of a class. Python 3.11 forgets those of typed dictionaries: they are looked for.

    They are in the module of the typed dictionary, and it has all their keys.
    """
    if not is_typeddict(owner):
        return list(getattr(owner, "__bases__", ()))
    keys = set(owner.__annotations__)
    return [
        each
        for each in vars(sys.modules[owner.__module__]).values()
        if is_typeddict(each) and set(each.__annotations__) < keys
    ]


def _words(hint: Any) -> str:
    """A type as users of a config call it; objects can be given only in Python."""
    return " or ".join(dict.fromkeys(_config_types(hint))) or "only in Python"


def _config_types(hint: Any) -> Iterator[str]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        yield " | ".join(map(str, inner))
    elif origin in (Union, UnionType):
        for each in inner:
            yield from _config_types(each)
    elif origin in (dict, Mapping) or hint is dict or is_typeddict(hint):
        yield "table"
    elif isinstance(origin, type) and issubclass(origin, Sequence):
        length = f"{len(inner)} " if origin is tuple and Ellipsis not in inner else ""
        things = dict.fromkeys(PLURALS.get(each, "") for each in get_args(inner[0]) or inner[:1])
        yield f"list of {length}{' or '.join(filter(None, things)) or 'values'}"
    elif hint is Any:
        yield "any"
    elif isinstance(hint, type):
        yield from [WORDS[hint]] if hint in WORDS else ["list"] if hint is tuple else []
