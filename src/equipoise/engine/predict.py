"""What a trained model says about samples, and files that tell it."""

from __future__ import annotations

import colorsys
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import require_count, write_atomically
from equipoise.data import AddNoise, Compose, DataError, Transform
from equipoise.engine.inputs import END, read_inputs
from equipoise.engine.solve_monitor import Solves
from equipoise.engine.task import (
    BinaryRegression,
    Classification,
    LanguageModelling,
    Segmentation,
    Task,
)

__all__ = ["Prediction", "predict", "read_inputs", "write_predictions"]

MAX_NAMED_CLASSES = 3  # classes named for each sample
MAX_NAME_LENGTH = 100  # characters of the name of an output
MAX_COLOURS = 256  # of a palette


@dataclass(frozen=True)
class Prediction:
    """What a model says about one sample.

    Attributes:
        name: Of the sample.
        converged: Whether all its equilibria reached their tolerance.
        label: The name of its class, if the task is to find it.
        probability: Of this class.
        top: Up to three classes with their probabilities, the most probable first.
        mask: The class of each pixel, int64 of shape (height, width), if the task is segmentation.
        picture: The picture, floats in [0, 1] of shape (channels, height, width), if the task is
            restoration.
        text: The text with its continuation, if the task is language.
    """

    name: str
    converged: bool
    label: str | None = None
    probability: float = math.nan
    top: tuple[tuple[str, float], ...] = ()
    mask: Tensor | None = None
    picture: Tensor | None = None
    text: str | None = None


def predict(
    model: nn.Module,
    task: Task,
    inputs: Iterable[tuple[str, Tensor]],
    *,
    classes: Sequence[str],
    transform: Transform | None = None,
    batch: int = 64,
    device: torch.device | str = "cpu",
    count: int = 20,
    window: int | None = None,
) -> Iterator[Prediction]:
    """Return what a model says about samples, one after the other; the model stays in the mode that it is in.

    The probability of a class is its softmax. In binary regression that of the second class is
    `(1 + f(x)) / 2`, cut to [0, 1], because the square loss is least where `f(x)` is the mean of
    `y` in {-1, 1} given `x`. Bytes that the transform leaves become floats in [0, 1].

    Args:
        model: The model; it is moved to `device`.
        task: What it was trained for.
        inputs: Names and samples, as from `read_inputs`.
        classes: Names of the classes, or the vocabulary.
        transform: What is done to each batch, as in evaluations, but for noise: pictures come as
            they are.
        batch: Samples at once; those of different shapes are not mixed.
        device: Where to compute.
        count: How many words a language model adds, each the most probable one.
        window: How many of the last words it looks at; by default all.
    """
    for name, value in (
        ("batch", batch),
        ("count", count),
        ("window", 1 if window is None else window),
    ):
        require_count(f"predict.{name}", value)
    if isinstance(transform, Compose):
        transform = Compose(
            *(step for step in transform.transforms if not isinstance(step, AddNoise))
        )
    elif isinstance(transform, AddNoise):
        transform = None
    model.to(device)
    solves, training = Solves(model), model.training
    size = 1 if isinstance(task, LanguageModelling) else batch
    for names, x in _batches(inputs, size):
        model.eval()
        try:
            # Not around the yield, whose consumer is somebody else's code.
            with torch.no_grad(), solves.listening():
                solves.clear()
                if isinstance(task, LanguageModelling):
                    found = [
                        _continue(model, solves, names[0], x.to(device), classes, count, window)
                    ]
                else:
                    found = _answer(
                        model, task, solves, names, x, classes, transform, torch.device(device)
                    )
        except ValueError as error:
            raise DataError(names[0], error) from error
        finally:
            model.train(training)
        yield from found


def write_predictions(
    predictions: Iterable[Prediction], out: Path | str | None, stream: TextIO
) -> int:
    """Write predictions, and return how many of them come from an equilibrium that missed its tolerance.

    Labels are lines `file,label,probability,converged` (CSV), text is in lines
    `file,text,converged`. Masks become PNG files with a palette, whose pixels have the number of
    the class as their value, and pictures become PNG files too, with lines `file,output,converged`
    on the stream.

    Args:
        predictions: What to write.
        out: For labels and text, the file to write in place of the stream. For masks and pictures,
            the folder of the results, which must be empty or not be there yet, so that nothing is
            overwritten.
        stream: Where lines go.
    """
    rest = iter(predictions)
    first = next(rest, None)
    if first is None:
        return 0
    target = None if out is None else Path(out)
    visual = first.mask is not None or first.picture is not None
    if visual:
        if target is None:
            raise ValueError(
                "write_predictions.out must be a folder for masks and pictures; got None."
            )
        _make_folder(target)
        columns = ["output"]
    else:
        if target is not None and target.is_dir():
            raise ValueError(
                "write_predictions.out must be a file for labels and text; got the folder "
                f"{target}."
            )
        columns = ["text"] if first.text is not None else ["label", "probability"]
    lines = io.StringIO() if target is not None and not visual else stream
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(["file", *columns, "converged"])
    missed, used = 0, set[str]()
    for prediction in chain([first], rest):
        if visual and target is not None:
            name = _file_name(prediction.name, used)
            write_atomically(target / name, _png(prediction))
            cells = [str(target / name)]
        else:
            cells = (
                [prediction.text]
                if prediction.text is not None
                else [prediction.label or "", f"{prediction.probability:.6g}"]
            )
        writer.writerow([prediction.name, *cells, str(prediction.converged).lower()])
        missed += not prediction.converged
    if isinstance(lines, io.StringIO) and target is not None and not visual:
        write_atomically(target, lines.getvalue())
    return missed


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


