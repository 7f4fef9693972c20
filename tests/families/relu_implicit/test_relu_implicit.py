"""Implicit ReLU networks: the paper's lemmas on networks, and the contracts."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import root
from torch import Tensor

from equipoise import ClosedForm, Equilibrium, Implicit, Stop, certify, create_model
from equipoise.families.relu_implicit import (
    ReluImplicitNetwork,
    closed_forms,
)

FLOAT = torch.float64


def _network(width: int = 24, **options: object) -> ReluImplicitNetwork:
    torch.manual_seed(0)
    return ReluImplicitNetwork((6,), width, stop=Stop(tolerance=1e-13), **options).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 6, dtype=FLOAT, generator=torch.Generator().manual_seed(1))


def test_equilibrium_agrees_with_scipy_and_the_bound_of_lemma_2_2(x: Tensor) -> None:
    network = _network(gamma=0.4)
    cell, rows = network.cell, network.prepare(x)
    phi = cell.inject(rows).detach()
    z = network.equilibrium(rows).detach()
    for own, inject in zip(z, phi, strict=True):

        def gap(state: object, inject: Tensor = inject) -> object:
            value = torch.relu(cell.scale * cell.A.detach() @ torch.as_tensor(state) + inject)
            return (value - torch.as_tensor(state)).numpy()

        found = root(gap, torch.zeros(24, dtype=FLOAT).numpy(), method="krylov", tol=1e-10)
        torch.testing.assert_close(own, torch.from_numpy(found.x), rtol=0, atol=1e-7)
    bound = phi.norm(dim=1) / (1 - cell.norm())
    assert bool((z.norm(dim=1) <= bound).all())


def test_gradients_of_lemma_2_3_are_those_of_autograd(x: Tensor) -> None:
    network, y = _network(gamma=0.4), torch.randn(5, dtype=FLOAT)
    loss = 0.5 * (network(x)[:, 0] - y).square().sum()
    found = torch.autograd.grad(loss, [network.cell.A, network.cell.V, network.u, network.v])
    exact = closed_forms(network, x).gradients(y)
    for own, name in zip(found, "AVuv", strict=True):
        torch.testing.assert_close(own.reshape(exact[name].shape), exact[name], atol=1e-10, rtol=0)
    # Eq. 10 as it is printed lacks the factor gamma/sqrt(m).
    printed = exact["A"] / network.cell.scale
    assert not torch.allclose(found[0], printed, rtol=0.1)


def test_closed_form_gradient_equals_the_implicit_one(x: Tensor) -> None:
    network = _network(gamma=0.4)
    rows = network.prepare(x)

    def grads(gradient: object) -> tuple[Tensor, ...]:
        layer = Equilibrium(network.cell, gradient=gradient, stop=Stop(tolerance=1e-13))  # type: ignore[arg-type]
        return torch.autograd.grad(layer(rows).pow(3).sum(), [network.cell.A, network.cell.V])

    for own, other in zip(grads(ClosedForm()), grads(Implicit()), strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=0)


def test_weights_begin_as_assumption_1_says() -> None:
    torch.manual_seed(0)
    network = ReluImplicitNetwork((6,), 400)
    A = network.cell.A.detach()
    assert float(A.std()) == pytest.approx(1, abs=0.01)
    assert set(network.u.unique().tolist()) == {-1.0, 1.0}
    assert network.cell.norm() == pytest.approx(0.2, abs=0.01)  # |A| is about 2 sqrt(m)


def test_certificate_is_lemma_2_2_and_the_condition_of_the_theorems() -> None:
    network = _network(gamma=0.1)
    certificate = certify(network.equilibrium)
    assert certificate.holds
    exact = 0.1 / math.sqrt(24) * float(torch.linalg.matrix_norm(network.cell.A.detach(), 2))
    assert certificate.lipschitz == pytest.approx(exact, rel=1e-12)
    assert certificate.lipschitz >= exact
    assert certificate.further[0].holds
    with torch.no_grad():
        network.cell.A.mul_(100)
    assert not network.cell.certificate().contracts


def test_projection_keeps_the_step_a_contraction() -> None:
    network = _network(gamma=0.1, project=True)
    with torch.no_grad():
        network.cell.A.mul_(100)
    network.cell.project_()
    assert network.cell.certificate().contracts
    assert network.cell.norm() == pytest.approx(0.99, rel=1e-9)


def test_samples_have_unit_length_and_zeros_stay_zeros() -> None:
    network = _network()
    rows = network.prepare(torch.cat([torch.full((1, 6), 7.0), torch.zeros(1, 6)]))
    torch.testing.assert_close(rows.norm(dim=1), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gamma": 1.0}, r"ReluImplicit.gamma must .* got 1.0"),
        ({"gamma": 0.0}, r"ReluImplicit.gamma must"),
        ({"width": 0}, r"ReluImplicit.width must"),
        ({"widht": 3}, r"Did you mean 'width'\?"),
    ],
)
def test_model_refuses_nonsense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("relu-implicit", **options)


def test_closed_forms_need_one_output(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must have one output, as in the paper; got 3"):
        closed_forms(_network(outputs=3), x)


def test_a_network_has_the_default_type_of_floats():
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        network = ReluImplicitNetwork((7,), width=30)
        assert network(torch.randn(3, 7)).dtype == torch.float64
    finally:
        torch.set_default_dtype(kept)
    assert set(network.u.detach().unique().tolist()) == {-1.0, 1.0}
