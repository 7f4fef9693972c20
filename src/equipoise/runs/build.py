"""What a config asks for, made: transforms, the model and its task."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.core import ConvergenceError, SettingError
from equipoise.core.module_mode import evaluation_mode
from equipoise.data import (
    Compose,
    CutMix,
    Dataset,
    Degrade,
    Greyscale,
    Mixup,
    Normalize,
    PadCropFlip,
    RandAugment,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transform,
    batches,
)
from equipoise.data.image import MAX_PIXELS
from equipoise.engine import Task
from equipoise.engine.dependence import check_model, trial_size
from equipoise.models import Model, create_model, model_options
from equipoise.operators import DEGRADATIONS
from equipoise.runs.config import Config
from equipoise.runs.sections import DataConfig, ModelConfig, as_config_error

__all__ = [
    "DATA_OPTIONS",
    "first_samples",
    "make_model",
    "make_transforms",
    "resolve",
    "try_out",
]

DATA_OPTIONS = ("num_classes", "input_shape", "degradation")
"""The options of a model that come from the data: how many outputs, the shape of a sample, and what
happened to it."""


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
        names = ("greyscale", "size", "rand_augment", "noise", "degradation")
        asked = [name for name in names if getattr(data, name)]
        asked += ["mean"] if data.mean and not _is_table(dataset) else []
        asked += [name for name in ("augment", "mix") if getattr(data, name) != "none"]
        if asked:
            rule = f"be left out, since it is for images and {data.name!r} holds none"
            raise SettingError(f"data.{asked[0]}", rule, getattr(data, asked[0]))
        scale = Normalize(data.mean, data.std) if data.mean else None
        return scale, scale
    # Bytes are cheaper to move about than floats, so images are cut before they are turned into
    # floats.
    first: list[Transform] = [Greyscale()] if data.greyscale else []
    size = (data.size[0], data.size[1]) if data.size else None
    if math.prod(data.size) > MAX_PIXELS:
        raise SettingError("data.size", f"have at most {MAX_PIXELS} pixels", data.size)
    resize: list[Transform] = [Resize(size)] if size else []
    ignore = dataset.ignore if dataset.ignore is not None else 255
    if data.augment == "random-resized-crop" and size:
        vary: list[Transform] = [RandomResizedCrop(size, flip=data.flip)]
    else:
        side = min(data.size or dataset.shape[1:])
        if data.augment == "pad-crop-flip" and data.padding > side:
            rule = f"be at most {side}, the size of the images"
            raise SettingError("data.padding", rule, data.padding)
        vary = (
            [*resize, PadCropFlip(data.padding, data.flip, ignore=ignore)]
            if data.augment == "pad-crop-flip"
            else resize
        )
    if data.rand_augment:
        vary += [ToFloat(), RandAugment(data.rand_augment, data.rand_strength, ignore)]
    last: list[Transform] = [Normalize(data.mean, data.std)] if data.mean else []
    learn, score = _make_damage(data)
    mix = _make_mix(data, dataset)
    return (
        Compose(*first, *vary, *steps, *learn, *last, *mix),
        Compose(*first, *resize, *steps, *score, *last),
    )


def _make_damage(data: DataConfig) -> tuple[list[Transform], list[Transform]]:
    """What damages training images, and images that are scored, if anything does."""
    if not data.noise and not data.degradation:
        return [], []
    damage = DEGRADATIONS.resolve(data.degradation or "identity")
    return [Degrade(data.noise, damage)], [Degrade(data.noise, damage, per_image=True)]


def _make_mix(data: DataConfig, dataset: Dataset) -> list[Transform]:
    """What mixes training images, if anything does."""
    if data.mix == "none":
        return []
    kind = Mixup if data.mix == "mixup" else CutMix
    return [kind(len(dataset.classes), data.mix_alpha)]


def resolve(config: Config, dataset: Dataset) -> Config:
    """Return a config with what it left to the data: task, `DATA_OPTIONS` of the model.

    Args:
        config: The config.
        dataset: The training samples.
    """
    task = config.task.make(dataset)
    if config.data.mix != "none" and not task.takes_mixed_targets:
        rule = f"be 'none' for the task {task.name!r}, whose targets cannot be mixed"
        raise SettingError("data.mix", rule, config.data.mix)
    seen = replace(dataset, shape=seen_shape(config.data, dataset))
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
    if "degradation" in known and (config.data.degradation or config.data.noise):
        damage = dict(config.data.degradation) or {"name": "identity"}
        given = options.setdefault("degradation", damage)
        if given != damage:
            raise SettingError(
                "model.options.degradation",
                f"be that of the data, {damage}",
                given,
                "Leave it out.",
            )
    name = task.name if config.task.name == "auto" else config.task.name
    return replace(
        config,
        model=replace(config.model, options=options),
        task=replace(config.task, name=name),
    )


def _is_table(dataset: Dataset) -> bool:
    return dataset.task in ("arrays", "regression") and len(dataset.shape) == 1


def seen_shape(data: DataConfig, dataset: Dataset) -> tuple[int, ...]:
    """Return the shape of a sample as the model sees it, after its transform.

    Args:
        data: What is done to the samples.
        dataset: The samples, or what is known of them.
    """
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


def first_samples(dataset: Dataset, transform: Transform | None) -> tuple[Tensor, Tensor]:
    """Return the first samples that can be read, and their targets; raise if none can.

    Args:
        dataset: The samples.
        transform: What is done to them.
    """
    samples = batches(dataset, trial_size(dataset), shuffle=False, transform=transform)
    found = next(((x, y) for x, y in samples if len(x)), None)
    if found is None:
        raise ValueError(
            f"data.name must have samples that can be read; got none in the split "
            f"{dataset.split!r} of {dataset.name!r}."
        )
    return found


def try_out(model: Model, task: Task, dataset: Dataset, transform: Transform | None) -> None:
    """Raise `ValueError` if a model cannot take these samples or fails what the task needs.

    Args:
        model: The model.
        task: The task.
        dataset: The samples, of which it gets some.
        transform: What is done to them.
    """
    if not len(dataset):
        raise ValueError(
            f"data.name must have samples to score; got none in the split {dataset.split!r} of "
            f"{dataset.name!r}."
        )
    x, y = first_samples(dataset, transform)
    try:
        with torch.no_grad(), evaluation_mode(model):
            output = model(x)
    except (ConvergenceError, MemoryError):
        raise
    except Exception as error:  # whatever a user's own model raises, the sentence says it
        if x.dim() != 4 and type(model).__module__.startswith("equipoise."):
            raise SettingError(
                "model.name",
                f"take samples of shape {tuple(x.shape[1:])} from {dataset.name!r}",
                model.name,
                "Choose another one (equipoise list models), or name a function of your own: "
                "model.name = 'package.module:function' (docs/how_to/model.md).",
            ) from error
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
    check_model(model, task, x, y, output)
