"""Newton's method where its line search fails."""

import pytest
import torch
from torch import Tensor

from equipoise import Newton, Stop, solve
from equipoise.core.validate import SettingError


def dip(z: Tensor) -> Tensor:
    """A map with its fixed point at 3, whose residual also has a narrow local minimum near 0.5."""
    return z + (3 - z) / 4 * (1 - 0.9 * torch.exp(-40 * (z - 0.5).square()))


def test_newton_leaves_a_local_minimum_of_the_residual_by_plain_steps() -> None:
    """No step along Newton's direction helps there, and after one plain step Newton goes back."""
    start = torch.linspace(0.45, 0.7, 26, dtype=torch.float64)[:, None]
    solution = solve(dip, start, "newton", Stop(tolerance=1e-10, max_steps=100))
    assert solution.converged.all()
    assert torch.allclose(solution.value, torch.full_like(start, 3.0), atol=1e-8)


@pytest.mark.parametrize("inner", ["auto", "dense", "krylov"])
def test_newton_takes_a_plain_step_at_once_where_its_direction_is_not_finite(inner: str) -> None:
    """The derivative of `sqrt(z) / 2 + c` at zero is infinite, and the map itself is fine there."""
    c = torch.tensor([[0.5], [0.0625], [2.0]], dtype=torch.float64)
    solution = solve(
        lambda z, c: z.sqrt() / 2 + c,
        torch.zeros_like(c),
        Newton(inner=inner),
        Stop(tolerance=1e-12, max_steps=20),
        context=c,
        trace=True,
    )
    assert torch.equal(solution.trace.state[1], c)
    assert solution.converged.all()
    root = (1 / 4 + (1 / 16 + c).sqrt()).square()
    torch.testing.assert_close(solution.value, root, rtol=1e-9, atol=0)


@pytest.mark.parametrize("forcing", [0.0, 1.0, -0.1, float("nan"), True, "0.1"])
def test_newton_refuses_a_forcing_outside_of_its_range(forcing: object) -> None:
    with pytest.raises(SettingError, match=r"Newton.forcing must be in \(0, 1\)"):
        Newton(forcing=forcing)  # type: ignore[arg-type]
