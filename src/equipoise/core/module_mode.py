"""A model in evaluation mode for a while, and each of its parts in its own mode again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode"]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Bring a model to evaluation mode while the context lasts.

    Afterwards each module is in the mode that it had: `model.train(model.training)` would put
    frozen normalisations, in evaluation mode within a model that trains, back into training.

    Args:
        model: The model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
