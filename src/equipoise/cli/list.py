"""`equipoise list`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from equipoise.cli.command import DONE, Command, print_json
from equipoise.core import SettingError, choose

if TYPE_CHECKING:
    from equipoise.core import Registry

__all__ = ["KINDS", "LIST"]

KINDS = ("models", "data", "solvers", "gradients", "activations", "regularizers", "presets")


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `list` takes."""
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "pattern",
        nargs="?",
        metavar="PATTERN",
        help="part of the name, or a pattern such as 'opteq-*'",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """List what can be chosen by name."""
    found = describe(choose("list.kind", arguments.kind, KINDS))
    wanted = arguments.pattern
    if wanted is not None:
        pattern = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
        found = {name: text for name, text in found.items() if fnmatchcase(name, pattern)}
    if arguments.json:
        print_json(found)
        return DONE
    if not found:
        raise SettingError("list.pattern", f"match one of the {arguments.kind}", wanted)
    width = max(map(len, found))
    for name, text in found.items():
        print(f"{name:{width}}  {text}")
    return DONE


def describe(kind: str) -> dict[str, str]:
    """Return the names of one kind, each with one line about it."""
    from equipoise import data, gradients, models, prox, runs, solvers

    if kind == "presets":
        return runs.list_presets()
    if kind == "models":
        return {name: models.model_info(name) for name in models.list_models()}
    if kind == "data":
        return data.list_data()
    registry: Registry[Any] = getattr(
        {"solvers": solvers, "gradients": gradients}.get(kind, prox), kind.upper()
    )
    return {name: (registry[name].__doc__ or "").partition("\n")[0] for name in registry}


LIST = Command(
    "List what can be chosen by name.", "equipoise list models 'opteq-*'", add_arguments, run
)
