from __future__ import annotations

import pytest
import torch
from cells import TanhCell, bounded
from torch import Tensor

from equipoise import ConvergenceWarning, Equilibrium, frobenius_penalty, spectral_radius


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


# spectral_radius


def radius(A: Tensor, **options: object) -> Tensor:
    z = torch.zeros(3, len(A), dtype=A.dtype)
    return spectral_radius(lambda u: u @ A.T, z, generator=generator(), **options)


def similar(middle: Tensor) -> Tensor:
    """A matrix with the eigenvalues of `middle` and eigenvectors that are not orthogonal."""
    basis = torch.eye(len(middle), dtype=middle.dtype) + 0.3 * bounded(
        len(middle), len(middle), 1.0
    )
    return basis @ middle @ torch.linalg.inv(basis)


MATRICES = {
    "real dominant": lambda: similar(
        torch.diag(torch.tensor([0.9, 0.5, -0.3, 0.1], dtype=torch.float64))
    ),
    "negative dominant": lambda: similar(
        torch.diag(torch.tensor([-0.9, 0.5, -0.3, 0.1], dtype=torch.float64))
    ),
    "opposite pair": lambda: similar(
        torch.diag(torch.tensor([0.9, -0.9, 0.3, 0.1], dtype=torch.float64))
    ),
    "complex pair": lambda: similar(
        torch.block_diag(
            torch.tensor([[0.3, -0.8], [0.8, 0.3]], dtype=torch.float64),
            torch.tensor([[0.5]], dtype=torch.float64),
        )
    ),
    "imaginary pair": lambda: similar(
        torch.block_diag(
            torch.tensor([[0.0, -0.9], [0.9, 0.0]], dtype=torch.float64),
            torch.tensor([[0.2]], dtype=torch.float64),
        )
    ),
    "larger than one": lambda: similar(
        torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))
    ),
    "multiple of the identity": lambda: 0.7 * torch.eye(4, dtype=torch.float64),
    "one number": lambda: torch.tensor([[-0.6]], dtype=torch.float64),
    "tiny": lambda: 1e-9 * similar(torch.diag(torch.tensor([0.9, 0.5, 0.3], dtype=torch.float64))),
}


@pytest.mark.parametrize("name", MATRICES)
def test_spectral_radius_is_the_largest_modulus(name: str) -> None:
    A = MATRICES[name]()
    exact = torch.linalg.eigvals(A).abs().max()
    torch.testing.assert_close(radius(A), exact.expand(3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_spectral_radius_of_random_matrices(width: int, seed: int) -> None:
    torch.manual_seed(seed)
    A = torch.randn(width, width, dtype=torch.float64)
    exact = torch.linalg.eigvals(A).abs().max()
    torch.testing.assert_close(
        radius(A, tolerance=1e-8, max_steps=3000), exact.expand(3), rtol=2e-3, atol=0
    )


def test_spectral_radius_of_a_nilpotent_and_of_a_zero_jacobian_is_zero() -> None:
    nilpotent = torch.diag(torch.ones(3, dtype=torch.float64), 1)
    assert radius(nilpotent).abs().max() == 0
    assert radius(torch.zeros(4, 4, dtype=torch.float64)).abs().max() == 0
    constant = torch.ones(3, 4)
    assert spectral_radius(lambda _: constant, torch.zeros(3, 4)).abs().max() == 0


def test_spectral_radius_is_that_of_each_sample() -> None:
    rates = torch.tensor([0.0, 0.2, 0.9], dtype=torch.float64)
    found = spectral_radius(lambda u: rates[:, None] * u, torch.zeros(3, 4, dtype=torch.float64))
    torch.testing.assert_close(found, rates, rtol=1e-6, atol=0)


def test_spectral_radius_of_a_layer_is_that_of_its_jacobian() -> None:
    layer = Equilibrium(TanhCell(norm=0.9), tolerance=1e-10)
    x = torch.randn(4, 3, dtype=torch.float64)
    step, z = layer.map(x), layer(x).detach()
    exact = torch.linalg.eigvals(jacobians(step, z)).abs().amax(dim=1)
    found = spectral_radius(step, z, tolerance=1e-8, max_steps=3000, generator=generator())
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)


def test_spectral_radius_of_a_tree_sees_all_of_it() -> None:
    z = (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
    found = spectral_radius(lambda u: (0.3 * u[0], 0.8 * u[1]), z, generator=generator())
    torch.testing.assert_close(found, torch.full((2,), 0.8, dtype=torch.float64), rtol=1e-3, atol=0)


def test_spectral_radius_in_float32_and_for_no_samples() -> None:
    A = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
    torch.testing.assert_close(radius(A), torch.full((3,), 0.9), rtol=1e-4, atol=0)
    assert spectral_radius(lambda u: u @ A.T, torch.zeros(0, 2)).shape == (0,)


def test_spectral_radius_of_a_nonfinite_jacobian_is_not_a_number() -> None:
    with pytest.warns(ConvergenceWarning, match="still changing after 20 products"):
        assert (
            spectral_radius(lambda u: torch.nan * u, torch.zeros(2, 3), max_steps=20).isnan().all()
        )


def test_spectral_radius_refuses_inference_mode() -> None:
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"outside of torch\.inference_mode"),
    ):
        spectral_radius(lambda u: 0.5 * torch.sin(u), torch.zeros(2, 3))
    with torch.no_grad():
        found = spectral_radius(lambda u: 0.5 * torch.sin(u), torch.zeros(2, 3))
    torch.testing.assert_close(found, torch.full((2,), 0.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, True])
def test_spectral_radius_refuses_a_wrong_number_of_steps(max_steps: object) -> None:
    with pytest.raises(
        ValueError, match=r"spectral_radius.max_steps must be a whole number of at least 1; got"
    ):
        spectral_radius(lambda u: u, torch.zeros(3, 4), max_steps=max_steps)
