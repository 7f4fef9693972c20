"""HSIC over the positions of images, by a few frequencies in place of pairs of observations."""

import pytest
import torch

from equipoise.prox import HSIC, Decorrelation


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
@pytest.mark.parametrize("reach", [0.1, 3.0, 11.5, 16.0, 31.4, 60.0, 94.0])
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


@pytest.mark.parametrize(("observations", "exact"), [(512, True), (513, False)])
def test_the_number_of_observations_decides(observations: int, exact: bool) -> None:
    torch.manual_seed(0)
    z = torch.randn(observations, 2, dtype=torch.float64)
    value, wanted = float(HSIC().value(z)), float(pairs(z, 1.0))
    assert (value == pytest.approx(wanted, rel=1e-12)) is exact
    assert value == pytest.approx(wanted, rel=2e-3)


def test_features_that_lie_where_a_few_frequencies_would_repeat_are_not_independent() -> None:
    apart = torch.tensor([0.0, 31.4159265]).repeat(300)[:, None].repeat(1, 2)
    assert float(HSIC().value(apart)) == pytest.approx(float(pairs(apart, 1.0)), rel=1e-3)


def test_values_too_far_apart_are_judged_by_random_frequencies_and_told() -> None:
    torch.manual_seed(0)
    far = torch.rand(600, 2, dtype=torch.float64) * 1000
    with pytest.warns(UserWarning, match=r"lie up to \d+ bandwidths apart.*Raise HSIC.bandwidth"):
        value = HSIC().value(far)
    assert torch.equal(value, HSIC(features=64).value(far))


def test_an_offset_does_not_matter() -> None:
    torch.manual_seed(0)
    z = torch.randint(-300, 300, (600, 2)) / 64  # so that the sum is not rounded
    assert torch.allclose(HSIC().gradient(z + 16384), HSIC().gradient(z), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("samples", [300, 600])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_judged_in_float32(samples: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    z = torch.randn(samples, 8).to(dtype)
    value = HSIC().value(z)
    assert torch.equal(value, HSIC().value(z.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(HSIC().value(z.float()), value)
    assert HSIC().gradient(z).dtype == dtype


def test_states_that_are_not_real_are_refused() -> None:
    for odd in (torch.ones(600, 3, dtype=torch.int64), torch.ones(600, 3, dtype=torch.complex64)):
        for regularizer in (HSIC(), Decorrelation()):
            with pytest.raises(ValueError, match="real floating-point numbers; got torch"):
                regularizer.value(odd)


def test_a_state_that_is_not_finite_has_no_number() -> None:
    for odd in (float("nan"), float("inf")):
        z = torch.randn(600, 2)
        z[3, 1] = odd
        assert HSIC().value(z).isnan()
        assert HSIC().gradient(z).isnan().any()


def test_second_derivatives_over_many_observations() -> None:
    torch.manual_seed(0)
    z = torch.randn(540, 2, dtype=torch.float64)
    u, v = torch.randn_like(z), torch.randn_like(z)
    _, turned = torch.func.jvp(HSIC().gradient, (z,), (u,))
    _, other = torch.func.jvp(HSIC().gradient, (z,), (v,))
    assert float((turned * v).sum()) == pytest.approx(float((other * u).sum()), rel=1e-9)
    step = 1e-5
    slope = (HSIC().gradient(z + step * u) - HSIC().gradient(z - step * u)) / (2 * step)
    assert (turned - slope).norm() < 1e-6 * slope.norm()
