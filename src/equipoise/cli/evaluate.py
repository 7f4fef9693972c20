"""`equipoise evaluate`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from equipoise.cli.command import DIVERGED, DONE, Command, add_run, count, print_json

__all__ = ["EVALUATE"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `evaluate` takes."""
    add_run(parser)
    parser.add_argument("--data-root", metavar="DIR", help="the folder with the data")
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="which split of the data (default: the one that the run was tested on)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Score a run."""
    from equipoise.engine import find_metric
    from equipoise.runs import evaluate_run

    found = evaluate_run(arguments.folder, split=arguments.split, root=arguments.data_root)
    if arguments.json:
        print_json(found.to_dict())
        return DONE
    for name, value in found.metrics.items():
        print(find_metric(name).describe(value))
    print(f"{found.missed:,} of {found.samples:,} samples did not reach the solver's tolerance")
    broken = found.status.get("NONFINITE", 0)
    if broken:
        print(
            f"equipoise: warning: {count(broken, 'solve')} met NaN or infinity; such samples "
            "count as wrong",
            file=sys.stderr,
        )
    if found.nonfinite > broken:  # more than those solves account for
        verb = "is" if found.nonfinite == 1 else "are"
        print(
            f"equipoise: warning: {count(found.nonfinite, 'output')} {verb} not finite; such "
            "samples count as wrong",
            file=sys.stderr,
        )
    return DIVERGED if broken and broken == sum(found.status.values()) else DONE


EVALUATE = Command(
    "Score the weights that a run kept.",
    "equipoise evaluate runs/first --split test",
    add_arguments,
    run,
)
