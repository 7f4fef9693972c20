"""What a trained model says about samples, and files that hold it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from equipoise.core import SettingError, require_count, stop_if_requested, write_atomically
from equipoise.core.module_mode import evaluation_mode
from equipoise.data import Compose, DataError, Degrade, Transform
from equipoise.engine.solve_monitor import SolveMonitor
from equipoise.engine.tasks import Answer, FileAnswer, ImageAnswer, Task, finite_samples

__all__ = ["Prediction", "Written", "predict", "write_predictions"]

MAX_NAME_LENGTH = 100  # characters of the name of an output


@dataclass(frozen=True)
class Prediction:
    """What a model says about one sample.

    Attributes:
        name: The name of the sample.
        converged: Whether all its equilibria reached their tolerance.
        answer: The answer, of the kind that the task gives.
        finite: Whether the model's output has no NaN and no infinity in it.
    """

    name: str
    converged: bool
    answer: Answer
    finite: bool = True


@dataclass(frozen=True)
class Written:
    """What is to be said of predictions that were written.

    Attributes:
        missed: How many come from an equilibrium that missed its tolerance.
        nonfinite: How many come from an output with NaN or infinity in it.
    """

    missed: int = 0
    nonfinite: int = 0


def predict(
    model: nn.Module,
    task: Task,
    inputs: Iterable[tuple[str, Tensor]],
    *,
    classes: Sequence[str],
    transform: Transform | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
) -> Iterator[Prediction]:
    """Yield what a model says about samples, one after the other; the model stays in its mode.

    Bytes that the transform leaves become floats in [0, 1]. Answers that are grey images have 16
    bits where the samples were no bytes.

    Args:
        model: The model; it is moved to `device`.
        task: What it was trained for.
        inputs: Names and samples, as from `read_inputs`.
        classes: Names of the classes, or the vocabulary.
        transform: What is done to each batch, as in evaluations, but for `Degrade`: images come as
            they are.
        batch: Samples at once; those of different shapes are not mixed.
        device: Where to compute.
    """
    require_count("predict.batch", batch)
    if isinstance(transform, Compose):
        transform = Compose(
            *(step for step in transform.transforms if not isinstance(step, Degrade))
        )
    elif isinstance(transform, Degrade):
        transform = None
    model.to(device)
    solves = SolveMonitor(model)
    for names, x in _batches(inputs, batch):
        stop_if_requested()
        try:
            # Not around the yield, whose consumer is somebody else's code.
            with (
                torch.no_grad(),
                evaluation_mode(model),
                solves.listening(),
                _finite_outputs(model) as sound,
            ):
                solves.clear()
                bits = 8 if x.dtype == torch.uint8 else 16
                if transform is not None:
                    x, _ = transform(x, torch.zeros(len(x), dtype=torch.int64))
                x = (x.float() / 255 if x.dtype == torch.uint8 else x).to(device)
                answers = [_with_bits(each, bits) for each in task.respond(model, x, classes)]
                if len(answers) != len(names):
                    raise ValueError(
                        f"the model returned {len(answers)} outputs for {len(names)} samples"
                    )
                missed = solves.missed(len(names)).tolist()
                finite = torch.ones(len(names), dtype=torch.bool)
                for each in sound:
                    finite &= each.cpu() if len(each) == len(names) else each.all().cpu()
        except ValueError as error:
            raise DataError(names[0], error) from error
        for name, failed, answer, whole in zip(
            names, missed, answers, finite.tolist(), strict=True
        ):
            yield Prediction(name, not failed, answer, whole)


def write_predictions(
    predictions: Iterable[Prediction], out: Path | str | None, stream: TextIO
) -> Written:
    """Write predictions, and return how many of them cannot be relied on.

    Answers that are rows make a table (CSV) of `file`, the columns of the answer, and `converged`.
    Answers that are files are written into a folder, and the table says where each one is.

    Args:
        predictions: What to write.
        out: For rows, the file to write in place of the stream. For files, their folder, which must
            be empty or not be there yet, so that nothing is overwritten.
        stream: Where the table goes.
    """
    rest = iter(predictions)
    first = next(rest, None)
    if first is None:
        return Written()
    target = None if out is None else Path(out)
    folder = _make_folder(target) if isinstance(first.answer, FileAnswer) else None
    if folder is None and target is not None and target.is_dir():
        raise SettingError(
            "write_predictions.out",
            "be a file for answers that make one table",
            target,
            got=f"the folder {target}",
        )
    table = target if folder is None else None
    lines = stream if table is None else io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    columns = ("output",) if isinstance(first.answer, FileAnswer) else first.answer.columns
    writer.writerow(["file", *columns, "converged"])
    missed, nonfinite, used = 0, 0, set[str]()
    for prediction in chain([first], rest):
        answer = prediction.answer
        if isinstance(answer, FileAnswer):
            assert folder is not None  # a task gives one kind of answers
            path = folder / f"{_file_stem(prediction.name, used)}{answer.suffix}"
            try:
                write_atomically(path, answer.encode())
            except ValueError as error:
                raise DataError(prediction.name, error) from error
            cells: tuple[str, ...] = (str(path),)
        else:
            cells = answer.cells()
        writer.writerow([prediction.name, *cells, str(prediction.converged).lower()])
        missed += not prediction.converged
        nonfinite += not prediction.finite
    if table is not None and isinstance(lines, io.StringIO):
        write_atomically(table, lines.getvalue())
    return Written(missed, nonfinite)


def _with_bits(answer: Answer, bits: int) -> Answer:
    """An image for what was given with more than bytes has as many bits."""
    return replace(answer, bits=bits) if isinstance(answer, ImageAnswer) else answer


@contextmanager
def _finite_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect which samples have finite outputs, at each call of a model in the context."""
    sound: list[Tensor] = []

    def look(_model: nn.Module, _x: object, output: Tensor | tuple[Tensor, Tensor]) -> None:
        sound.append(finite_samples(output[0] if isinstance(output, tuple) else output))

    hook = model.register_forward_hook(look)
    try:
        yield sound
    finally:
        hook.remove()


