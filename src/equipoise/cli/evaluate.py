"""`equipoise evaluate`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from equipoise.cli.command import DIVERGED, DONE, Command, add_root, add_run, count, print_json
from equipoise.core import to_percent
from equipoise.core.printable import printable_name

if TYPE_CHECKING:
    from equipoise.engine import Evaluation

__all__ = ["EVALUATE"]

MAX_LISTED = 20  # classes whose scores are shown unasked


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `evaluate` takes."""
    add_run(parser)
    add_root(parser)
    parser.add_argument(
        "--split",
        choices=("train", "val", "test"),
        help="which split of the data (default: the one that the run was tested on)",
    )
    parser.add_argument(
        "--classes",
        action="store_true",
        help=f"show scores of each class even if there are more than {MAX_LISTED}",
    )
    parser.add_argument(
        "--flip",
        action="store_true",
        help="score the mean of the outputs for each image and its mirror image",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: Namespace) -> int:
    """Score a run."""
    from equipoise.engine import find_metric, make_progress
    from equipoise.runs import evaluate_run, open_run

    run = open_run(arguments.folder, trust=arguments.trust)
    with make_progress() as progress:
        found = evaluate_run(
            run,
            split=arguments.split,
            root=arguments.data_root,
            flip=arguments.flip,
            on_batch=progress.evaluate,
        )
    classes = describe_classes(found, run.classes)
    if arguments.json:
        flipped = {"flip": True} if arguments.flip else {}
        print_json(found.to_dict() | flipped | ({"classes": classes} if classes else {}))
        return DONE
    if arguments.flip:
        print("mean of the outputs for each image and its mirror image:")
    for name, value in found.metrics.items():
        print(find_metric(name).describe(value))
    print(f"{found.missed:,} of {found.samples:,} samples did not reach the solver's tolerance")
    if classes and (arguments.classes or len(classes) <= MAX_LISTED):
        _print_classes(classes)
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


def describe_classes(found: Evaluation, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the scores of each class by its name; empty if there are none.

    Args:
        found: The scores.
        names: Names of the classes.
    """
    return {name: asdict(score) for name, score in zip(names, found.per_class or (), strict=False)}


def _print_classes(classes: Mapping[str, Mapping[str, float]]) -> None:
    classes = {printable_name(name): score for name, score in classes.items()}
    width = max(len(name) for name in (*classes, "class"))
    print(f"{'class':{width}}  precision   recall       F1  samples")
    for name, score in classes.items():
        cells = (to_percent(score[key]) for key in ("precision", "recall", "f1"))
        precision, recall, f1 = ("-" if "nan" in cell else f"{cell} %" for cell in cells)
        print(f"{name:{width}}  {precision:>9}  {recall:>7}  {f1:>7}  {score['count']:>7,}")


EVALUATE = Command(
    "Score the weights that a run kept.",
    "equipoise evaluate runs/first --split test",
    add_arguments,
    run,
)
