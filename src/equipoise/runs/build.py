"""What a config asks for, made: data sets, transforms, the model and its task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.core import ConvergenceError, SettingError
from equipoise.data import (
    AddNoise,
    Compose,
    Dataset,
    Greyscale,
    Normalize,
    PadCropFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transform,
    batches,
    load_data,
)
from equipoise.data.image import MAX_PIXELS
from equipoise.engine import Task, make_task
from equipoise.models import Model, create_model, model_options
from equipoise.runs.config import Config, DataConfig, ModelConfig, as_config_error

__all__ = [
    "DATA_OPTIONS",
    "Samples",
    "load_part",
    "load_samples",
    "load_test",
    "make_model",
    "make_transforms",
    "require_alike",
    "resolve",
    "try_out",
]

DATA_OPTIONS = ("num_classes", "input_shape")
"""The options of a model that come from the data: how many outputs, and the shape of a sample."""


@dataclass(frozen=True)
class Samples:
    """The data sets of a run.

    Attributes:
        train: To learn from.
        watched: To score after each epoch: held out of the training data, or else the test samples.
        test: To score in the end.
    """

    train: Dataset
    watched: Dataset
    test: Dataset


def load_samples(data: DataConfig) -> Samples:
    """Load the data sets that a run needs.

    Args:
        data: Which ones.
    """
    train, test = _load(data, "train"), load_test(data)
    require_alike(train, test)
    if not data.subset and not data.holdout:
        return Samples(train, test, test)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    if data.subset > len(train):
        rule = f"be at most {len(train)}, the number of training samples"
        raise SettingError("data.subset", rule, data.subset)
    order = order[: data.subset or len(train)]
    held = round(data.holdout * len(order))
    if data.holdout and not 0 < held < len(order):
        got = f"{data.holdout} of {len(order)} samples"
        raise SettingError("data.holdout", "leave samples on both sides", data.holdout, got=got)
    kept = train.select_rows(order[: len(order) - held])
    return Samples(kept, train.select_rows(order[len(order) - held :]) if held else test, test)


def require_alike(train: Dataset, other: Dataset) -> None:
    """Raise unless samples have the columns and the classes of those that a model learns from.

    Tables number their classes, so one that lacks the last ones still agrees.

    Args:
        train: What the model learns from, or what is known of it.
        other: What it is scored on.
    """
    if train.columns and other.columns and train.columns != other.columns:
        raise SettingError(
            f"The columns of {other.name!r} {other.split}",
            f"be those of the training data, {_shorten(train.columns)}",
            other.columns,
            got=_shorten(other.columns),
        )
    same = train.classes[: len(other.classes)] if other.task == "arrays" else train.classes
    if other.classes != same:
        raise SettingError(
            f"The classes of {other.name!r} {other.split}",
            f"be those of the training data, {_shorten(train.classes)}",
            other.classes,
            got=_shorten(other.classes),
        )


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 10 else (*names[:8], "...", names[-1]))


def load_test(data: DataConfig, split: str | None = None) -> Dataset:
    """Load the samples to score.

    Args:
        data: Of which data set.
        split: Which one; by default `test`, or `val` of data sets whose test targets are not
            published.
    """
    return _load(data, split or ("val" if data.name in ("cityscapes", "image-folder") else "test"))


def load_part(data: DataConfig, split: str | None) -> Dataset:
    """Load what a run means by a split of its data.

    Args:
        data: Of which run.
        split: `train` is what it learns from, `val` what it holds out, if it does; others as of
            `load_test`.
    """
    if split == "train" and (data.subset or data.holdout):
        return load_samples(data).train
    if split == "val" and data.holdout:
        return load_samples(data).watched
    return load_test(data, split)


def _load(data: DataConfig, split: str) -> Dataset:
    try:
        dataset = load_data(data.name, split, data.root or None, data.download, **data.options)
    except SettingError as error:
        raise as_config_error(error, DataConfig, data.options) from error
    except TypeError as error:
        rule = f"suit the data {data.name!r}"
        raise SettingError("data.options", rule, data.options, f"{error}.") from error
    except ImportError as error:
        rule = "be data that can be read with what is installed"
        raise SettingError("data.name", rule, data.name, str(error)) from error
    try:
        return dataset.select_classes(data.classes) if data.classes else dataset
    except SettingError as error:
        raise error.about("data.classes") from error


def make_transforms(
    data: DataConfig, dataset: Dataset
) -> tuple[Transform | None, Transform | None]:
    """Return what is done to each training batch, and to each batch that is scored.

    Args:
        data: What is asked for.
        dataset: What it is done to.
    """
    steps: list[Transform] = [ToFloat()] if len(dataset.shape) == 3 else []
    if not steps:
        asked = [name for name in ("greyscale", "size", "mean", "noise") if getattr(data, name)]
        asked += ["augment"] if data.augment != "none" else []
        if asked:
            rule = f"be left out, since it is for images and {data.name!r} holds none"
            raise SettingError(f"data.{asked[0]}", rule, getattr(data, asked[0]))
        return None, None
    # Bytes are cheaper to move about than floats, so images are cut before they are turned into
    # floats.
    first: list[Transform] = [Greyscale()] if data.greyscale else []
    size = (data.size[0], data.size[1]) if data.size else None
    if math.prod(data.size) > MAX_PIXELS:
        raise SettingError("data.size", f"have at most {MAX_PIXELS} pixels", data.size)
    resize: list[Transform] = [Resize(size)] if size else []
    if data.augment == "random-resized-crop" and size:
        vary: list[Transform] = [RandomResizedCrop(size, flip=data.flip)]
    else:
        side = min(data.size or dataset.shape[1:])
        if data.augment == "pad-crop-flip" and data.padding > side:
            rule = f"be at most {side}, the size of the images"
            raise SettingError("data.padding", rule, data.padding)
        ignore = dataset.ignore if dataset.ignore is not None else 255
        vary = (
            [*resize, PadCropFlip(data.padding, data.flip, ignore=ignore)]
            if data.augment == "pad-crop-flip"
            else resize
        )
    if data.noise:
        steps.append(AddNoise(data.noise))
    if data.mean:
        steps.append(Normalize(data.mean, data.std))
    return Compose(*first, *vary, *steps), Compose(*first, *resize, *steps)


def resolve(config: Config, dataset: Dataset) -> Config:
    """Return a config with what it left to the data: the task, and `DATA_OPTIONS` of the model.

    Args:
        config: The config.
        dataset: The training samples.
    """
    task = make_task(config.task.name, dataset, label_smoothing=config.task.label_smoothing)
    seen = replace(dataset, shape=_seen_shape(config.data, dataset))
    outputs = task.outputs(seen)
    known, options = model_options(config.model.name), dict(config.model.options)
    if "input_shape" in known:
        options.setdefault("input_shape", seen.shape)
    if "num_classes" in known and outputs is not None:
        given = options.setdefault("num_classes", outputs)
        if given != outputs:
            # Said before the model is made, which may not fit in memory.
            raise SettingError(
                "model.options.num_classes",
                f"be {outputs} for these data",
                given,
                "Leave it out.",
            )
    return replace(
        config,
        model=replace(config.model, options=options),
        task=replace(config.task, name=task.name),
    )


def _seen_shape(data: DataConfig, dataset: Dataset) -> tuple[int, ...]:
    """The shape of a sample as the model sees it, after its transform."""
    if len(dataset.shape) != 3:
        return dataset.shape
    channels = 1 if data.greyscale else dataset.shape[0]
    return channels, *(data.size or dataset.shape[1:])


def make_model(config: Config) -> Model:
    """Return the model of a config, drawn with its seed.

    Args:
        config: The config.
    """
    torch.manual_seed(config.train.seed)
    name, options = config.model.name, config.model.options
    try:
        return create_model(name, **options)
    except SettingError as error:
        raise as_config_error(error, ModelConfig, model_options(name)) from error
    except (TypeError, RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0].rstrip(".") or "The model does not fit in memory"
        raise SettingError("model.options", f"suit {name!r}", options, f"{reason}.") from error


def try_out(model: Model, task: Task, dataset: Dataset, transform: Transform | None) -> None:
    """Raise `ValueError` if a model cannot take these samples or fails what the task needs.

    Args:
        model: The model.
        task: The task.
        dataset: The samples, of which it gets one.
        transform: What is done to them.
    """
    if not len(dataset):
        raise ValueError(
            f"data.name must have samples to score; got none in the split {dataset.split!r} of "
            f"{dataset.name!r}."
        )
    training = model.training
    x, y = next(batches(dataset, 1, shuffle=False, transform=transform))
    try:
        with torch.no_grad():
            output = model.eval()(x)
    except (ConvergenceError, MemoryError):
        raise
    except Exception as error:  # whatever a user's own model raises, the sentence says it
        if "memory" in str(error) or isinstance(error, ValueError):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"model {model.name!r} must take samples of shape {tuple(x.shape[1:])} and "
            f"{x.dtype}; it raised {reason}."
        ) from error
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
        raise SettingError(
            f"The output of model {model.name!r}", "be a tensor of floats", output, got=str(kind)
        )
    task.check(output, y)
    model.train(training)
