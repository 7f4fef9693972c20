"""An attack on certified radii: projected gradient descent that tries to change the class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core import stop_if_requested
from equipoise.core.errors import ConvergenceWarning
from equipoise.core.validate import SettingError, require_count

__all__ = ["AttackSettings", "attack_radii"]

INSIDE = 1 - 1e-6
"""What of a radius the attack uses, so that float32 does not carry it outside."""


@dataclass(frozen=True)
class AttackSettings:
    """How hard an attack tries.

    Args:
        steps: Gradient steps of each start.
        restarts: Starts. The first is the sample itself, pushed towards whichever class is
            closest; each further one is a random point of the ball, pushed towards the class that
            is second, third, ... for the sample.
        seed: Of the random starts.
    """

    steps: int = 100
    restarts: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("AttackSettings.steps", self.steps)
        require_count("AttackSettings.restarts", self.restarts)


def attack_radii(
    predict: Callable[[Tensor], Tensor],
    x: Tensor,
    classes: Tensor,
    radius: Tensor,
    settings: AttackSettings | None = None,
) -> tuple[Tensor, Tensor]:
    """Look for points within a radius of samples that are predicted to be of another class.

    Descent on the margin of the class over another one, by steps of a length that shrinks to zero
    along the gradient, each followed by the projection onto the ball (Madry et al., 2018).
    Gradients go through the equilibria. Samples whose class has changed are left alone from then
    on.

    Args:
        predict: Returns outputs for samples, differentiable.
        x: The samples.
        classes: Their predicted classes.
        radius: How far each may be moved, Euclidean.
        settings: How hard to try.

    Returns:
        The points with the smallest margins that were found, and those margins: negative where the
        class changed.
    """
    settings = settings or AttackSettings()
    if not bool((radius >= 0).all()):
        raise SettingError("attack_radii.radius", "be zero or positive", radius)
    generator = torch.Generator().manual_seed(settings.seed)
    best, margin = x.clone(), torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
    ranks = _rank_others(predict, x, classes)
    for restart in range(settings.restarts):
        left = torch.nonzero(margin > 0).flatten()
        if not len(left):
            break
        target = ranks[left, (restart - 1) % ranks.shape[1]] if restart else None
        start = _draw(x[left], generator) if restart else torch.zeros_like(x[left])
        found, reached = _descend(
            predict, x[left], start, classes[left], target, radius[left] * INSIDE, settings.steps
        )
        better = reached < margin[left]
        best[left[better]], margin[left[better]] = found[better], reached[better]
    return best, margin


@torch.no_grad()
def _rank_others(predict: Callable[[Tensor], Tensor], x: Tensor, classes: Tensor) -> Tensor:
    """The other classes of each sample, the closest first."""
    y = predict(x).scatter(1, classes[:, None], -math.inf)
    return y.argsort(dim=1, descending=True)[:, :-1]


def _draw(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random points of the unit ball, most of them close to its surface as most of it is."""
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    return noise / _lengths(noise)


def _lengths(x: Tensor) -> Tensor:
    """Euclidean lengths of samples, in a shape that divides them; 1 where they are 0."""
    length = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return torch.where(length > 0, length, 1.0).reshape(-1, *[1] * (x.dim() - 1))


def _margins(y: Tensor, classes: Tensor, target: Tensor | None = None) -> Tensor:
    """How far the class is above a target, or above the best other class."""
    own = y.gather(1, classes[:, None])[:, 0]
    if target is not None:
        return own - y.gather(1, target[:, None])[:, 0]
    return own - y.scatter(1, classes[:, None], -math.inf).amax(dim=1)


def _descend(
    predict: Callable[[Tensor], Tensor],
    x: Tensor,
    move: Tensor,
    classes: Tensor,
    target: Tensor | None,
    radius: Tensor,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """One start: the best points on the way, and their margins over all other classes."""
    limit = radius.reshape(-1, *[1] * (x.dim() - 1))
    move = move * limit
    best, margin = x.clone(), torch.full_like(radius, math.inf)
    for step in range(steps + 1):
        stop_if_requested()
        with warnings.catch_warnings():
            # What an attack finds is checked by exact solves.
            warnings.simplefilter("ignore", ConvergenceWarning)
            with torch.enable_grad():
                point = (x + move).detach().requires_grad_()
                y = predict(point)
                reached = _margins(y.detach(), classes)
                better = reached < margin
                best[better], margin[better] = point.detach()[better], reached[better]
                if step == steps:
                    break
                loss = _margins(y, classes, target).sum()
                (gradient,) = torch.autograd.grad(loss, point)
        length = 2 * limit * 0.5 * (1 + math.cos(math.pi * step / steps))
        move = move - length * gradient.nan_to_num() / _lengths(gradient.nan_to_num())
        move = move * (limit / _lengths(move)).clamp_max(1.0)
    return best, margin
