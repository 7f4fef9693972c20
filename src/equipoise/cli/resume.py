"""`equipoise resume`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from equipoise.cli.command import Command, add_quiet, add_root, add_run
from equipoise.cli.train import train_and_tell

__all__ = ["RESUME"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `resume` takes."""
    add_run(parser)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="a setting to change from now on, such as train.epochs=40; only those that leave the "
        "steps as they are that are over",
    )
    add_root(parser)
    add_quiet(parser)


def run(arguments: Namespace) -> int:
    """Resume a run."""
    from equipoise.runs import resume_run

    folder = arguments.folder
    return train_and_tell(
        folder,
        folder / "config.toml",
        lambda: resume_run(
            folder,
            arguments.settings,
            root=arguments.data_root,
            trust=arguments.trust,
            quiet=arguments.quiet,
        ),
    )


RESUME = Command(
    "Resume a run that was stopped, or go on with one that is over.",
    "equipoise resume runs/first train.epochs=40",
    add_arguments,
    run,
    many="settings",
)
