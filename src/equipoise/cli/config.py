"""`equipoise config`."""

from __future__ import annotations

from argparse import Namespace

from equipoise.cli.command import DONE, Command, add_config

__all__ = ["CONFIG"]


def run(arguments: Namespace) -> int:
    """Print a complete config."""
    from equipoise.runs import dump_config, load_config

    print(dump_config(load_config(arguments.source, arguments.settings)), end="")
    return DONE


CONFIG = Command(
    "Print every setting of a config, as TOML to start from.",
    "equipoise config mnist > mine.toml",
    add_config,
    run,
    many="settings",
)
