"""What a page about a training run is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["MaskSample", "RunReport", "SolvePath"]


@dataclass(frozen=True)
class MaskSample:
    """One picture with the labels of its pixels, and those that the model gave them.

    Args:
        image: The picture, height x width x 3, uint8.
        truth: Labels, height x width.
        prediction: Labels, height x width.
    """

    image: np.ndarray
    truth: np.ndarray
    prediction: np.ndarray

    def __post_init__(self) -> None:
        picture, size = np.shape(self.image), np.shape(self.image)[:2]
        if len(picture) != 3 or picture[2] != 3 or 0 in picture:
            raise ValueError(
                f"MaskSample.image must be height x width x 3; got the shape {picture}."
            )
        for name, mask in (("truth", self.truth), ("prediction", self.prediction)):
            if np.shape(mask) != size:
                raise ValueError(
                    f"MaskSample.{name} must have the height and width of the image, {size}; "
                    f"got {np.shape(mask)}."
                )


@dataclass(frozen=True)
class SolvePath:
    """How the solve of one sample went, and what it solves.

    Args:
        residual: Relative residual at each step of the solver.
        objective: Value of the layer's problem above its minimum at each step, if the layer has
            one.
        description: The problem that the layer solves, in words.
        certificate: What is proven about the solve, in words.
        image: The sample as an image, height x width or height x width x 3: uint8, or numbers that
            are scaled from the smallest to the largest.
        name: The layer, where a page shows several.
    """

    residual: Sequence[float]
    objective: Sequence[float] | None = None
    description: str = ""
    certificate: str = ""
    image: np.ndarray | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if self.image is not None:
            shape = np.shape(self.image)
            if 0 in shape or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))):
                raise ValueError(
                    "SolvePath.image must be height x width, or that x 3; got the shape "
                    f"{shape}. Leave it out."
                )


@dataclass(frozen=True)
class RunReport:
    """All that a page says about a run; what is empty or missing is left out.

    Args:
        title: What the run is called.
        config: Its settings, nested as in TOML.
        environment: Versions, platform and command line.
        steps: The step lines of its metrics.
        epochs: The epoch lines of its metrics.
        summary: What it ended with; None while it goes on.
        classes: Names of the labels.
        confusion: Counts of samples, rows for the truth, columns for the prediction.
        masks: Samples of a segmentation.
        ignore: The label of pixels that do not count.
        solves: The solve of one sample, one for each equilibrium layer.
    """

    title: str
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    epochs: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    classes: Sequence[str] = ()
    confusion: np.ndarray | None = None
    masks: Sequence[MaskSample] = ()
    ignore: int | None = None
    solves: Sequence[SolvePath] = ()

    def __post_init__(self) -> None:
        if self.confusion is not None:
            shape = np.shape(self.confusion)
            if len(shape) != 2 or shape[0] != shape[1]:
                raise ValueError(
                    f"RunReport.confusion must be classes x classes; got the shape {shape}."
                )
