"""What the page of a run is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from equipoise.core import SettingError

__all__ = ["Mistake", "RunReport", "ShownSample", "SolvePath", "SolveSpread", "Survey"]


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
        truth: What is true of the sample, in words.
        prediction: What the model says of it, in words.
        solver: The solver that drew the path, and how exactly.
        own_solve: How the model itself solved it, in words.
    """

    residual: Sequence[float]
    objective: Sequence[float] | None = None
    description: str = ""
    certificate: str = ""
    image: np.ndarray | None = None
    name: str = ""
    truth: str = ""
    prediction: str = ""
    solver: str = ""
    own_solve: str = ""

    def __post_init__(self) -> None:
        _require_image("SolvePath.image", self.image)


@dataclass(frozen=True)
class SolveSpread:
    """How the forward solves of one layer ended, a number for each sample.

    Args:
        steps: How many steps each took.
        residual: The relative residual that each ended with.
        tolerance: What the residuals were to reach.
        name: The layer, where there are several.
    """

    steps: Sequence[float]
    residual: Sequence[float]
    tolerance: float | None = None
    name: str = ""


@dataclass(frozen=True)
class Mistake:
    """A sample whose class the model got wrong.

    Args:
        number: Its position in the data.
        truth: The name of its class.
        prediction: The name of the class that the model took it for.
        confidence: The probability that the model gave to that class.
        image: As of `SolvePath`.
    """

    number: int
    truth: str
    prediction: str
    confidence: float
    image: np.ndarray | None = None

    def __post_init__(self) -> None:
        _require_image("Mistake.image", self.image)


@dataclass(frozen=True)
class Survey:
    """What a look at some of the scored samples found.

    Args:
        samples: How many were looked at.
        total: How many there are.
        split: The split that they are of.
        solves: How their solves ended, one for each equilibrium layer.
        wrong: How many the model got wrong; None if the task has no classes of samples.
        mistakes: Some of those, the most confident first.
    """

    samples: int
    total: int
    split: str
    solves: Sequence[SolveSpread] = ()
    wrong: int | None = None
    mistakes: Sequence[Mistake] = ()


@dataclass(frozen=True)
class RunReport:
    """Everything that a page says about a run; what is empty or missing is left out.

    Args:
        title: What the run is called.
        subtitle: When it ran, and on what.
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
        survey: What a look at some of the scored samples found.
        certificate: What is proved of the network, as `equipoise certify --json` prints it.
        figures: PNG files that `equipoise look` made, each with its caption.
    """

    title: str
    subtitle: str = ""
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
    survey: Survey | None = None
    certificate: Mapping[str, Any] | None = None
    figures: Sequence[tuple[bytes, str]] = ()

    def __post_init__(self) -> None:
        if self.confusion is not None:
            shape = np.shape(self.confusion)
            if len(shape) != 2 or shape[0] != shape[1]:
                raise SettingError("RunReport.confusion", "be classes x classes", shape)


def _require_image(name: str, image: np.ndarray | None) -> None:
    if image is None:
        return
    shape = np.shape(image)
    if 0 in shape or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))):
        raise SettingError(name, "be height x width, or height x width x 3", shape, "Leave it out.")
