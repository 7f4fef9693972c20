"""Directions in the space of a model's weights, along which its loss is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.validate import SettingError

__all__ = [
    "Normalization",
    "PathPlane",
    "moved_weights",
    "path_plane",
    "random_direction",
    "weights_of",
]

Weights = Mapping[str, Tensor]
Normalization = Literal["filter", "layer", "none"]
"""What of a direction gets the length of the weights it is added to."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters by name; buffers are no place to go to."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def random_direction(
    weights: Weights,
    *,
    normalize: Normalization = "filter",
    vectors: bool = False,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Draw a direction from a normal distribution, as long as the weights (Li et al., 2018).

    Each filter `d_ij` becomes `d_ij / |d_ij| * |w_ij|` (section 4 there), so that networks that
    differ only in the scale of their filters have the same landscape. A filter is what makes one
    output: a row of a matrix, the kernels of one channel.

    Args:
        weights: Where the direction starts, by name.
        normalize: What gets the length of its weights: each `filter`, each `layer`, or nothing.
        vectors: Whether biases and the scales of normalisations, which have one dimension, change
            too, each vector as one filter. The paper's figures leave them as they are.
        generator: Source of randomness.
    """
    choose("random_direction.normalize", normalize, get_args(Normalization))
    return {
        name: _scaled(weight, normalize, generator)
        if vectors or weight.dim() > 1
        else torch.zeros_like(weight)
        for name, weight in weights.items()
    }


def _scaled(weight: Tensor, normalize: str, generator: torch.Generator | None) -> Tensor:
    drawn = torch.randn(weight.shape, dtype=weight.dtype, generator=generator).to(weight.device)
    if normalize == "none":
        return drawn
    rows = len(weight) if normalize == "filter" and weight.dim() > 1 else 1
    own, wanted = (tensor.reshape(rows, -1).norm(dim=1, keepdim=True) for tensor in (drawn, weight))
    factor = wanted / torch.where(own > 0, own, 1.0)
    scaled: Tensor = (drawn.reshape(rows, -1) * factor).reshape(weight.shape)
    return scaled


@dataclass(frozen=True)
class PathPlane:
    """The plane that comes closest to a path of weights and goes through its centre.

    Attributes:
        directions: Two orthogonal directions of length 1.
        coordinates: Where in the plane the weights of the path are, shape (weights, 2).
        explained: The fraction of the path's squared distances from the centre that lies along
            each direction, shape (2,).
    """

    directions: tuple[dict[str, Tensor], dict[str, Tensor]]
    coordinates: np.ndarray
    explained: np.ndarray


def path_plane(path: Sequence[Weights], centre: Weights) -> PathPlane:
    """Return the two principal directions of a training path (Li et al., 2018, section 7.2).

    They are the first right singular vectors of the matrix with the rows `w_k - w*`, not
    centred again, so that the plane contains the weights `w*`.

    Args:
        path: The weights along the way, in order.
        centre: The weights `w*` that the landscape is drawn around.
    """
    gram = np.zeros((len(path), len(path)))
    for name, end in centre.items():
        rows = torch.stack([(one[name] - end).reshape(-1).double() for one in path])
        gram += (rows @ rows.T).cpu().numpy()
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1][:2], vectors[:, ::-1][:, :2]
    total = float(np.trace(gram))
    if len(values) < 2 or values[1] <= 1e-12 * max(total, np.finfo(float).tiny):
        raise SettingError(
            "path_plane.path",
            "hold weights that span a plane with those at the centre",
            path,
            got=f"{len(path)} set{'' if len(path) == 1 else 's'} of weights on one line",
        )
    vectors = vectors * np.where(vectors[0] < 0, -1.0, 1.0)  # the path starts on the right side
    lengths = np.sqrt(values)
    directions = tuple(
        {
            name: sum(
                (
                    float(factor) * (one[name] - end)
                    for factor, one in zip(column, path, strict=True)
                ),
                torch.zeros_like(end),
            )
            for name, end in centre.items()
        }
        for column in (vectors / lengths).T
    )
    return PathPlane((directions[0], directions[1]), vectors * lengths, values / total)


@contextmanager
def moved_weights(
    model: nn.Module, directions: Sequence[Weights], steps: Sequence[float]
) -> Iterator[None]:
    """Move a model's weights to `w + sum_k steps_k d_k` while the context lasts.

    Args:
        model: The model; its weights come back bit for bit.
        directions: The directions, by the names of its parameters.
        steps: How far to go along each.
    """
    before = weights_of(model)
    try:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                for direction, step in zip(directions, steps, strict=True):
                    weight.add_(direction[name], alpha=step)
        yield
    finally:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(before[name])
