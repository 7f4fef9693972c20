"""`equipoise list`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from equipoise.cli.command import DONE, Command, print_json
from equipoise.core import SettingError, choose

if TYPE_CHECKING:
    from equipoise.core import Registry

__all__ = ["KINDS", "LIST"]

KINDS = {
    "models": "networks, for model.name",
    "data": "readers of data, for data.name",
    "solvers": "for model.options.solver",
    "gradients": "for model.options.gradient",
    "activations": "for model.options.activation",
    "regularizers": "for model.options.regularizer",
    "presets": "configs to train from",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `list` takes."""
    parser.add_argument("kind", nargs="?", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="part of the name, or a pattern such as 'opteq-*'; a whole name shows its options",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """List what can be chosen by name."""
    if arguments.kind is None:
        _print_table(KINDS)
        return DONE
    found = describe(choose("list.kind", arguments.kind, KINDS))
    wanted = arguments.pattern
    if wanted in found and arguments.kind != "presets":
        return _show_options(arguments.kind, wanted, found[wanted], as_json=arguments.json)
    if wanted is not None:
        pattern = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
        found = {name: text for name, text in found.items() if fnmatchcase(name, pattern)}
    if arguments.json:
        print_json(found)
        return DONE
    if not found:
        raise SettingError("list.pattern", f"match one of the {arguments.kind}", wanted)
    _print_table(found)
    return DONE


def _print_table(rows: Mapping[str, str], indent: str = "") -> None:
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{indent}{name:{width}}  {text}".rstrip())


def _show_options(kind: str, name: str, text: str, *, as_json: bool) -> int:
    """Show one thing with its options, and how a config sets them."""
    from equipoise import data, models
    from equipoise.core.option import field_options
    from equipoise.runs.config import describe

    if kind == "models":
        section, options = "model.options", models.describe_options(name)
    elif kind == "data":
        section, options = "data.options", field_options(data.DATASETS[name])
    else:
        section, options = f"model.options.{kind.removesuffix('s')}", _registry(kind).options(name)
    rows = {each: describe(f"{section}.{each}", about) for each, about in options.items()}
    if as_json:
        print_json({"name": name, "summary": text, "options": rows})
        return DONE
    print(f"{name}: {text}")
    if rows:
        first = next(iter(rows))
        table = kind not in ("models", "data")
        print(f'\n{section} = {{ name = "{name}", {first} = ... }}:' if table else f"\n{section}:")
        _print_table(rows, "  ")
    else:
        print("It has no options.")
    return DONE


def describe(kind: str) -> dict[str, str]:
    """Return the names of one kind, each with one line about it."""
    from equipoise import data, models, runs

    if kind == "presets":
        return runs.list_presets()
    if kind == "models":
        return {name: models.model_info(name) for name in models.list_models()}
    if kind == "data":
        return data.list_data()
    registry = _registry(kind)
    return {name: (registry[name].__doc__ or "").partition("\n")[0] for name in registry.names}


def _registry(kind: str) -> Registry[Any]:
    from equipoise import gradients, prox, solvers

    owner = {"solvers": solvers, "gradients": gradients}.get(kind, prox)
    registry: Registry[Any] = getattr(owner, kind.upper())
    return registry


LIST = Command(
    "List what can be chosen by name.", "equipoise list models 'opteq-*'", add_arguments, run
)