def _batches(inputs: Iterable[tuple[str, Tensor]], size: int) -> Iterator[tuple[list[str], Tensor]]:
    names: list[str] = []
    samples: list[Tensor] = []
    for name, sample in inputs:
        if samples and (
            len(samples) == size
            or (sample.shape, sample.dtype) != (samples[0].shape, samples[0].dtype)
        ):
            yield names, torch.stack(samples)
            names, samples = [], []
        names.append(name)
        samples.append(sample)
    if samples:
        yield names, torch.stack(samples)


def _make_folder(folder: Path | None) -> Path:
    """Make the folder for answers that are files, and see that it is empty."""
    key, rule = "write_predictions.out", "be a folder for answers that are files"
    if folder is None:
        raise SettingError(key, rule, None)
    if folder.exists() and not folder.is_dir():
        raise SettingError(key, rule, folder, got=f"the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SettingError(
            key,
            "be an empty folder, so that nothing is overwritten",
            folder,
            "Name a new one.",
            got=str(folder),
        )
    return folder


def _file_stem(name: str, used: set[str]) -> str:
    """Return a new name like that of the input, with nothing in it that points elsewhere."""
    path = Path(name)
    inner = re.fullmatch(r"(.*)\.\w+(\[\d+\])", path.name)
    stem = inner[1] + inner[2] if inner else path.stem
    stem = re.sub(r"[^\w\-.\[\]]", "_", stem)[:MAX_NAME_LENGTH].lstrip(".") or "sample"
    number, free = 1, stem
    while free.lower() in used:  # some systems do not tell a from A
        number += 1
        free = f"{stem}-{number}"
    used.add(free.lower())
    return free
