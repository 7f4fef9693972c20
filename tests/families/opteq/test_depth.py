"""All layers of a deep OptEq count: orthogonal weights, drawn and kept."""

import pytest
import torch
from torch import nn

import equipoise
from equipoise import OptEq, OptEqConv2d
from equipoise.layers import project_norms, project_norms_after


def first_share(layer, x):
    """The gradient of the first layer's weights, relative to that of the last one's."""
    layer(x).square().sum().backward()
    norms = [operator.weights()[0].grad.norm() for operator in layer.layers.operators]
    return float(norms[0] / norms[-1])


def test_orthogonal_weights_let_gradients_reach_the_first_layer():
    torch.manual_seed(0)
    x = torch.randn(4, 12, 8, 8)
    shares = {}
    for init in ("small", "orthogonal"):
        layer = OptEqConv2d(12, 12, [16] * 5, init=init, tolerance=1e-5)
        shares[init] = first_share(layer, x)
    assert shares["small"] < 0.01
    assert shares["orthogonal"] > 10 * shares["small"]


@pytest.mark.parametrize("norm", ["none", "scale", "project", "orthogonal"])
def test_orthogonal_start_is_as_large_as_the_bound_allows(norm):
    layer = OptEqConv2d(3, 4, [6, 3], norm=norm, bound=0.8, init="orthogonal")
    for bound in layer.cell.norms().values():
        assert bound == pytest.approx(0.8, rel=1e-5)
    scaled = OptEq(3, 4, [6, 3], "tanh", norm=norm, bound=0.8, mu=4.0, init="orthogonal")
    for operator in scaled.layers.operators:
        values = torch.linalg.svdvals(operator.weight)
        assert torch.allclose(values, torch.full_like(values, 1.6), rtol=1e-5)


def test_automatic_start_goes_with_the_norm():
    torch.manual_seed(0)
    assert OptEq(30, 40, 50).cell.norms()["1"] < 0.7
    assert OptEq(30, 40, 50, norm="orthogonal").cell.norms()["1"] == pytest.approx(0.99, rel=1e-5)
    small = OptEq(30, 40, 50, norm="orthogonal", init="small")
    assert small.cell.norms()["1"] < 0.7


def test_small_start_is_what_it_was():
    torch.manual_seed(0)
    first = OptEq(3, 4, 5).layers.operators[0].weight
    torch.manual_seed(0)
    assert torch.equal(first, OptEq(3, 4, 5, init="small").layers.operators[0].weight)


def test_orthogonal_norm_keeps_singular_values_up_through_an_optimizer():
    torch.manual_seed(0)
    layer = OptEq(6, 6, [4, 9], norm="orthogonal", bound=0.9)
    model = nn.Sequential(layer, nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    project_norms_after(optimizer, model)
    x = torch.randn(8, 6)
    before = [operator.weight.detach().clone() for operator in layer.layers.operators]
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    for operator, old in zip(layer.layers.operators, before, strict=True):
        values = torch.linalg.svdvals(operator.weight.double())
        assert torch.allclose(values, torch.full_like(values, 0.9), rtol=1e-6)
        assert (operator.weight - old).norm() > 0.1
    certificate = equipoise.certify(layer)
    assert certificate.lipschitz <= (0.8 * 0.81 + 0.2) ** 2 + 1e-7
    (statement,) = certificate.further
    assert statement.holds
    assert 0.8998 < statement.number <= 0.9
    assert "bounded from below: proved, 0.89" in str(certificate)


def test_pooled_layers_promise_nothing_of_what_they_do_not_see():
    torch.manual_seed(0)
    layer = OptEqConv2d(3, 3, [6, 4], pool=[1, 2], padding="circular", norm="orthogonal").double()
    project_norms(layer)
    (statement,) = layer.cell.certificate().further
    assert "constant on the fields that are pooled" in statement.claim
    operator = layer.layers.operators[1]
    constant = torch.randn(5, 3, 6, 6).double().repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert (norms(operator(constant)) >= statement.number * norms(constant)).all()
    unseen = constant.clone()
    unseen[:, :, :, 1::2] *= -1
    assert norms(operator(unseen)).max() <= 1e-12


def norms(z):
    return z.flatten(1).norm(dim=1)


def test_certificate_does_not_claim_what_is_not_proved():
    layer = OptEqConv2d(3, 4, [6, 3], norm="orthogonal")
    layer.layers.operators[1].scale_(0)
    (statement,) = layer.cell.certificate().further
    assert statement.holds is None
    assert statement.number is None
    assert OptEqConv2d(3, 4, 6, norm="project").cell.certificate().further == ()


def test_small_kernels_become_orthogonal_when_projected():
    torch.manual_seed(0)
    layer = OptEqConv2d(6, 6, [4, 8], norm="orthogonal", init="small")
    project_norms(layer)
    (statement,) = layer.cell.certificate().further
    assert statement.number > 0.75
    assert max(layer.cell.norms().values()) <= 0.99 * (1 + 1e-6)


def test_mistyped_start_is_told_in_one_sentence():
    with pytest.raises(
        ValueError,
        match=r"^OptEq.init must be one of auto, orthogonal, small; got 'ortogonal'\. Did you mean "
        r"'orthogonal'\?$",
    ):
        OptEqConv2d(3, 4, 5, init="ortogonal")
