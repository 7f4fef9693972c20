"""HSIC over the positions of images, by a few frequencies in place of pairs of observations."""

import pytest
import torch

from equipoise.prox import HSIC


def pairs(z: torch.Tensor, bandwidth: float) -> torch.Tensor:
    """Return the exact criterion of two features over all observations, by their kernels."""
    first, second = (
        torch.exp(-(row[:, None] - row).square() / (2 * bandwidth**2))
        for row in z.transpose(0, 1).flatten(1)
    )
    first = first - first.mean(dim=0)
    second = second - second.mean(dim=0)
    return (first * second.mT).sum() / (len(first) - 1) ** 2


@pytest.mark.parametrize("bandwidth", [0.7, 3.0])
@pytest.mark.parametrize("reach", [0.1, 3.0, 11.5])
def test_many_observations_are_judged_as_by_all_their_pairs(bandwidth: float, reach: float) -> None:
    torch.manual_seed(0)
    values = torch.rand(4, 2, 12, 12, dtype=torch.float64) * reach * bandwidth
    z = torch.cat([values[:, :1], values.mean(dim=1, keepdim=True)], dim=1).requires_grad_()
    exact = pairs(z, bandwidth)
    value = HSIC(bandwidth).value(z)
    assert value.item() == pytest.approx(exact.item(), rel=2e-3)
    (wanted,) = torch.autograd.grad(exact, z)
    assert (HSIC(bandwidth).gradient(z.detach()) - wanted).norm() < 5e-3 * wanted.norm()


def test_few_observations_are_judged_exactly() -> None:
    torch.manual_seed(0)
    z = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    assert float(HSIC().value(z)) == pytest.approx(float(pairs(z, 1.0)), rel=1e-12)


def test_the_number_of_observations_decides_by_default() -> None:
    few, many = torch.randn(4, 3, 8, 16), torch.randn(27, 3, 19)
    exact = HSIC()._exact(few.transpose(0, 1).flatten(1)) / 511**2
    assert torch.equal(HSIC().value(few), exact)
    inexact = HSIC()._by_frequencies(many.transpose(0, 1).flatten(1)) / 512**2
    assert torch.equal(HSIC().value(many), inexact)
