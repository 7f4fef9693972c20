"""What a command is, and what several commands share."""

# Nothing that imports torch is imported before a command runs: `equipoise --help` must not take a
# second.
from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.json_values import to_json_values

__all__ = [
    "BAD_INPUT",
    "DIVERGED",
    "DONE",
    "FAILED",
    "Command",
    "add_config",
    "add_download",
    "add_output",
    "add_quiet",
    "add_root",
    "add_run",
    "add_trust",
    "count",
    "print_json",
]

DONE, BAD_INPUT, DIVERGED, FAILED = 0, 2, 3, 4  # exit codes


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        sentence: What it does, as `--help` says it.
        example: A command line that shows it.
        add_arguments: Adds its arguments to its parser.
        run: Does it and returns the exit code.
        many: The argument that takes any number of words, on both sides of an option; empty if
            there is none.
    """

    sentence: str
    example: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    many: str = ""


def add_config(
    parser: ArgumentParser,
    form: str = "KEY=VALUE",
    what: str = "a setting to change, such as train.epochs=3",
) -> None:
    """Add the config that a command starts from, and the settings that change it.

    Args:
        parser: The parser of the command.
        form: What a setting looks like.
        what: What the settings are for.
    """
    parser.add_argument(
        "source",
        metavar="CONFIG",
        help="a preset (see: equipoise list presets), a TOML file or the folder of a run; a file "
        "may name Python code to run, so use only those you trust",
    )
    parser.add_argument("settings", nargs="*", metavar=form, help=what)


def add_run(parser: ArgumentParser) -> None:
    """Add the folder of a run, and whether the code that it names is trusted."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of the run")
    add_trust(parser)


def add_trust(parser: ArgumentParser) -> None:
    """Add the option that lets a run's folder name code to run."""
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run the Python code that the folder of a run names, as it is now, though you have "
        "not trained with it on this machine",
    )


def add_root(parser: ArgumentParser) -> None:
    """Add the folder with the data."""
    parser.add_argument("--data-root", metavar="DIR", help="the folder with the data")


def add_download(parser: ArgumentParser) -> None:
    """Add the permission to download data."""
    parser.add_argument("--download", action="store_true", help="download data that are missing")


def add_output(parser: ArgumentParser, default: str = "") -> None:
    """Add the folder to write to.

    Args:
        parser: The parser of the command.
        default: The folder if none is given, as `--help` says it; empty if one must be given.
    """
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        required=not default,
        help=f"where to write{f' (default: {default})' if default else ''}",
    )


def add_quiet(parser: ArgumentParser) -> None:
    """Add the option that hides the progress display."""
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def count(number: int, thing: str) -> str:
    """Return "1 step" or "2,000 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def print_json(values: Mapping[str, Any]) -> None:
    """Print values as JSON; numbers that are not finite become null."""
    print(json.dumps(to_json_values(values), indent=1, allow_nan=False))