def _answer(
    model: nn.Module,
    task: Task,
    solves: Solves,
    names: list[str],
    x: Tensor,
    classes: Sequence[str],
    transform: Transform | None,
    device: torch.device,
) -> list[Prediction]:
    if transform is not None:
        x, _ = transform(x, torch.zeros(len(x), dtype=torch.int64))
    x = x.to(device)
    output = model(x if x.is_floating_point() else x.float() / 255).float().cpu()
    if len(output) != len(names):
        raise ValueError(f"the model returned {len(output)} outputs for {len(names)} samples")
    good = _converged(solves, len(names))
    if isinstance(task, Classification | BinaryRegression):
        return [
            Prediction(*facts)
            for facts in zip(names, good, *_labels(task, output, classes), strict=True)
        ]
    answers = task.predict(output)
    if isinstance(task, Segmentation):
        return [
            Prediction(name, fine, mask=mask)
            for name, fine, mask in zip(names, good, answers, strict=True)
        ]
    return [
        Prediction(name, fine, picture=picture)
        for name, fine, picture in zip(names, good, answers, strict=True)
    ]


def _labels(
    task: Task, output: Tensor, classes: Sequence[str]
) -> tuple[list[str], list[float], list[tuple[tuple[str, float], ...]]]:
    if isinstance(task, BinaryRegression):
        second = ((1 + output.reshape(len(output))) / 2).clamp(0, 1)
        probability = torch.stack([1 - second, second], dim=1)
    else:
        probability = output.softmax(1)
    if probability.shape[1] != len(classes):
        raise ValueError(
            f"the model tells {probability.shape[1]} classes apart; {len(classes)} have names"
        )
    best = task.predict(output)  # decides on ties
    top = (
        probability.scatter(1, best[:, None], 2).topk(min(MAX_NAMED_CLASSES, len(classes))).indices
    )
    tops = [
        tuple((classes[i], float(row[i])) for i in places.tolist())
        for places, row in zip(top, probability, strict=True)
    ]
    return [each[0][0] for each in tops], [each[0][1] for each in tops], tops


def _continue(
    model: nn.Module,
    solves: Solves,
    name: str,
    x: Tensor,
    vocabulary: Sequence[str],
    count: int,
    window: int | None,
) -> Prediction:
    fine = True
    for _ in range(count):
        solves.clear()
        output = model(x if window is None else x[:, -window:])
        if output.dim() != 3 or output.shape[2] != len(vocabulary):
            raise ValueError(
                f"the model's output has shape {tuple(output.shape)}; (1, length, "
                f"{len(vocabulary)}) expected"
            )
        x = torch.cat([x, output[:, -1].argmax(1, keepdim=True)], dim=1)
        fine = fine and _converged(solves, 1)[0]
    words = " ".join(vocabulary[i] for i in x[0].tolist())
    return Prediction(name, fine, text=re.sub(rf" ?{END} ?", "\n", words))


def _converged(solves: Solves, count: int) -> list[bool]:
    fine: list[bool] = (~solves.missed(count)).tolist()
    return fine


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"write_predictions.out must be a folder for masks and pictures; got the file {folder}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(
            "write_predictions.out must be an empty folder, so that nothing is overwritten; "
            f"got {folder}. Name a new one."
        )


def _file_name(name: str, used: set[str]) -> str:
    """Return a name for an output that is like that of its input, holds nothing that points elsewhere, and is new."""
    path = Path(name)
    inner = re.fullmatch(r"(.*)\.\w+(\[\d+\])", path.name)
    stem = inner[1] + inner[2] if inner else path.stem
    stem = re.sub(r"[^\w\-.\[\]]", "_", stem)[:MAX_NAME_LENGTH].lstrip(".") or "sample"
    number, free = 1, stem
    while free.lower() in used:  # some systems do not tell a from A
        number += 1
        free = f"{stem}-{number}"
    used.add(free.lower())
    return f"{free}.png"


def _png(prediction: Prediction) -> bytes:
    from PIL import Image

    if prediction.mask is not None:
        mask = prediction.mask.numpy()
        if mask.max(initial=0) >= MAX_COLOURS:
            raise DataError(
                prediction.name,
                f"has class {mask.max()} in its mask; a palette has {MAX_COLOURS} colours",
            )
        image = Image.fromarray(mask.astype(np.uint8))
        image.putpalette(_palette())  # turns grey values into numbers of colours
    else:
        assert prediction.picture is not None  # the caller saw to it
        pixels = (
            (prediction.picture.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).numpy()
        )
        if pixels.shape[2] not in (1, 3):
            raise DataError(
                prediction.name, f"has {pixels.shape[2]} channels; a picture has 1 or 3"
            )
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


def _palette() -> list[int]:
    """Black, then hues that differ as much as they can from those before, at several strengths."""
    golden = (math.sqrt(5) - 1) / 2
    colours = [(0.0, 0.0, 0.0)]
    colours += [
        colorsys.hsv_to_rgb(i * golden % 1, (1, 0.55)[i % 2], (1, 0.75, 0.5)[i % 3])
        for i in range(MAX_COLOURS - 1)
    ]
    return [round(255 * part) for colour in colours for part in colour]
