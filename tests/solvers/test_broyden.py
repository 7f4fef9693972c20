"""Broyden's model of the Jacobian stays good when its memory is full and when secants are bad."""

import numpy as np
import pytest
import scipy.optimize
import torch
from boundary_value import SIZE, bratu, poisson
from torch import Tensor

from equipoise import Stop, solve
from equipoise.solvers.broyden import REGULAR, _Secant


@pytest.mark.parametrize("step", [poisson, bratu])
def test_broyden_solves_within_a_hundred_steps_what_it_restarted_on_for_hundreds(step) -> None:
    z0 = torch.zeros(2, SIZE, dtype=torch.float64)
    found = solve(step, z0, "broyden", Stop(1e-8))
    assert found.converged.all()

    def gap(z: np.ndarray) -> np.ndarray:
        state = torch.from_numpy(z)[None]
        return (step(state) - state)[0].numpy()

    # With all its memory and full steps.
    witness = scipy.optimize.broyden1(gap, np.zeros(SIZE), alpha=1, f_tol=1e-10, line_search=None)
    np.testing.assert_allclose(found.value[0].numpy(), witness, rtol=1e-3)


def test_broyden_solves_every_sample_of_a_monotone_network() -> None:
    """`z = relu(W z + c)`, `W = (1 - m) I - A^T A + B - B^T`, whose spectral radius is about 9."""
    generator = torch.Generator().manual_seed(1)
    A, B = (1.5 * torch.randn(64, 64, generator=generator) / 8 for _ in range(2))
    W = -A.T @ A + B - B.T
    U = torch.randn(64, 64, generator=generator) / 8
    b = 0.1 * torch.randn(64, generator=generator)
    c = 3 * torch.rand(1000, 64, generator=generator) @ U.T + b
    found = solve(
        lambda z, c: torch.relu(z @ W.T + c),
        torch.zeros_like(c),
        "broyden",
        Stop(max_steps=300),
        context=c,
    )
    assert found.converged.all()
    assert found.steps.max() <= 150


@pytest.mark.parametrize(("width", "memory"), [(12, 6), (12, 1), (3, 8)])
def test_full_memory_keeps_the_best_approximation_of_half_its_rank(width: int, memory: int) -> None:
    rule = _Secant(memory)
    rule.used = memory
    rule.left, rule.right = torch.randn(2, 2, memory, width, dtype=torch.float64)

    def update() -> Tensor:
        return rule.left[:, : rule.used].mT @ rule.right[:, : rule.used]

    left, singular, right = np.linalg.svd(update().numpy())
    singular[:, memory // 2 :] = 0
    rule._reduce()
    assert rule.used <= memory // 2
    np.testing.assert_allclose(update().numpy(), left * singular[:, None] @ right, atol=1e-12)


def test_sample_that_is_not_finite_does_not_spoil_the_others_memory() -> None:
    bad = torch.tensor([False, True, False])[:, None]

    def step(z: Tensor) -> Tensor:
        # Nobody leaves the batch, so that the second sample stays there with its infinities.
        return torch.where(bad, z * z * 1e200 + 1, poisson(z))

    found = solve(step, torch.zeros(3, SIZE, dtype=torch.float64), "broyden", Stop(1e-8))
    assert found.converged.tolist() == [True, False, True]


@pytest.mark.parametrize("slope", [-1.0, -0.2, -0.05, -1e-30, 0.0, 1e-9, 0.05, 0.5])
def test_update_leaves_the_model_regular(slope: float) -> None:
    """The determinant of the model Jacobian changes by `1 / (1 + v^T H^-1 u)` for the inverse."""
    size = 4.0
    columns = torch.tensor([[slope * size]]), torch.tensor([[size]])
    weight = float(_Secant(5)._weight(*columns))
    # v^T H^-1 u = weight <s, w> = weight (slope + 1) size
    change = 1 / (1 + weight * (slope + 1) * size)
    expected = -slope if abs(slope) >= REGULAR else -REGULAR if slope > 0 else REGULAR
    assert change == pytest.approx(expected, rel=1e-5)
