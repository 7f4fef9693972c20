"""A penalty on the size of the Jacobians of all equilibrium layers, as part of a training loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import SettingError, require_positive
from equipoise.engine.loss_term import LossTerm
from equipoise.gradients.penalty import frobenius_penalty
from equipoise.layers import Equilibrium
from equipoise.models import find_equilibria

__all__ = ["JacobianPenalty"]


class JacobianPenalty(LossTerm):
    """`weight |J|_F^2 / width`, averaged over samples and added up over layers (Bai et al., 2021).

    `J` is the Jacobian of the step at the equilibrium, which is held fixed as in the paper's code;
    one random vector for each solve estimates its norm (see `frobenius_penalty`), drawn from
    torch's own generator, so that a run that is resumed draws the same.

    Args:
        model: The model.
        weight: The weight.
    """

    name = "jacobian_penalty"

    def __init__(self, model: nn.Module, weight: float) -> None:
        require_positive("task.jacobian_penalty", weight)
        self.weight = weight
        self._layers = list(find_equilibria(model).values())
        if not self._layers:
            raise SettingError(
                "task.jacobian_penalty", "be 0 for a model without equilibrium layers", weight
            )
        self._solves: list[tuple[Equilibrium, Any, Any]] = []

    @contextmanager
    def watching(self, x: Tensor) -> Iterator[None]:
        """Note each solve of the layers while the context lasts."""
        self._solves.clear()
        with ExitStack() as stack:
            for layer in self._layers:
                handle = layer.register_forward_hook(self._note, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _note(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], _: object
    ) -> None:
        assert isinstance(layer, Equilibrium)
        if layer.last is not None:
            x = inputs[0] if inputs else named["x"]
            self._solves.append((layer, x, layer.last.value))

    def estimate(self, loss: Callable[[Tensor], Tensor], output: Tensor) -> Tensor:
        """Return an estimate of `|J|_F^2 / width`, differentiable in weights and inputs."""
        found = [frobenius_penalty(layer.map(x), z).mean() for layer, x, z in self._solves]
        self._solves.clear()
        return torch.stack(found).sum()
