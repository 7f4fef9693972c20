"""Well-posed implicit networks: proven bounds, projections, scaling and refusals."""

from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, root

from equipoise import FixedPoint, certify, create_model, project_norms
from equipoise.families.well_posed import (
    Condition,
    WellPosed,
    perron_bound,
    project_rows,
    to_infinity_norm,
)

FLOAT = torch.float64
CONTROLLED = list(product(get_args(Condition), ("scale", "project")))


def make(condition="infinity", norm="scale", size=1.0, seed=0, features=6, **options):
    torch.manual_seed(seed)
    options = {"tolerance": 1e-12, "max_steps": 2000, "on_failure": "raise", **options}
    layer = WellPosed(3, features, 0.9, condition, norm, **options).double()
    with torch.no_grad():
        layer.cell.A.mul_(size)
        if layer.cell.d is not None:
            layer.cell.d.copy_(torch.randn(features))
    return layer


def row_sum(layer):
    return float(layer.cell.matrix().detach().abs().sum(dim=1).max())


def eigenvalue(A):
    return np.abs(np.linalg.eigvals(np.abs(A.detach().numpy()))).max()


def test_perron_bound_is_above_the_eigenvalue_and_tight():
    torch.manual_seed(0)
    matrices = [torch.randn(7, 7, dtype=FLOAT) * 10.0**k for k in range(-3, 4)]
    matrices += [m * (torch.rand(7, 7) < 0.3) for m in matrices]  # some of them reducible
    for A in matrices:
        bound, v = perron_bound(A)
        exact = eigenvalue(A)
        assert bool((v > 0).all())
        assert exact * (1 - 1e-12) <= bound <= exact * (1 + 1e-2) + 1e-2 * float(A.abs().max())


def test_perron_bound_of_a_feed_forward_network_is_next_to_zero():
    A = torch.triu(torch.full((5, 5), 3.0, dtype=FLOAT), diagonal=1)
    assert float(A.abs().sum(dim=1).max()) == 12
    assert 0 < perron_bound(A)[0] < 0.1


def test_perron_bound_of_what_is_not_finite_is_infinite():
    assert perron_bound(torch.tensor([[0.5, float("nan")], [0.0, 0.5]]))[0] == float("inf")


