import math

import pytest
import torch
from torch import nn

from equipoise.analysis import gradient_descent, gradient_flow, kernel_spectrum, tangent_kernel
from equipoise.core import ConvergenceError


@pytest.fixture
def linear():
    """Gradient flow and descent of least squares have closed forms."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    return model, x, y


def error_after(linear, power):
    """The loss after `power` of the kernel was applied to the first error."""
    model, x, y = linear
    values, vectors = torch.linalg.eigh(x @ x.T)
    error = vectors.T @ (model(x)[:, 0] - y).detach()
    return float((power(values) * error).square().sum() / 2)


def test_flow_is_that_of_the_closed_form(linear):
    path = gradient_flow(*linear, time=2.0, points=4)
    for time, loss in zip(path.time, path.loss, strict=True):
        expected = error_after(linear, lambda values, time=time: (-values * time).exp())
        assert loss == pytest.approx(expected, rel=1e-6)


def test_descent_is_that_of_the_closed_form_and_leaves_the_model_alone(linear):
    before = linear[0].weight.clone()
    path = gradient_descent(*linear, step_size=0.1, steps=7, every=3)
    assert path.time == pytest.approx([0.0, 0.3, 0.6, 0.7])
    assert path.loss[-1] == pytest.approx(error_after(linear, lambda k: (1 - 0.1 * k) ** 7))
    assert torch.equal(linear[0].weight, before)
    assert path.distance[-1] == pytest.approx(float((path.model.weight - before).norm().detach()))


def test_descent_with_short_steps_follows_the_flow(linear):
    flow = gradient_flow(*linear, time=1.0, points=1)
    errors = []
    for steps in (200, 400):
        path = gradient_descent(*linear, step_size=1 / steps, steps=steps, every=steps)
        errors.append(abs(path.loss[-1] - flow.loss[-1]))
    assert errors[1] == pytest.approx(errors[0] / 2, rel=0.05)


def test_pl_constants_lie_between_the_eigenvalues_of_the_kernel(linear):
    model, x, _ = linear
    eigenvalues = kernel_spectrum(tangent_kernel(model, x))
    path = gradient_descent(*linear, step_size=0.05, steps=20)
    assert all(float(eigenvalues[0]) <= one <= float(eigenvalues[-1]) for one in path.pl)
    rate = float(eigenvalues[0])
    flow = gradient_flow(*linear, time=3.0)
    assert flow.worst_ratio(lambda time: flow.loss[0] * math.exp(-2 * rate * time)) <= 1 + 1e-7


def test_measurements_are_kept_by_name(linear):
    path = gradient_descent(
        *linear, step_size=0.1, steps=2, measure=lambda model: {"norm": float(model.weight.norm())}
    )
    assert len(path.further["norm"]) == 3


def test_descent_that_diverges_says_so(linear):
    with pytest.raises(ConvergenceError, match="take a smaller step"):
        gradient_descent(*linear, step_size=1e9, steps=40)


def test_descent_with_targets_of_another_number_is_refused(linear):
    model, x, _ = linear
    with pytest.raises(ValueError, match="must have 3 numbers, as the outputs have; got 2"):
        gradient_descent(model, x, torch.zeros(2), step_size=0.1, steps=1)
