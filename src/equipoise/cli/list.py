"""`equipoise list`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from equipoise.cli.command import DONE, Command, print_json
from equipoise.cli.failure import say_warning
from equipoise.core import SettingError, choose
from equipoise.core.plugin import describe_package, find_plugins

if TYPE_CHECKING:
    from equipoise.core import Registry

__all__ = ["KINDS", "LIST"]

KINDS = {
    "models": "networks, for model.name",
    "data": "readers of data, for data.name",
    "tasks": "what is learnt, for task.name",
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
    if wanted in found and arguments.kind not in ("presets", "tasks"):
        return _show_options(arguments.kind, wanted, found[wanted], as_json=arguments.json)
    if wanted is not None:
        pattern = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
        found = {name: text for name, text in found.items() if fnmatchcase(name, pattern)}
    models = arguments.kind == "models"
    if arguments.json:
        print_json(
            {name: _about_model(name, text) for name, text in found.items()} if models else found
        )
        return DONE
    if not found:
        raise SettingError("list.pattern", f"match one of the {arguments.kind}", wanted)
    _print_table({name: _columns(name, text) for name, text in found.items()} if models else found)
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
    if kind == "models":
        about = _about_model(name, text)
        if about["family"]:
            print(f"Family {about['family']}, {about['parameters']:,} parameters.")
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
    from equipoise.runs.presets import list_presets

    if kind == "presets":
        return list_presets()
    from equipoise import models

    if kind == "models":
        known = models.list_models(plugins=False)
        group, summarize = models.MODEL_PLUGINS, models.model_info
    else:
        registry = _registry(kind)
        known, group = registry.names, registry.group

        def summarize(name: str) -> str:
            found = registry[name]
            return getattr(found, "summary", "") or (found.__doc__ or "").partition("\n")[0]

    rows = {name: summarize(name) for name in known}
    for name, entries in find_plugins(group).items():
        packages = " and ".join(sorted(describe_package(entry) for entry in entries))
        if name in known:
            say_warning(
                f"{name!r} of {packages} is hidden by the one of that name that comes with "
                "Equipoise; name its code instead, as package.module:name"
            )
            continue
        try:
            rows[name] = f"{summarize(name)} ({packages})".lstrip()
        except ValueError as error:  # one that is broken hides no other
            rows[name] = f"cannot be used: {error}"
    return rows


def _about_model(name: str, summary: str) -> dict[str, Any]:
    """The family, size and summary of a model; those of a plug-in are not looked for."""
    from equipoise import models

    family = "" if find_plugins(models.MODEL_PLUGINS).get(name) else models.model_family(name)
    size = models.model_size(name) if family else None
    return {"family": family, "parameters": size, "summary": summary}


def _columns(name: str, summary: str) -> str:
    about = _about_model(name, summary)
    size = "" if about["parameters"] is None else _short(about["parameters"])
    return f"{about['family']:14}{size:>7}  {summary}"


def _short(count: int) -> str:
    """A number of parameters in a few characters."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.{0 if count >= 100 * unit else 1}f} {letter}"
    return str(count)


def _registry(kind: str) -> Registry[Any]:
    from equipoise import data, engine, gradients, prox, solvers

    if kind == "data":
        return data.DATASETS
    owner = {"solvers": solvers, "gradients": gradients, "tasks": engine}.get(kind, prox)
    registry: Registry[Any] = getattr(owner, kind.upper())
    return registry


LIST = Command(
    "List what can be chosen by name.", "equipoise list models 'opteq-*'", add_arguments, run
)
