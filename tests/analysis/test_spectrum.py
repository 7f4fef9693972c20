"""The spectral radius, against all eigenvalues."""

from __future__ import annotations

import math

import pytest
import torch
from cells import TanhCell, bounded
from torch import Tensor

from equipoise import ConvergenceWarning, Equilibrium, spectral_radius


def jacobians(step, z: Tensor) -> Tensor:
    """The Jacobian of each sample, row by row."""
    full = torch.autograd.functional.jacobian(step, z)
    return torch.stack([full[i, :, i] for i in range(len(z))])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def radius(A: Tensor, **options: object) -> Tensor:
    z = torch.zeros(3, len(A), dtype=A.dtype)
    return spectral_radius(lambda u: u @ A.T, z, generator=generator(), **options).value


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
    assert spectral_radius(lambda _: constant, torch.zeros(3, 4)).value.abs().max() == 0


def test_spectral_radius_is_that_of_each_sample() -> None:
    rates = torch.tensor([0.0, 0.2, 0.9], dtype=torch.float64)
    found = spectral_radius(lambda u: rates[:, None] * u, torch.zeros(3, 4, dtype=torch.float64))
    torch.testing.assert_close(found.value, rates, rtol=1e-6, atol=0)


def test_spectral_radius_of_a_layer_is_that_of_its_jacobian() -> None:
    layer = Equilibrium(TanhCell(norm=0.9), tolerance=1e-10)
    x = torch.randn(4, 3, dtype=torch.float64)
    step, z = layer.map(x), layer(x).detach()
    exact = torch.linalg.eigvals(jacobians(step, z)).abs().amax(dim=1)
    found = spectral_radius(step, z, tolerance=1e-8, max_steps=3000, generator=generator())
    torch.testing.assert_close(found.value, exact, rtol=1e-3, atol=0)


def test_spectral_radius_of_a_tree_sees_all_of_it() -> None:
    z = (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64))
    found = spectral_radius(lambda u: (0.3 * u[0], 0.8 * u[1]), z, generator=generator())
    torch.testing.assert_close(
        found.value, torch.full((2,), 0.8, dtype=torch.float64), rtol=1e-3, atol=0
    )


def test_spectral_radius_in_float32_and_for_no_samples() -> None:
    A = torch.tensor([[0.0, -0.9], [0.9, 0.0]])
    torch.testing.assert_close(radius(A), torch.full((3,), 0.9), rtol=1e-4, atol=0)
    assert spectral_radius(lambda u: u @ A.T, torch.zeros(0, 2)).value.shape == (0,)


@pytest.mark.parametrize("width", [3, 600])
def test_spectral_radius_of_a_nonfinite_jacobian_is_not_a_number(width: int) -> None:
    scale = torch.tensor([[torch.nan], [0.5]])
    with pytest.warns(ConvergenceWarning, match="1 of 2 samples did not settle in 512 products"):
        found = spectral_radius(lambda u: scale * u, torch.zeros(2, width))
    assert found.value[0].isnan()
    assert found.settled.tolist() == [False, True]
    torch.testing.assert_close(found.value[1], torch.tensor(0.5), rtol=1e-3, atol=0)


def test_spectral_radius_refuses_inference_mode() -> None:
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"outside of torch\.inference_mode"),
    ):
        spectral_radius(lambda u: 0.5 * torch.sin(u), torch.zeros(2, 3))
    with torch.no_grad():
        found = spectral_radius(lambda u: 0.5 * torch.sin(u), torch.zeros(2, 3))
    torch.testing.assert_close(found.value, torch.full((2,), 0.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("max_steps", [0, -1, 2.5, True])
def test_spectral_radius_refuses_a_wrong_number_of_steps(max_steps: object) -> None:
    with pytest.raises(
        ValueError, match=r"spectral_radius.max_steps must be a whole number of at least 1; got"
    ):
        spectral_radius(lambda u: u, torch.zeros(3, 4), max_steps=max_steps)


def orthogonal(width: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]


def rotations(width: int) -> Tensor:
    """A normal matrix with random pairs of complex eigenvalues in the unit disc."""
    sizes, angles = torch.rand(width // 2).tolist(), (6.3 * torch.rand(width // 2)).tolist()
    blocks = [
        size * torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
        for size, a in zip(sizes, angles, strict=True)
    ]
    basis = orthogonal(width)
    return basis @ torch.block_diag(*blocks).double() @ basis.T


def gaussian(width: int) -> Tensor:
    return torch.randn(width, width, dtype=torch.float64) / width**0.5


KINDS = {
    "isometry": lambda width: 1.3 * orthogonal(width),
    "normal": rotations,
    "gaussian": gaussian,
    "nearly nilpotent": lambda width: gaussian(width).triu(1) + 1e-3 * gaussian(width),
    "block": lambda width: torch.block_diag(gaussian(width // 2), 0.7 * orthogonal(width // 2)),
}


@pytest.mark.parametrize("width", [20, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_spectral_radius_is_right_to_a_percent_by_default(kind: str, width: int) -> None:
    matrices = torch.stack([KINDS[kind](width) for _ in range(200)])
    exact = torch.linalg.eigvals(matrices).abs().amax(dim=1)
    z = torch.zeros(200, width, dtype=torch.float64)
    found = spectral_radius(lambda u: torch.einsum("bij,bj->bi", matrices, u), z)
    assert found.settled.all()
    torch.testing.assert_close(found.value, exact, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", ["isometry", "normal", "gaussian", "block"])
def test_spectral_radius_of_long_states_is_right_to_a_percent_or_says_so(kind: str) -> None:
    matrices = torch.stack([KINDS[kind](600) for _ in range(3)])
    exact = torch.linalg.eigvals(matrices).abs().amax(dim=1)
    z = torch.zeros(3, 600, dtype=torch.float64)
    found = spectral_radius(lambda u: torch.einsum("bij,bj->bi", matrices, u), z)
    assert found.settled.all()
    torch.testing.assert_close(found.value, exact, rtol=1e-2, atol=0)


def test_spectral_radius_that_did_not_settle_says_so() -> None:
    A = 1.3 * orthogonal(600)
    with pytest.warns(ConvergenceWarning, match="1 of 1 samples did not settle in 20 products"):
        found = spectral_radius(
            lambda u: u @ A.T, torch.zeros(1, 600, dtype=torch.float64), max_steps=20
        )
    assert not found.settled.any()
    assert (found.error > 3e-3).all()
