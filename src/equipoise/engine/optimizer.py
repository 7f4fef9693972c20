"""Optimisers by name, and a running average of the weights that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from equipoise.engine.settings import OptimizerConfig

__all__ = ["Average", "make_optimizer"]


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Return an optimiser of all weights of a model that are trained.

    Args:
        model: Whose weights.
        settings: Which optimiser.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not trained:
        raise ValueError(
            f"Trainer.model must have weights to train; got none in {type(model).__name__}."
        )
    decayed = [weight for weight in trained if settings.decay_all or weight.dim() > 1]
    spared = [weight for weight in trained if not (settings.decay_all or weight.dim() > 1)]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "sgd":
        return torch.optim.SGD(
            groups, settings.learning_rate, settings.momentum, nesterov=settings.nesterov
        )
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, settings.learning_rate, settings.betas, settings.epsilon)


class Average:
    """The exponential average `a <- decay a + (1 - decay) w` of a model's weights.

    The model is evaluated with it. Buffers of floats, such as the statistics of batch
    normalisation, are averaged like weights, since they belong to them. Early on the decay is
    `(1 + n)/(10 + n)` after n updates where that is less, so that the first weights are soon
    forgotten.

    Args:
        model: Whose weights.
        decay: `decay`, in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.updates = 0
        self.values = {name: value.clone() for name, value in self._present().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the present weights."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for name, value in self._present().items():
            self.values[name].lerp_(value, 1 - decay)

    def load(self, values: Mapping[str, Tensor], updates: int) -> None:
        """Take over averages, or raise `ValueError` if they are those of another model.

        Args:
            values: The averages, by the names of the weights.
            updates: How many updates made them.
        """
        if {name: value.shape for name, value in values.items()} != {
            name: value.shape for name, value in self.values.items()
        }:
            raise ValueError("averages of the weights of another model")
        for name, value in values.items():
            self.values[name].copy_(value)
        self.updates = updates

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the averages for good."""
        for name, value in self._present().items():
            value.copy_(self.values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the averages, and its own weights again afterwards, bit for bit."""
        own = {name: value.clone() for name, value in self._present().items()}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in self._present().items():
                    value.copy_(own[name])

    def _present(self) -> dict[str, Tensor]:
        """The model's own tensors of floats, real and complex."""
        return {
            name: value
            for name, value in self.model.state_dict().items()
            if value.is_floating_point() or value.is_complex()
        }
