"""Newton's inner solves are as exact as the forcing term says, relative to the gap alone."""

import pytest
import torch
from boundary_value import MESH, SIZE, bratu, poisson

from equipoise import Newton, Stop, solve


@pytest.mark.parametrize("step", [poisson, bratu])
def test_newton_needs_few_steps_where_plain_iteration_hardly_moves(step) -> None:
    z0 = torch.zeros(2, SIZE, dtype=torch.float64)
    found = solve(step, z0, Newton(), Stop(1e-8, max_steps=50))
    assert found.converged.all()
    assert found.steps.max() <= 8
    assert found.evaluations.max() <= 320
    if step is poisson:
        t = MESH * torch.arange(1, SIZE + 1, dtype=torch.float64)
        torch.testing.assert_close(found.value, (t * (1 - t) / 2).expand(2, -1), rtol=1e-4, atol=0)


def test_newton_solves_a_contraction_of_rate_0_99999() -> None:
    basis = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    rates = torch.linspace(-0.99999, 0.99999, 40, dtype=torch.float64)
    W = basis @ rates.diag() @ basis.T
    c = torch.randn(3, 40, dtype=torch.float64)
    stop = Stop(1e-10, max_steps=50)
    found = solve(lambda z: z @ W.T + c, torch.zeros_like(c), Newton(), stop)
    assert found.converged.all()
    assert found.steps.max() <= 10
    exact = torch.linalg.solve(torch.eye(40, dtype=torch.float64) - W, c.T).T
    torch.testing.assert_close(found.value, exact, rtol=1e-4, atol=0)
