"""`equipoise predict`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from equipoise.cli.command import BAD_INPUT, DONE, Command, add_run, count
from equipoise.cli.failure import say_error
from equipoise.core import SettingError, require_count, require_positive, require_whole
from equipoise.core.printable import printable_name

if TYPE_CHECKING:
    from torch import Tensor

    from equipoise.engine.tasks import Task

__all__ = ["PREDICT"]

MAX_SEED = 2**63 - 1  # what torch takes


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `predict` takes."""
    add_run(parser)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="what to predict for")
    parser.add_argument(
        "--top",
        type=int,
        default=1,
        metavar="N",
        help="how many classes to name, each with its probability (default: 1)",
    )
    parser.add_argument(
        "--text", action="append", default=[], help="a text to continue; may be given again"
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="how many tokens to add to a text (default: 20 words, or 100 characters or bytes)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="draw tokens, with scores divided by T (default: 0, the most probable token)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the draws (default: 0)")
    parser.add_argument("--out", type=Path, metavar="PATH", help="where to write the predictions")


def run(arguments: Namespace) -> int:
    """Predict for files."""
    from equipoise.data import DataError
    from equipoise.engine.input_scale import warn_of_scale
    from equipoise.engine.inputs import read_inputs, read_texts
    from equipoise.engine.predict import predict, write_predictions
    from equipoise.engine.tasks import ImageAnswer, LabelAnswer
    from equipoise.runs import open_run

    run = open_run(arguments.folder, trust=arguments.trust)
    task, size = _set_continuation(run.task, arguments), run.config.data.size or run.about.shape[1:]
    if not arguments.files and not arguments.text:
        what = " or a text (--text)" if task.reads_text else ""
        raise ValueError(f"predict must be given a file{what} to predict for; got none.")
    require_count("--top", arguments.top)
    if arguments.top > 1 and task.answer_type is not LabelAnswer:
        raise ValueError(
            f"--top must be 1 for the task {task.name!r}, which names no classes for a sample; "
            f"got {arguments.top}."
        )
    if task.writes_files and arguments.out is None:
        raise ValueError(f"--out must name a folder for the answers of a {task.name}; got none.")
    for text in arguments.text:
        if not text or (run.vocabulary.tokens != "bytes" and not text.strip()):
            raise SettingError(
                "--text", "be the beginning of a text", text, "Write a word: --text 'The'."
            )
    bad: list[DataError] = []

    def tell_bad(error: DataError) -> None:
        bad.append(error)
        say_error(str(error))

    files = read_inputs(
        arguments.files,
        shape=(*run.about.shape[:1], *size),
        multiple=run.model.size_multiple if task.takes_whole_images else None,
        vocabulary=run.vocabulary if task.reads_text else None,
        columns=run.about.columns,
        encoding=run.about.encoding,
        separator=run.config.data.options.get("separator", ""),
        deep=task.answer_type is ImageAnswer,
        on_bad_file=tell_bad,
    )
    files = warn_of_scale(files, run.about.value_range)
    inputs = chain(read_texts(arguments.text, run.vocabulary), files) if arguments.text else files
    if task.answer_type is ImageAnswer:
        inputs = _tell_losses(inputs, grey=run.config.data.greyscale or run.about.shape[0] == 1)
    found = predict(run.model, task, inputs, classes=run.classes, transform=run.transform)
    shown = min(arguments.top, len(run.classes))
    if shown > 1:
        found = (
            replace(each, answer=replace(each.answer, shown=shown))
            if isinstance(each.answer, LabelAnswer)
            else each
            for each in found
        )
    written = write_predictions(found, arguments.out, sys.stdout)
    if arguments.out is not None and arguments.out.exists():
        print(f"predictions: {printable_name(arguments.out)}", file=sys.stderr)
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


def _tell_losses(
    inputs: Iterator[tuple[str, Tensor]], *, grey: bool
) -> Iterator[tuple[str, Tensor]]:
    """Pass images on, and say which of them lose their colours, or half of their bits."""
    for name, image in inputs:
        coloured = image.dim() == 3 and len(image) == 3 and not bool((image == image[:1]).all())
        reason = ""
        if grey and coloured:
            reason = "loses its colours, since the model was trained on grey images"
        elif not grey and image.is_floating_point():
            reason = "is answered with 8 bits for each colour, since PNG files of more are not made"
        if reason:
            print(f"equipoise: warning: {printable_name(name)} {reason}", file=sys.stderr)
        yield name, image


def _set_continuation(task: Task, arguments: Namespace) -> Task:
    """Return the task with what the command line says of how a text is continued."""
    names = {"length": "continuation", "temperature": "temperature", "seed": "seed"}
    given = {
        field: getattr(arguments, name)
        for name, field in names.items()
        if getattr(arguments, name) is not None
    }
    asked = [f"--{name}" for name in ("text", *names) if getattr(arguments, name) not in (None, [])]
    if asked and not (task.reads_text and hasattr(task, "continuation")):
        raise ValueError(
            f"{asked[0]} must be left out for the task {task.name!r}, which continues no text."
        )
    if arguments.length is not None:
        require_count("--length", arguments.length)
    if arguments.temperature is not None:
        require_positive("--temperature", arguments.temperature, or_zero=True)
    if arguments.seed is not None:
        require_whole("--seed", arguments.seed, MAX_SEED)
    return replace(task, **given) if given else task  # type: ignore[type-var]


PREDICT = Command(
    "Predict for files with the weights that a run kept.",
    "equipoise predict runs/first cat.png dog.png",
    add_arguments,
    run,
    many="files",
)
