"""`equipoise config`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from equipoise.cli.command import DONE, Command, add_config, add_trust

__all__ = ["CONFIG"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `config` takes."""
    add_config(parser)
    add_trust(parser)
    parser.add_argument(
        "--comments",
        action="store_true",
        help="say of each setting what it means, its type and its default",
    )


def run(arguments: Namespace) -> int:
    """Print a complete config."""
    from equipoise.runs import dump_config, load_config

    config = load_config(arguments.source, arguments.settings, trust=arguments.trust)
    print(dump_config(config, comments=arguments.comments), end="")
    return DONE


CONFIG = Command(
    "Print every setting of a config, as TOML to start from.",
    "equipoise config mnist --comments > mine.toml",
    add_arguments,
    run,
    many="settings",
)
