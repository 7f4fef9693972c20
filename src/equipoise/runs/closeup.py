"""Single samples looked at closely, for the page of a run: their solves, and what is predicted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from equipoise.analysis import certify, objective
from equipoise.core import ConvergenceWarning, stop_if_requested, to_percent
from equipoise.data import Dataset, Transform
from equipoise.engine import Task
from equipoise.engine.settings import Precision
from equipoise.engine.tasks import LabelAnswer, NumberAnswer
from equipoise.engine.tasks.task import to_full_precision
from equipoise.layers import Equilibrium
from equipoise.models import find_equilibria
from equipoise.report import ShownSample, SolvePath
from equipoise.solvers import Solution
from equipoise.solvers.policy import Direction

__all__ = ["Trained", "find_layer_inputs", "show_samples", "to_pixels", "trace_solves"]

EXACT = 1e-6  # to what the solve on the page is made, so that its path can be seen
MAX_SIDE = 512  # pixels of an image on the page, at most
MAX_NAMED_NUMBERS = 4  # numbers of a regression that are named


@dataclass(frozen=True)
class Trained:
    """A trained model, and how it is scored.

    Attributes:
        model: The model, in evaluation mode.
        task: What it was trained for.
        classes: Names of the classes.
        transform: What is done to each batch that is scored.
        batch: Samples in each batch that is scored.
        precision: Of what autocast may run lower than float32.
    """

    model: nn.Module
    task: Task
    classes: Sequence[str]
    transform: Transform | None = None
    batch: int = 256
    precision: Precision = "float32"

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        weight = next(self.model.parameters(), None)
        return torch.device("cpu") if weight is None else weight.device

    def prepare(self, x: Tensor, target: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return samples as the model sees them, and their targets.

        Args:
            x: The samples as they are in the data.
            target: Their targets.
            seed: For what the transform draws.
        """
        if self.transform is not None:
            x, target = self.transform(x, target, generator=torch.Generator().manual_seed(seed))
        return x.to(self.device), target

    def sample(self, samples: Dataset, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of one sample as the model sees it, and its target.

        Args:
            samples: Where it is.
            number: Its position.
        """
        return self.prepare(*samples.gather([number], replace_bad=True), number)


def trace_solves(trained: Trained, samples: Dataset) -> list[SolvePath]:
    """Return each equilibrium of the first sample, solved by plain steps and more exactly.

    Args:
        trained: The model.
        samples: The samples.
    """
    x, target = trained.sample(samples, 0)
    raw, _ = samples.gather([0], replace_bad=True)
    inputs, own, output = _run(trained.model, x)
    truth, prediction = _name(trained, output, target)
    return [
        replace(
            _solve(layer, features),
            image=to_pixels(raw[0]),
            name=name if len(inputs) > 1 else "",
            truth=truth,
            prediction=prediction,
            solver=f"fixed_point, down to a residual of {EXACT:g}",
            own_solve=_describe(own.get(name)),
        )
        for name, (layer, features) in inputs.items()
    ]


def _run(
    model: nn.Module, x: Tensor
) -> tuple[dict[str, tuple[Equilibrium, Tensor]], dict[str, Solution], Tensor]:
    """What each equilibrium layer is given when the model gets `x`, its solve, and the output."""
    found: dict[str, tuple[Equilibrium, Tensor]] = {}
    solved: dict[str, Solution] = {}

    def listen(name: str, layer: Equilibrium, stack: ExitStack) -> None:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            found.setdefault(name, (layer, inputs[0]))

        def note(direction: Direction, solution: Solution) -> None:
            if direction == "forward":
                solved.setdefault(name, solution)

        handle: RemovableHandle = layer.register_forward_pre_hook(keep)
        stack.callback(handle.remove)
        stack.enter_context(layer.solves.listening(note))

    with ExitStack() as stack, torch.no_grad():
        for name, layer in find_equilibria(model).items():
            listen(name, layer, stack)
        return found, solved, model(x)


def find_layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return what each equilibrium layer is given when a model gets `x`, by its name.

    Args:
        model: The model.
        x: Samples, as the model sees them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # only their inputs are wanted
        return {name: given for name, (_, given) in _run(model, x)[0].items()}


def _name(trained: Trained, output: Tensor, target: Tensor) -> tuple[str, str]:
    """What is true of the first sample and what the model says, in words; empty for masks."""
    if not issubclass(trained.task.answer_type, LabelAnswer | NumberAnswer):
        return "", ""
    answer = trained.task.answer(to_full_precision(output).cpu(), trained.classes)[0]
    if isinstance(answer, LabelAnswer):
        prediction = f"{answer.label} ({to_percent(answer.probability, 1)} %)"
        return trained.classes[int(target[0])], prediction
    if isinstance(answer, NumberAnswer):
        numbers = (target[0].reshape(-1).tolist(), answer.values)
        truth, prediction = (
            ", ".join(f"{value:.4g}" for value in values[:MAX_NAMED_NUMBERS]) for values in numbers
        )
        return truth, prediction
    return "", ""


def _describe(solution: Solution | None) -> str:
    """How the model itself solved a sample."""
    if solution is None or solution.solver is None or not solution.steps.numel():
        return ""
    steps = int(solution.steps.max())
    count = f"{steps} step{'' if steps == 1 else 's'}"
    return (
        f"The model itself takes {count} of {solution.solver}, to a residual of "
        f"{float(solution.residual.max()):.1e} (tolerance {solution.stop.tolerance:g})."
    )


def _solve(layer: Equilibrium, features: Tensor) -> SolvePath:
    stop_if_requested()
    exact = Equilibrium(
        layer.cell, "fixed_point", tolerance=EXACT, max_steps=500, on_failure="ignore"
    )
    with torch.no_grad():
        exact(features, trace=True)
    assert exact.last is not None
    assert exact.last.trace is not None
    value: list[float] | None = None
    try:
        problem = objective(exact, features)
        description = problem.describe()
        descent = problem.descent(exact.last.trace)
        if descent is not None:
            path = descent.value[:, 0]
            value = (path[:-1] - path[-1]).tolist()  # the last counts as the minimum
    except ValueError as error:  # layers that solve no problem that one can write down say so
        description = str(error)
    try:
        found = certify(layer, strict=False)
        certificate = str(found) if found.holds else f"{found}\n{found.remedy}".strip()
    except (ValueError, ArithmeticError) as error:  # weights that are not finite
        certificate = str(error)
    return SolvePath(exact.last.trace.residual[:, 0].tolist(), value, description, certificate)


def show_samples(trained: Trained, samples: Dataset) -> list[ShownSample]:
    """Return the samples that the task shows: what the model saw, and what it made of that.

    Args:
        trained: The model.
        samples: The samples.
    """
    count = min(trained.task.shown_samples, len(samples))
    shown = []
    for number in range(0, len(samples), len(samples) // count)[:count] if count else ():
        stop_if_requested()
        x, target = trained.sample(samples, number)
        with torch.no_grad():
            output = trained.model(x).cpu()
        panels = trained.task.illustrate(output[0], target[0])
        if x.dim() == 4 and panels:
            size = next(iter(panels.values())).shape[-2:]
            seen = nn.functional.interpolate(x.cpu().float(), tuple(size))[0]
            panels = {trained.task.input_caption: seen, **panels}
        found = {name: _panel(panel) for name, panel in panels.items()}
        if found and all(panel is not None for panel in found.values()):
            shown.append(ShownSample({k: v for k, v in found.items() if v is not None}))
    return shown


def _panel(values: Tensor) -> np.ndarray[Any, Any] | None:
    """A mask, or an image in colour, thinned to what a page can show; None if it is neither."""
    every = -(-max(values.shape[-2:]) // MAX_SIDE) if values.dim() >= 2 else 1
    if values.dim() == 2:
        return values.numpy()[::every, ::every]
    image = to_pixels(values)
    if image is None:
        return None
    image = image if image.ndim == 3 else image[..., None]
    return np.broadcast_to(image, (*image.shape[:2], 3))[::every, ::every]


def to_pixels(x: Tensor) -> np.ndarray[Any, Any] | None:
    """Return a sample as height x width (x 3), if it is an image.

    Args:
        x: The sample.
    """
    if x.dim() != 3 or x.shape[0] not in (1, 3):
        return None
    pixels = x.permute(1, 2, 0).numpy()
    return np.ascontiguousarray(pixels[..., 0] if x.shape[0] == 1 else pixels)
