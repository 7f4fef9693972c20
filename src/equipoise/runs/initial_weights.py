"""Training that starts from the weights of another run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from equipoise.core import SourceError
from equipoise.engine import read_checkpoint
from equipoise.runs.build import DATA_OPTIONS
from equipoise.runs.config import Config

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


def load_initial_weights(model: nn.Module, source: Path) -> list[str]:
    """Give a model the weights of a run, and return the names of those that stay new.

    These are weights of other shapes, such as those of a head for other classes.

    Args:
        model: The model.
        source: The folder of the run.
    """
    path = source / "model.safetensors"
    weights, _ = read_checkpoint(path)
    own = model.state_dict()
    if odd := sorted(set(own) ^ set(weights)):
        raise SourceError(path, f"weights of another model: {odd[0]!r} is in one of them only.")
    fitting = {name: value for name, value in weights.items() if value.shape == own[name].shape}
    if not fitting:
        raise SourceError(path, "weights of another model: none has the shape that it has here.")
    model.load_state_dict({**own, **fitting})
    return [name for name in own if name not in fitting]
