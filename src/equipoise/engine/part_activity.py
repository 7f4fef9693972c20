"""How much the parts of a cell, such as the layers of a composition, get and give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core import ConvergenceError, Structure
from equipoise.engine.tasks import Task
from equipoise.layers import Equilibrium
from equipoise.layers.declarations import contributions_of, part_weights_of
from equipoise.models import find_equilibria

__all__ = ["IDLE", "MAX_PROBE", "PartActivity", "has_parts", "measure_parts"]

IDLE = 0.01  # fractions below which a part neither gets nor gives anything
MAX_PROBE = 32  # samples on which it is measured


@dataclass(frozen=True)
class PartActivity:
    """What the parts of all equilibrium layers of a model get and give.

    Attributes:
        gradients: `|g| |W|` for the weights `W` of each part and the gradient `g` of the loss,
            relative to the largest of its layer: by how much a change of the weights by so many
            percent could change the loss.
        contributions: By how much the state changes if the part is left out, relative to it.
        remedy: What to do about idle parts.
    """

    gradients: dict[str, float]
    contributions: dict[str, float]
    remedy: str = ""

    @property
    def idle(self) -> list[str]:
        """The parts that neither get nor give anything."""
        both = [name for name in self.gradients if name in self.contributions]
        return [n for n in both if self.gradients[n] < IDLE and self.contributions[n] < IDLE]

    def describe_idle(self) -> str:
        """Return a sentence on the parts that are idle; empty if there are none."""
        if not self.idle:
            return ""
        name = self.idle[0]
        more = len(self.idle) - 1
        rest = f" (and {more} more)" if more else ""
        numbers = (100 * self.gradients[name], 100 * self.contributions[name])
        return (
            f"{name} is idle{rest}: its weights get {numbers[0]:.2g} % of "
            f"the largest gradient, and without it the state would change by {numbers[1]:.2g} %. "
            f"{self.remedy}"
        ).strip()


def has_parts(model: nn.Module) -> bool:
    """Return whether a cell of a model names parts.

    Args:
        model: The model.
    """
    return any(part_weights_of(layer.cell) for layer in find_equilibria(model).values())


def measure_parts(model: nn.Module, task: Task, x: Tensor, y: Tensor) -> PartActivity | None:
    """Return what the parts of a model's cells get and give on a batch.

    Neither the model nor its gradients, buffers or random numbers are changed. Nothing is returned
    for a model whose cells name no parts, or where a solve failed or a number is not finite.

    Args:
        model: The model.
        task: What it is trained for.
        x: Samples, as the model takes them.
        y: Their targets.
    """
    layers = {
        name: layer for name, layer in find_equilibria(model).items() if part_weights_of(layer.cell)
    }
    if not layers or not len(x):
        return None
    weights = {
        f"{name}.{part}": [weight for weight in own if weight.requires_grad]
        for name, layer in layers.items()
        for part, own in part_weights_of(layer.cell).items()
    }
    inputs: dict[str, Any] = {}
    try:
        with _undisturbed(model, layers, inputs), torch.enable_grad():
            loss = task.loss(model(x), y)
            flat = [weight for own in weights.values() for weight in own]
            found = iter(
                torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True)
                if flat and loss.requires_grad
                else [torch.zeros_like(weight) for weight in flat]
            )
            sizes = {
                name: sum(float(weight.detach().norm() * next(found).norm()) for weight in own)
                for name, own in weights.items()
            }
            with torch.no_grad():
                contributions = {
                    f"{name}.{part}": value
                    for name, layer in layers.items()
                    if name in inputs
                    for part, value in _contributions(layer, inputs[name]).items()
                }
    except ConvergenceError:
        return None
    if not all(map(math.isfinite, [*sizes.values(), *contributions.values()])):
        return None
    gradients: dict[str, float] = {}
    for name in layers:
        own = {key: sizes[key] for key in sizes if key.startswith(f"{name}.")}
        largest = max(own.values())
        gradients |= {key: size / largest if largest > 0 else 0.0 for key, size in own.items()}
    remedies = dict.fromkeys(layer.cell.idle_remedy for layer in layers.values())
    return PartActivity(gradients, contributions, " ".join(filter(None, remedies)))


def _contributions(layer: Equilibrium, x: Any) -> dict[str, float]:
    assert layer.last is not None
    context = Structure(layer.cell.inject(x), "Cell.inject")
    return contributions_of(layer.cell, layer.last.value, context.rebuild(context.leaves))


@contextmanager
def _undisturbed(
    model: nn.Module, layers: dict[str, Equilibrium], inputs: dict[str, Any]
) -> Iterator[None]:
    """Note what goes into layers, in evaluation mode, without a word about solves that fail."""
    training = {part: part.training for part in model.modules()}
    policies = {layer: layer.solves.on_failure for layer in layers.values()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(enabled=True))
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(
                lambda _, args, name=name: inputs.__setitem__(name, args[0])
            )
            stack.callback(hook.remove)
            layer.solves.on_failure = "ignore"
        model.eval()
        try:
            yield
        finally:
            for part, mode in training.items():
                part.training = mode
            for layer, policy in policies.items():
                layer.solves.on_failure = policy
