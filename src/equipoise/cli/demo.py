"""`equipoise demo`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from equipoise.cli.command import Command, add_output
from equipoise.cli.train import train_and_tell

__all__ = ["DEMO"]

FOLDER = "equipoise-demo"


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `demo` takes."""
    add_output(parser, FOLDER)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the random seed (default: 0)"
    )


def run(arguments: Namespace) -> int:
    """Train on the bundled digits."""
    from equipoise.runs import load_config, train_run

    config = load_config("digits", [f"train.seed={arguments.seed}"])
    folder, number = arguments.output or Path(FOLDER), 1
    while arguments.output is None and folder.exists():
        number += 1
        folder = Path(f"{FOLDER}-{number}")
    return train_and_tell(folder, "digits", lambda: train_run(config, folder))


DEMO = Command(
    "Train a small network on bundled digits and write a page about it, in half a minute.",
    "equipoise demo",
    add_arguments,
    run,
)
