"""What the page of a run is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.core import SettingError

__all__ = ["RunReport", "ShownSample", "SolvePath"]


@dataclass(frozen=True)
class ShownSample:
    """One sample beside what is true of it and what the model made of it.

    Args:
        panels: By caption, all of one height and width: images, height x width x 3 (uint8, or
            numbers that are scaled from the smallest to the largest), and masks of labels, height x
            width.
    """

    panels: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        sizes = {np.shape(panel)[:2] for panel in self.panels.values()}
        for caption, panel in self.panels.items():
            shape = np.shape(panel)
            if 0 in shape or not (len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)):
                rule = "be height x width, or height x width x 3"
                raise SettingError(f"ShownSample.panels[{caption!r}]", rule, shape)
        if len(sizes) > 1:
            raise SettingError("ShownSample.panels", "have one height and width", sorted(sizes))


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
                rule = "be height x width, or height x width x 3"
                raise SettingError("SolvePath.image", rule, shape, "Leave it out.")


@dataclass(frozen=True)
class RunReport:
    """Everything that a page says about a run; what is empty or missing is left out.

    Args:
        title: What the run is called.
        config: Its settings, nested as in TOML.
        environment: Versions, platform and command line.
        steps: The step lines of its metrics.
        epochs: The epoch lines of its metrics.
        summary: Its final results; None while it is under way.
        classes: Names of the labels.
        confusion: Counts of samples, rows for the truth, columns for the prediction.
        samples: A few samples with what the model made of them.
        ignore: The label of pixels that do not count.
        solves: The solve of one sample, one for each equilibrium layer.
        bad_samples: Files that could not be read and were skipped, each with what is wrong with it.
    """

    title: str
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    epochs: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    classes: Sequence[str] = ()
    confusion: np.ndarray | None = None
    samples: Sequence[ShownSample] = ()
    ignore: int | None = None
    solves: Sequence[SolvePath] = ()
    bad_samples: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.confusion is not None:
            shape = np.shape(self.confusion)
            if len(shape) != 2 or shape[0] != shape[1]:
                raise SettingError("RunReport.confusion", "be classes x classes", shape)
