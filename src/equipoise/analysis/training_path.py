"""Full-batch training on the square loss, as the convergence theorems speak of it, measured.

`L(theta) = |f(x) - y|^2/2`. Gradient descent is `theta <- theta - eta dL`, gradient flow
`d theta/dt = -dL`, integrated by a Runge-Kutta method of high order with an error estimate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.integrate import solve_ivp  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from equipoise.analysis.check import largest
from equipoise.core.errors import ConvergenceError
from equipoise.core.validate import SettingError, require_count, require_positive

__all__ = ["TrainingPath", "gradient_descent", "gradient_flow"]

MAX_EVALUATIONS = 1000
"""Gradients after which an integration is given up, whose noise is above its tolerance."""

Measure = Callable[[nn.Module], Mapping[str, float]]


@dataclass
class TrainingPath:
    """What was measured on the way.

    Attributes:
        time: Steps times the step size, or the time of the flow.
        loss: `L`.
        gradient: `|dL|`.
        distance: `|theta - theta(0)|`, the distance travelled from the start.
        further: Whatever else was asked for, by name.
        model: A copy of the model with the weights at the end.
    """

    model: nn.Module
    time: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)
    further: dict[str, list[float]] = field(default_factory=dict)

    @property
    def pl(self) -> list[float]:
        """The PL* constants `|dL|^2/(2 L)` along the path (Liu et al., 2022)."""
        pairs = zip(self.gradient, self.loss, strict=True)
        return [size**2 / (2 * loss) if loss > 0 else math.inf for size, loss in pairs]

    def worst_ratio(self, bound: Callable[[float], float]) -> float:
        """Return the largest `L(t)/bound(t)` after the start; at most 1 if a bound holds.

        Args:
            bound: A bound of the loss at a time.
        """
        pairs = list(zip(self.time, self.loss, strict=True))
        return largest(*(loss / bound(time) for time, loss in pairs[1:]))

    def add(self, time: float, measured: Mapping[str, float]) -> None:
        """Add one point; whatever is beyond loss, gradient and distance goes to `further`."""
        self.time.append(time)
        for name, value in measured.items():
            if name in ("loss", "gradient", "distance"):
                getattr(self, name).append(float(value))
            else:
                self.further.setdefault(name, []).append(float(value))


class _Problem:
    """The loss as a function of all trainable parameters as one vector."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, measure: Measure | None) -> None:
        self.model = copy.deepcopy(model)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.x, self.y, self.measure = x, y, measure
        self.start = parameters_to_vector(self.parameters).detach()

    def gradient(self, theta: Tensor) -> tuple[float, Tensor]:
        vector_to_parameters(theta, self.parameters)
        with torch.enable_grad():
            output = self.model(self.x)
            if output.numel() != self.y.numel():
                raise SettingError(
                    "gradient_descent.y",
                    f"have {output.numel()} numbers, as the outputs have",
                    self.y,
                    got=f"{self.y.numel()}",
                )
            loss = (output.reshape(-1) - self.y.reshape(-1)).square().sum() / 2
            found = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        return float(loss.detach()), parameters_to_vector(found)

    def record(self, path: TrainingPath, time: float, theta: Tensor) -> Tensor:
        """Measure at a point, and return the gradient there."""
        loss, gradient = self.gradient(theta)
        if not math.isfinite(loss):
            raise ConvergenceError(f"the loss is {loss} at time {time:.4g}: take a smaller step.")
        with torch.no_grad():
            further = self.measure(self.model) if self.measure else {}
        path.add(
            time,
            {
                "loss": loss,
                "gradient": float(gradient.norm()),
                "distance": float((theta - self.start).norm()),
                **further,
            },
        )
        return gradient


def gradient_descent(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    step_size: float,
    steps: int,
    every: int = 1,
    measure: Measure | None = None,
) -> TrainingPath:
    """Train a copy of a model by full-batch gradient descent on `|f(x) - y|^2/2`.

    Args:
        model: The model, which stays as it is.
        x: Samples.
        y: Targets, as many numbers as there are outputs.
        step_size: `eta`.
        steps: How many.
        every: Steps between two measurements; the last is always measured.
        measure: Measures what else is wanted of the model at its present weights.
    """
    require_positive("gradient_descent.step_size", step_size)
    require_count("gradient_descent.steps", steps)
    require_count("gradient_descent.every", every)
    problem = _Problem(model, x, y, measure)
    path = TrainingPath(problem.model)
    theta = problem.start.clone()
    for step in range(steps + 1):
        if step % every and step < steps:
            _, gradient = problem.gradient(theta)
        else:
            gradient = problem.record(path, step * step_size, theta)
        if step < steps:
            theta = theta - step_size * gradient
    return path


def gradient_flow(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    time: float,
    points: int = 20,
    tolerance: float = 1e-8,
    measure: Measure | None = None,
) -> TrainingPath:
    """Follow the gradient flow of `|f(x) - y|^2/2` from a model's weights.

    Args:
        model: The model, which stays as it is; in float64 unless a rough path will do.
        x: Samples.
        y: Targets, as many numbers as there are outputs.
        time: How long.
        points: Measurements after the one at the start, at equal distances.
        tolerance: Relative error of the integration (SciPy's RK45).
        measure: Measures what else is wanted of the model at its present weights.
    """
    require_positive("gradient_flow.time", time)
    require_count("gradient_flow.points", points)
    require_positive("gradient_flow.tolerance", tolerance)
    problem = _Problem(model, x, y, measure)
    start = problem.start

    evaluations = 0

    def slope(_time: float, theta: np.ndarray) -> np.ndarray:
        nonlocal evaluations
        evaluations += 1
        if evaluations > MAX_EVALUATIONS:
            raise ConvergenceError(
                f"gradient_flow did not end after {MAX_EVALUATIONS} gradients: loosen tolerance, "
                "shorten time, or solve equilibria more accurately."
            )
        _, gradient = problem.gradient(torch.from_numpy(theta).to(start))
        return -gradient.double().cpu().numpy()

    times = np.linspace(0, time, points + 1)
    begin = start.double().cpu().numpy()
    # Absolute errors relative to the path, which is short, and not to the weights.
    size = float(np.linalg.norm(slope(0.0, begin))) * time / math.sqrt(len(begin))
    solved = solve_ivp(
        slope, (0, time), begin, t_eval=times, rtol=tolerance, atol=max(tolerance * size, 1e-300)
    )
    if not solved.success:
        raise ConvergenceError(f"gradient_flow could not be integrated: {solved.message}")
    path = TrainingPath(problem.model)
    for when, theta in zip(times, solved.y.T, strict=True):
        problem.record(path, float(when), torch.from_numpy(theta.copy()).to(start))
    return path
