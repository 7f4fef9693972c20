"""`equipoise predict`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from equipoise.cli.command import BAD_INPUT, DONE, Command, add_run, count
from equipoise.cli.failure import say_error

__all__ = ["PREDICT"]


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `predict` takes."""
    add_run(parser)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what to predict for")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to write the predictions")


def run(arguments: Namespace) -> int:
    """Predict for files."""
    from equipoise.data import DataError
    from equipoise.engine.inputs import read_inputs
    from equipoise.engine.predict import predict, write_predictions
    from equipoise.runs import open_run

    run = open_run(arguments.folder)
    task, size = run.task, run.config.data.size or run.about.shape[1:]
    if task.writes_files and arguments.out is None:
        raise ValueError(f"--out must name a folder for the answers of a {task.name}; got none.")
    bad: list[DataError] = []

    def tell_bad(error: DataError) -> None:
        bad.append(error)
        say_error(str(error))

    inputs = read_inputs(
        arguments.files,
        shape=(*run.about.shape[:1], *size),
        multiple=run.model.size_multiple if task.takes_whole_images else None,
        vocabulary=run.classes if task.reads_text else None,
        columns=run.about.columns,
        on_bad_file=tell_bad,
    )
    found = predict(run.model, task, inputs, classes=run.classes, transform=run.transform)
    written = write_predictions(found, arguments.out, sys.stdout)
    if arguments.out is not None and arguments.out.exists():
        print(f"predictions: {arguments.out}", file=sys.stderr)
    if written.missed:
        print(
            f"equipoise: warning: {count(written.missed, 'prediction')} did not reach the "
            "solver's tolerance",
            file=sys.stderr,
        )
    if written.nonfinite:
        verb = "is" if written.nonfinite == 1 else "are"
        print(
            f"equipoise: warning: {count(written.nonfinite, 'prediction')} {verb} not finite",
            file=sys.stderr,
        )
    if len(bad) > 1:
        say_error(f"{count(len(bad), 'file')} could not be read")
    return BAD_INPUT if bad else DONE


PREDICT = Command(
    "Predict for files with the weights that a run kept.",
    "equipoise predict runs/first cat.png dog.png",
    add_arguments,
    run,
    many="files",
)
