"""Training that starts from the weights of another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from equipoise.core import SettingError, SourceError
from equipoise.data import Dataset
from equipoise.engine import CheckpointError, Task, read_checkpoint
from equipoise.models import Model
from equipoise.runs.build import DATA_OPTIONS, make_model
from equipoise.runs.config import Config
from equipoise.runs.saved_run import read_about

__all__ = ["load_initial_weights", "start_from"]


def start_from(config: Config, source: Path, given: tuple[str, ...] = ()) -> Config:
    """Return the config of a run that starts from the weights of another, on any data.

    Args:
        config: The config of the other run, as far as it is to stay.
        source: The folder of the other run.
        given: Options of the model that the user gives; others that come from the data are taken
            from the data anew, so that a head fits their classes.
    """
    if not (source / "model.safetensors").is_file():
        raise SourceError(
            source, "must be the folder of a run with weights to start from; it has none."
        )
    options = {
        name: value
        for name, value in config.model.options.items()
        if name not in DATA_OPTIONS or name in given
    }
    model = replace(config.model, options=options, weights=str(source.absolute()))
    return replace(config, model=model)


def load_initial_weights(
    model: Model, source: Path, config: Config, task: Task, dataset: Dataset
) -> str:
    """Give a model the weights of a run, and return what is to be told of that.

    Weights of other shapes stay new, and so do those that mean other things: a head has an output
    for each class in their order, and a first layer an input for each column of a table.

    Args:
        model: The model.
        source: The folder of the run.
        config: What the model was made from, with what the data say.
        task: What it is trained for.
        dataset: What it is trained on.
    """
    path = source / "model.safetensors"
    weights, state = read_checkpoint(path)
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(weights)):
        raise SourceError(path, f"weights of another model: {odd[0]!r} is in one of them only.")
    new = {name for name, value in own.items() if weights[name].shape != value.shape}
    try:
        before = read_about(state["data"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(path, error) from error
    reasons = []
    if task.reads_text and (before.tokens, before.classes) != (dataset.tokens, dataset.classes):
        known = len(set(before.classes) & set(dataset.classes))
        raise SettingError(
            "The vocabulary of the text",
            f"be that of {source}, whose weights belong to its tokens",
            None,
            "Read the text with the tokens of that run by data.options.vocabulary, or train "
            "without --from-weights.",
            got=f"{len(dataset.classes):,} tokens, of which {known:,} are among its "
            f"{len(before.classes):,}",
        )
    if task.learns_classes and before.classes != dataset.classes:
        new |= _find_dependent(own, config, "num_classes")
        reasons.append("classes")
    both_named = bool(before.columns) == bool(dataset.columns)
    if both_named and _list_features(before) != _list_features(dataset):
        new |= _find_dependent(own, config, "input_shape")
        reasons.append("columns")
    if reasons and not new:
        raise SettingError(
            f"The {reasons[0]} of the data",
            f"be those of {source}, since no option of {config.model.name!r} tells which weights "
            "belong to them and are to begin anew",
            None,
            "Train without --from-weights.",
            got=f"other {reasons[0]}",
        )
    if len(new) == len(own):
        raise SourceError(path, "weights of another model: none fits this one.")
    model.load_state_dict({name: own[name] if name in new else weights[name] for name in own})
    names = [name for name in own if name in new]
    why = f", since the {' and the '.join(reasons)} differ" if reasons else ""
    return f"{source}; new are {', '.join(names)}{why}" if names else str(source)


def _list_features(about: Dataset) -> tuple[str, ...]:
    """Names of what the first layer sees of a table: its columns, and the categories in them."""
    return about.encoding.name_features(about.columns) if about.encoding else about.columns


def _find_dependent(own: Mapping[str, Tensor], config: Config, option: str) -> set[str]:
    """The weights whose shapes depend on an option of the model that comes from the data."""
    value = config.model.options.get(option)
    if value is None:
        return set()
    other = value + 1 if isinstance(value, int) else (value[0] + 1, *value[1:])
    options = {**config.model.options, option: other}
    try:
        with torch.random.fork_rng():
            larger = make_model(replace(config, model=replace(config.model, options=options)))
    except SettingError:  # a model of one size only, of which nothing is found out
        return set()
    shapes = {name: each.shape for name, each in larger.state_dict().items()}
    return {name for name, each in own.items() if shapes.get(name) != each.shape}
