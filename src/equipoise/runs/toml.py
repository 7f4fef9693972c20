"""Typed settings in TOML: tables become dataclasses, overrides are applied, values written."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from equipoise.core import SettingError, SourceError, choose, require_finite

__all__ = [
    "MAX_CONFIG_BYTES",
    "decode_toml",
    "dotted",
    "merge_tables",
    "override",
    "parse_value",
    "read_value",
    "write_value",
]

MAX_CONFIG_BYTES = 2**20  # a complete config has two thousand
NESTED = "must not nest lists and tables so deeply."


def decode_toml(content: bytes, where: str) -> dict[str, Any]:
    """Return the table in a TOML file.

    Args:
        content: The bytes of the file, or more than `MAX_CONFIG_BYTES` of them.
        where: Where they come from, for messages.
    """
    if len(content) > MAX_CONFIG_BYTES:
        raise SourceError(where, f"must be a config of at most {MAX_CONFIG_BYTES} bytes; got more.")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(where, f"must be text in UTF-8; byte {error.start} is not.") from None
    except RecursionError:
        raise SourceError(where, NESTED) from None
    except ValueError as error:
        raise SourceError(where, f"must be TOML: {error}.") from None


def merge_tables(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with the values of another one in place of its own, table within table.

    Args:
        base: The table; it is not changed.
        over: The values to put in.
    """
    both = dict(base)
    for key, value in over.items():
        before = both.get(key)
        both[key] = (
            merge_tables(before, value)
            if isinstance(before, dict) and isinstance(value, Mapping)
            else value
        )
    return both


def parse_value(text: str) -> Any:
    """Return a value as TOML reads it, or the text itself if it is not TOML.

    Args:
        text: What stands after the `=` of an override.
    """
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    plain = len(table) == 1 and isinstance(table["value"], str | int | float | bool | list | dict)
    return table["value"] if plain else text


def override(kind: Any, table: dict[str, Any], text: str) -> str:
    """Write one setting into a table and return its key.

    Raises `ValueError` if there is no such setting, or it is of another type.

    Args:
        kind: The dataclass that the table is for.
        table: The table; changed in place.
        text: The setting, such as `train.epochs=3`; the value is TOML, or else taken as text.
    """
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError("an override must have the form key=value, such as train.epochs=3.")
    value = parse_value(written)
    path: list[str] = []
    for name in key.split("."):
        if is_dataclass(kind):
            kind = get_type_hints(kind)[_known(".".join(path), name, kind)]
        elif kind is Any or get_origin(kind) is dict:
            kind = Any
        else:
            raise SettingError(
                key, f"name a setting; {'.'.join(path)} has no settings inside it", name
            )
        path.append(name)
    if kind is str and not isinstance(value, str):
        value = written  # a folder may be called 2024
    read_value(kind, value, key)
    for depth, name in enumerate(path[:-1], start=1):
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise SettingError(
                key, f"be inside a table, which {'.'.join(path[:depth])} must be", inner
            )
        table = inner
    table[path[-1]] = value
    return key


def read_value(kind: Any, value: Any, key: str) -> Any:
    """Return what TOML gave as a value of a type, or raise if it is of another one.

    Whole numbers pass for floats; nothing else is converted.

    Args:
        kind: A dataclass, bool, int, float, str, a `Literal` of strings, a tuple of numbers or
            texts, `dict[str, Any]`, or `dict[str, float]`, whose names may have dots.
        value: What TOML gave; lists become tuples.
        key: Its dotted name, for messages.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise SettingError(key, "be a table of settings", value)
        kinds = get_type_hints(kind)
        given = {
            name: read_value(kinds[_known(key, name, kind)], each, dotted(key, name))
            for name, each in value.items()
        }
        for each in fields(kind):
            if (
                each.name not in given
                and each.default is MISSING
                and each.default_factory is MISSING
            ):
                raise SettingError(dotted(key, each.name), "be given", None, got="nothing")
        made: Any = kind
        return made(**given)
    if origin is Literal:
        return choose(key, value, inner)
    if origin is tuple:
        if not isinstance(value, list | tuple) or (
            inner[-1] is not Ellipsis and len(value) != len(inner)
        ):
            count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
            things = {str: "names", int | str: "numbers or names"}.get(inner[0], "numbers")
            raise SettingError(key, f"be a list of {count}{things}", value)
        return tuple(read_value(inner[0], each, key) for each in value)
    if kind is Any:
        if isinstance(value, Mapping):
            return read_value(dict, value, key)
        if isinstance(value, list | tuple):
            return tuple(read_value(Any, each, key) for each in value)
        if not isinstance(value, str | int | float):
            raise SettingError(
                key,
                "be text, a number, true or false, or a list or table of them",
                value,
                got=str(value),
            )
        kind = type(value)
    if dict in (kind, origin):
        if not isinstance(value, Mapping):
            raise SettingError(key, "be a table", value)
        each_kind = inner[1] if inner else Any
        # TOML makes tables of names with dots where they are not in quotes.
        pairs = value.items() if each_kind is Any else _flatten(value).items()
        return {name: read_value(each_kind, each, dotted(key, name)) for name, each in pairs}
    return _read_scalar(kind, value, key)


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table with those inside it taken apart, their names joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": each for inner, each in _flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _read_scalar(kind: Any, value: Any, key: str) -> Any:
    if isinstance(kind, UnionType):
        kind = type(value) if type(value) in get_args(kind) else get_args(kind)[0]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        require_finite(key, value)
        return float(value)
    if type(value) is not kind:
        rule = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
        raise SettingError(key, f"be {rule}", value)
    if kind is str and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise SettingError(key, "be text that UTF-8 can hold", value)
    return value


def write_value(value: Any, key: str) -> str:
    """Return a value as TOML.

    Args:
        value: Text, a finite number, a boolean, or a list, tuple or mapping of them.
        key: Its dotted name, for messages.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(write_value(each, key) for each in value)}]"
    if isinstance(value, Mapping):
        items = (
            f"{_bare(name)} = {write_value(each, dotted(key, name))}"
            for name, each in value.items()
        )
        return f"{{ {', '.join(items)} }}" if value else "{}"
    raise SettingError(
        key, "be text, a finite number, true or false, or a list or table of them", value
    )


def dotted(section: str, name: str) -> str:
    """Return the name of a setting with that of its section, on one line whatever it holds.

    Args:
        section: The dotted name of the section; empty at the top.
        name: The setting.
    """
    return f"{section}.{_bare(name)}" if section else _bare(name)


def _known(section: str, name: str, kind: Any) -> str:
    """Return a name if the settings of a kind have it."""
    what = f"a setting of {section}" if section else "a section"
    names = [each.name for each in fields(kind)]
    return choose(dotted(section, name), name, names, f"be {what}, one of")


def _bare(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else write_value(name, "key")