@pytest.mark.parametrize("weighted", [False, True])
def test_projected_rows_are_those_of_scipy(weighted):
    torch.manual_seed(1)
    A = torch.randn(4, 5, dtype=FLOAT)
    A[3] *= 0.01  # a row that is inside already
    w = torch.rand(5, dtype=FLOAT) + 0.2 if weighted else torch.ones(5, dtype=FLOAT)
    found = project_rows(A, 0.7, w if weighted else None)
    assert torch.equal(found[3], A[3])
    for a, own in zip(A.numpy(), found.numpy(), strict=True):
        # In nonnegative parts, a = p - q, where the l1 norm is linear.
        best = minimize(
            lambda t, a=a: ((t[:5] - t[5:] - a) ** 2).sum(),
            np.full(10, 0.01),
            bounds=[(0, None)] * 10,
            constraints={
                "type": "ineq",
                "fun": lambda t: 0.7 - (w.numpy() * (t[:5] + t[5:])).sum(),
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        ).x
        np.testing.assert_allclose(own, best[:5] - best[5:], atol=1e-5)


def test_projected_rows_of_huge_entries_keep_the_largest():
    A = torch.tensor([[1e30, -3e30, 2e30], [-4e30, 4e30, 0.0]], dtype=FLOAT)
    expected = torch.tensor([[0.0, -0.8, 0.0], [-0.4, 0.4, 0.0]], dtype=FLOAT)
    torch.testing.assert_close(project_rows(A, 0.8), expected)


@pytest.mark.parametrize(("condition", "norm"), CONTROLLED)
def test_bound_holds_for_weights_of_any_size_and_every_input_has_one_equilibrium(condition, norm):
    layer = make(condition, norm, size=50.0)
    if norm == "project":
        assert not layer.cell.certificate().holds
        project_norms(layer)
    certificate = certify(layer)
    assert certificate.holds
    (bound,) = (s.number for s in certificate.statements if "Perron-Frobenius" in s.claim)
    assert eigenvalue(layer.cell.matrix()) <= bound <= 0.9 + 1e-9
    if condition == "perron-frobenius":  # more matrices than those of small row sums
        assert row_sum(layer) > 1
    x = torch.randn(4, 3, dtype=FLOAT)
    z = layer(x).detach()
    A, c = layer.cell.matrix().detach().numpy(), layer.cell.inputs(x).detach().numpy()
    for own, inject in zip(z.numpy(), c, strict=True):
        found = root(lambda s, c=inject: np.maximum(A @ s + c, 0) - s, np.zeros(6), method="hybr")
        np.testing.assert_allclose(own, found.x, atol=1e-7)
    plain = layer(x, torch.randn(4, 6, dtype=FLOAT), solver=FixedPoint())
    torch.testing.assert_close(plain, z, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("condition", "norm"), CONTROLLED)
def test_equilibrium_moves_no_more_than_the_certificate_says(condition, norm):
    layer = make(condition, norm, size=20.0, seed=3)
    if norm == "project":
        project_norms(layer)
    (bound,) = (s.number for s in certify(layer).statements if "Lipschitz continuous" in s.claim)
    x = torch.randn(2, 50, 3, dtype=FLOAT)
    with torch.no_grad():
        moved = (layer(x[0]) - layer(x[1])).abs().amax(dim=1)
    assert bool((moved <= bound * (x[0] - x[1]).abs().amax(dim=1)).all())


@pytest.mark.parametrize("condition", get_args(Condition))
def test_bound_of_the_movement_is_that_of_a_network_of_positive_weights(condition):
    layer = make(condition, size=20.0, seed=3, activation="identity")
    with torch.no_grad():
        layer.cell.A.abs_()
        layer.cell.inputs.weight.abs_()
        (bound,) = (s.number for s in certify(layer).statements if "Lipschitz" in s.claim)
        x = torch.ones(1, 3, dtype=FLOAT)  # the direction in which such a network moves most
        moved = float((layer(x) - layer(-x)).abs().max()) / 2
    assert moved <= bound * (1 + 1e-9)
    assert bound <= moved * (1 + 1e-9)


def test_float32_weights_are_certified_however_close_kappa_is_to_one():
    torch.manual_seed(0)
    for condition, norm in CONTROLLED:
        cell = WellPosed(3, 40, 0.9999999, condition, norm).cell
        with torch.no_grad():
            cell.A.mul_(100)
        cell.project_()
        assert cell.certificate().holds, (condition, norm)


def test_scaling_makes_a_network_of_small_infinity_norm_with_the_same_output():
    layer = make("perron-frobenius", size=50.0, activation="leaky_relu")
    other, v = to_infinity_norm(layer)
    x = torch.randn(5, 3, dtype=FLOAT)
    assert row_sum(layer) > 1
    assert row_sum(other) < 1
    torch.testing.assert_close(other(x) * v, layer(x), atol=1e-9, rtol=0)


def test_scaling_refuses_what_it_is_not_true_of():
    with pytest.raises(ValueError, match=r"relu, leaky_relu or identity; got Tanh"):
        to_infinity_norm(make(activation="tanh"))
    with pytest.raises(ValueError, match=r"below 1; got the bound .* Use norm='scale'"):
        to_infinity_norm(make(norm="none", size=50.0))


def test_uncontrolled_weights_are_certified_only_where_they_may_be():
    assert make(norm="none").cell.certificate().holds
    assert not make(norm="none", size=50.0).cell.certificate().holds


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kappa": 1.0}, r"WellPosed.kappa must .* got 1.0"),
        ({"kappa": 0}, r"WellPosed.kappa must .* got 0"),
        ({"condition": "inf"}, r"WellPosed.condition must be one of .*got 'inf'"),
        ({"norm": "projekt"}, r"Did you mean 'project'\?"),
        ({"width": 0}, r"WellPosed.features must"),
        ({"kapa": 0.5}, r"Did you mean 'kappa'\?"),
    ],
)
def test_model_refuses_nonsense(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model("well-posed-table", **options)


def test_input_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"WellPosed input must have shape \(batch, 3\)"):
        make()(torch.randn(2, 4).double())
    with pytest.raises(ValueError, match=r"WellPosed input must be torch\.float64, as the weights"):
        make()(torch.randn(2, 3))
