"""`equipoise report`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from equipoise.cli.command import DONE, Command, add_run
from equipoise.core.printable import printable_name

__all__ = ["REPORT"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `report` takes."""
    add_run(parser)
    parser.add_argument("--open", action="store_true", help="open it in a browser")


def run(arguments: Namespace) -> int:
    """Write the page about a run or a sweep."""
    from equipoise.runs import report_run
    from equipoise.runs.sweep_report import is_sweep, report_sweep

    make = report_sweep if is_sweep(arguments.folder) else report_run
    path = make(arguments.folder, trust=arguments.trust)
    print(printable_name(path))
    if arguments.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return DONE


REPORT = Command(
    "Write a page about a run or a sweep, and print where it is.",
    "equipoise report runs/first",
    add_arguments,
    run,
)
