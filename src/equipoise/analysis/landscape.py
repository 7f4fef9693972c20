"""The loss of a model along a line or over a plane of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import nn

from equipoise.analysis.direction import Weights, moved_weights
from equipoise.core.errors import ConvergenceError
from equipoise.core.validate import SettingError, require_count, require_finite

__all__ = ["Landscape", "PointLoss", "grid_axis", "loss_landscape", "measure_points"]

MAX_POINTS = 2001
"""Points along one axis of a grid."""


class PointLoss(NamedTuple):
    """The loss at one point, and what became of the solves behind it.

    Attributes:
        loss: The mean loss over the samples.
        missed: Samples whose equilibrium missed its tolerance.
        nonfinite: Samples whose output has NaN or infinity in it, or whose solve met one.
    """

    loss: float
    missed: int
    nonfinite: int


@dataclass(frozen=True)
class Landscape:
    """Losses on a grid of weights `w + x d_1 + y d_2`; `y` is one zero along a line.

    Attributes:
        x: Steps along the first direction, shape (columns,).
        y: Steps along the second, shape (rows,).
        loss: Shape (rows, columns); NaN where a sample has no finite output, and where a point has
            not been computed.
        missed: Samples whose equilibrium missed its tolerance, likewise.
        nonfinite: Samples without a finite output, likewise.
        samples: How many samples the losses are means over.
    """

    x: np.ndarray
    y: np.ndarray
    loss: np.ndarray
    missed: np.ndarray
    nonfinite: np.ndarray
    samples: int

    @property
    def unsolved(self) -> int:
        """Points with a sample whose equilibrium missed its tolerance."""
        return int((self.missed > 0).sum())

    @property
    def undefined(self) -> int:
        """Points without a loss, because a sample has no finite output."""
        return int((self.nonfinite > 0).sum())

    @property
    def centre(self) -> tuple[int, int]:
        """Row and column of the point that is nearest to the weights looked at."""
        return int(np.abs(self.y).argmin()), int(np.abs(self.x).argmin())


def grid_axis(low: float, high: float, points: int, name: str = "grid_axis") -> np.ndarray:
    """Return evenly spaced steps from `low` to `high`, with an exact zero amid a symmetric range.

    Args:
        low: The first.
        high: The last.
        points: How many.
        name: What they are called in a refusal.
    """
    require_count(f"{name}.points", points, MAX_POINTS)
    require_finite(f"{name}.range", low)
    require_finite(f"{name}.range", high)
    if points < 3:
        raise SettingError(f"{name}.points", "be at least 3, to show a shape", points)
    if not low < high:
        raise SettingError(f"{name}.range", "rise from its first number to its second", (low, high))
    steps = np.arange(points)
    return (low * (points - 1 - steps) + high * steps) / (points - 1)


def measure_points(
    model: nn.Module,
    measure: Callable[[], PointLoss],
    directions: Sequence[Weights],
    points: Iterable[Sequence[float]],
) -> Iterator[PointLoss]:
    """Yield the losses at some points, each computed by itself: what came before has no influence.

    Args:
        model: The model; between two points its weights are what they were.
        measure: Scores the model as it is.
        directions: One or two directions, by the names of the model's parameters.
        points: Steps along the directions.
    """
    for steps in points:
        with moved_weights(model, directions, steps):
            try:
                found = measure()
            except ConvergenceError:  # of a layer that raises: nothing is known of its samples
                found = PointLoss(np.nan, 0, 1)
        yield (
            found
            if np.isfinite(found.loss)
            else found._replace(loss=np.nan, nonfinite=max(found.nonfinite, 1))
        )


def loss_landscape(
    model: nn.Module,
    measure: Callable[[], PointLoss],
    directions: Sequence[Weights],
    x: np.ndarray,
    y: np.ndarray | None = None,
    *,
    samples: int = 0,
) -> Landscape:
    """Return the loss on a grid around a model's weights.

    `equipoise look landscape` does the same for a run, in several processes and resumable.

    Args:
        model: The model, which is left as it was.
        measure: Scores the model as it is.
        directions: One direction for a line, two for a plane.
        x: Steps along the first; see `grid_axis`.
        y: Steps along the second.
        samples: How many samples `measure` scores, for the figure.
    """
    if len(directions) != (1 if y is None else 2):
        got = f"{len(directions)} for {1 if y is None else 2} axes"
        raise SettingError("loss_landscape.directions", "be one for each axis", None, got=got)
    rows = np.zeros(1) if y is None else y
    points = [(a,) if y is None else (a, b) for b in rows for a in x]
    found = list(measure_points(model, measure, directions, points))
    losses, missed, nonfinite = (np.array(each) for each in zip(*found, strict=True))
    shape = (len(rows), len(x))
    return Landscape(
        x,
        rows,
        losses.reshape(shape),
        missed.reshape(shape),
        nonfinite.reshape(shape),
        samples,
    )
