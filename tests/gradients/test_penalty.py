from __future__ import annotations

import pytest
import torch
from cells import TanhCell, bounded
from torch import Tensor

from equipoise import Equilibrium, frobenius_penalty


def jacobians(step, z: Tensor) -> Tensor:
    """The Jacobian of each sample, row by row."""
    full = torch.autograd.functional.jacobian(step, z)
    return torch.stack([full[i, :, i] for i in range(len(z))])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# frobenius_penalty


def test_frobenius_penalty_averages_to_the_exact_norm() -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    x = torch.randn(5, 3, dtype=torch.float64)
    step, z = layer.map(x), layer(x).detach()
    exact = jacobians(step, z).detach().square().sum(dim=(1, 2)) / 4
    found = frobenius_penalty(step, z, samples=4000, generator=generator())
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0)


def test_frobenius_penalty_of_one_sample_is_a_pulled_back_vector() -> None:
    A = bounded(4, 4, 0.7)
    z = torch.zeros(3, 4, dtype=torch.float64)
    found = frobenius_penalty(lambda u: u @ A.T, z, generator=generator(7))
    v = torch.randn(3, 4, dtype=torch.float64, generator=generator(7))
    torch.testing.assert_close(found, (v @ A).square().sum(dim=1) / 4)


def test_frobenius_penalty_repeats_with_a_generator() -> None:
    A = bounded(4, 4, 0.7)
    z = torch.zeros(3, 4, dtype=torch.float64)
    first, again, other = (
        frobenius_penalty(lambda u: u @ A.T, z, generator=generator(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("samples", [1, 3])
def test_frobenius_penalty_is_differentiable_in_weights_and_state(samples: int) -> None:
    W = bounded(4, 4, 0.7).requires_grad_()
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def penalty(W: Tensor, z: Tensor) -> Tensor:
        return frobenius_penalty(
            lambda u: torch.tanh(u @ W.T), z, samples=samples, generator=generator()
        )

    assert torch.autograd.gradcheck(penalty, (W, z))


def test_frobenius_penalty_reaches_the_weights_through_the_equilibrium() -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def penalty(x: Tensor) -> Tensor:
        return frobenius_penalty(layer.map(x), layer(x), generator=generator())

    assert torch.autograd.gradcheck(penalty, (x,))
    penalty(x).mean().backward()
    assert layer.cell.W.grad.abs().max() > 0


def test_frobenius_penalty_works_without_gradients_recorded() -> None:
    A = bounded(4, 4, 0.7)
    z = torch.zeros(3, 4, dtype=torch.float64)
    with torch.no_grad():
        found = frobenius_penalty(lambda u: u @ A.T, z, generator=generator())
    torch.testing.assert_close(
        found, frobenius_penalty(lambda u: u @ A.T, z, generator=generator())
    )


def test_frobenius_penalty_of_a_tree_counts_all_of_it() -> None:
    z = (torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64))
    found = frobenius_penalty(
        lambda u: (2 * u[0], 3 * u[1]), z, samples=4000, generator=generator()
    )
    torch.testing.assert_close(
        found, torch.full((3,), (4 * 2 + 9 * 5) / 7, dtype=torch.float64), rtol=0.1, atol=0
    )


def test_frobenius_penalty_of_a_constant_step_is_zero() -> None:
    constant = torch.ones(3, 4)
    assert torch.equal(frobenius_penalty(lambda _: constant, torch.zeros(3, 4)), torch.zeros(3))


@pytest.mark.parametrize("samples", [0, -1, 1.5, True])
def test_frobenius_penalty_refuses_a_wrong_number_of_samples(samples: object) -> None:
    with pytest.raises(
        ValueError, match=r"frobenius_penalty.samples must be a whole number of at least 1; got"
    ):
        frobenius_penalty(lambda u: u, torch.zeros(3, 4), samples=samples)
