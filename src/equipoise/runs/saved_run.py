"""Runs that have weights to use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from equipoise.core import SettingError, SourceError, choose, require_finite
from equipoise.data import DATASETS, Dataset, Encoding, Loading, Transform
from equipoise.data.vocabulary import TOKENS, Vocabulary
from equipoise.engine import (
    CheckpointError,
    Evaluation,
    Task,
    evaluate,
    load_weights,
    read_checkpoint,
)
from equipoise.models import Model
from equipoise.runs.build import make_model, make_transforms, resolve, try_out
from equipoise.runs.config import Config, load_config
from equipoise.runs.own_code import CodeWarning, describe_change, find_changed_code
from equipoise.runs.samples import load_part, require_alike

__all__ = ["Run", "evaluate_run", "load_run_samples", "open_run", "read_about"]


@dataclass(frozen=True)
class Run:
    """A run that has weights to use.

    Attributes:
        folder: Where it is kept.
        config: What it was told.
        model: The model with the weights that were kept, in evaluation mode.
        task: What it was trained for.
        about: What is known of its data, without samples.
        transform: What is done to each batch that is scored.
    """

    folder: Path
    config: Config
    model: Model
    task: Task
    about: Dataset
    transform: Transform | None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.about.classes

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of a language model."""
        return Vocabulary(self.about.tokens or "words", self.about.classes)


def open_run(folder: Path, *, trust: bool = False) -> Run:
    """Return a run with the weights that were kept; its data need not be there.

    Args:
        folder: Where it is kept.
        trust: Whether to run the code that it names, whoever made it; see `load_config`.
    """
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is none"
        raise SourceError(folder, f"must be the folder of a run; {found}.")
    config = load_config(folder, trust=trust)
    path = folder / "model.safetensors"
    if not path.exists():
        raise SourceError(
            folder,
            "must hold model.safetensors, which is written after the first epoch; it is missing.",
        )
    if changed := find_changed_code(folder, config):
        warnings.warn(
            f"{describe_change(changed)} since {folder} was trained, so that what it computes may "
            "differ",
            CodeWarning,
            stacklevel=2,
        )
    weights, state = read_checkpoint(path)
    try:
        about = read_about(state["data"])
        resolve(config, about)
        model = make_model(config)
        load_weights(model, weights)
        task = config.task.make(about)
        transform = make_transforms(config.data, about)[1]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(path, error) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"  # whatever it was trained on
    return Run(folder, config, model.to(device).eval(), task, about, transform)


def evaluate_run(
    folder: Path | Run,
    *,
    split: str | None = None,
    root: str | None = None,
    trust: bool = False,
    flip: bool = False,
    on_batch: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Score the weights that a run kept.

    Args:
        folder: Where it is kept, or the run that is open already.
        split: Which split of the data; by default what the run itself scored in the end. `train` is
            what it learnt from, and `val` what it held out, if it did.
        root: The folder with the data, if it is another one than in training.
        trust: As of `open_run`.
        flip: As of `evaluate`.
        on_batch: As of `evaluate`.
    """
    run = folder if isinstance(folder, Run) else open_run(folder, trust=trust)
    dataset = load_run_samples(run, split, root)
    train, data = run.config.train, run.config.data
    try_out(run.model, run.task, dataset, run.transform)
    return evaluate(
        run.model,
        run.task,
        dataset,
        batch=train.evaluate_batch,
        transform=run.transform,
        precision=train.precision,
        flip=flip,
        on_batch=on_batch,
        loading=Loading(data.workers),
    )


def load_run_samples(run: Run, split: str | None, root: str | None = None) -> Dataset:
    """Load samples for a run, whose classes mean what they meant in training.

    Args:
        run: The run.
        split: As of `evaluate_run`.
        root: As of `evaluate_run`.
    """
    data = run.config.data if root is None else replace(run.config.data, root=root)
    known = DATASETS[data.name].as_trained(run.about)
    data = replace(data, options={**data.options, **known})
    dataset = load_part(data, split, run.about.encoding)
    try:
        require_alike(run.about, dataset)
    except SettingError as error:
        raise SourceError(run.folder, error) from error
    return dataset


def read_about(values: dict[str, Any]) -> Dataset:
    """Return the data set that a model was trained on, without samples, or raise `ValueError`.

    Args:
        values: What is kept of it with the weights.
    """
    kinds = {"name": str, "task": str, "classes": list, "shape": list, "ignore": int | None}
    odd = [name for name, kind in kinds.items() if not isinstance(values[name], kind)]
    columns = values.get("columns", [])  # only tables have them
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"columns of its data cannot be {columns!r}")
    tokens = values.get("tokens")  # only texts have them
    if tokens is not None:
        choose("tokens of its data", tokens, TOKENS)
    odd += ["classes"] * any(not isinstance(name, str) for name in values["classes"])
    odd += ["shape"] * any(type(side) is not int or side < 1 for side in values["shape"])
    encoding = values.get("encoding")  # only tables have one
    value_range = values.get("value_range")  # only images in memory have one
    if value_range is not None:
        if not isinstance(value_range, list) or len(value_range) != 2:
            raise ValueError(f"value_range of its data cannot be {value_range!r}")
        for number in value_range:
            require_finite("value_range of its data", number)
    if odd:
        raise ValueError(f"{odd[0]} of its data cannot be {values[odd[0]]!r}")
    empty = torch.zeros(0, dtype=torch.int64)
    return Dataset(
        values["name"],
        "none",
        values["task"],
        tuple(values["classes"]),
        tuple(values["shape"]),
        empty,
        empty,
        ignore=values["ignore"],
        columns=tuple(columns),
        tokens=tokens,
        encoding=None if encoding is None else Encoding.from_dict(encoding),
        value_range=None if value_range is None else (value_range[0], value_range[1]),
    )
