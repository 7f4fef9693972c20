"""`equipoise sweep`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Literal

from equipoise.cli.command import (
    BAD_INPUT,
    DIVERGED,
    DONE,
    Command,
    add_config,
    add_output,
    add_root,
    add_trust,
)
from equipoise.core import Interrupted

__all__ = ["SWEEP"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `sweep` takes."""
    add_config(
        parser, form="KEY=V1,V2", what="a setting with the values to try, such as train.epochs=3,10"
    )
    add_output(parser)
    add_root(parser)
    add_trust(parser)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)"
    )
    parser.add_argument("--ray", action="store_true", help="run them on a Ray cluster")


def run(arguments: Namespace) -> int:
    """Train with every combination of settings."""
    from equipoise.runs.sweep import split_values, sweep
    from equipoise.runs.sweep_table import format_table

    fixed: list[str] = []
    grid: dict[str, list[str]] = {}
    for setting in arguments.settings:
        key, _, text = setting.partition("=")
        values = split_values(text)
        if len(values) > 1:
            grid[key] = values
        else:
            fixed.append(setting)
    pool: Literal["local", "ray"] = "ray" if arguments.ray else "local"
    try:
        rows = sweep(
            arguments.source,
            fixed,
            grid,
            arguments.output,
            jobs=arguments.jobs,
            pool=pool,
            root=arguments.data_root,
            trust=arguments.trust,
        )
    except KeyboardInterrupt as error:
        raise Interrupted.after(error, "interrupted; resume with the same command") from error
    print(format_table(rows))
    report = arguments.output / "report.html"
    if report.exists():  # a warning has said why it does not
        print(f"report: {report}")
    statuses = {row["status"] for row in rows}
    return DIVERGED if "diverged" in statuses else BAD_INPUT if "failed" in statuses else DONE


SWEEP = Command(
    "Train with every combination of some settings, and compare the runs.",
    "equipoise sweep digits optimizer.learning_rate=1e-3,1e-2 train.seed=0,1,2 --output "
    "sweeps/rate --jobs 2",
    add_arguments,
    run,
    many="settings",
)
