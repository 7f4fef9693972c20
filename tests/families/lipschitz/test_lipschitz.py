"""Lipschitz-bounded networks: the matrix inequality, the constant, its tightness, refusals."""

from typing import get_args

import numpy as np
import pytest
import torch

from equipoise import Anderson, Broyden, Equilibrium, FixedPoint, Newton, certify, create_model
from equipoise.families.lipschitz import LipschitzBounded
from equipoise.families.monotone import Splitting

FLOAT = torch.float64


def make(gamma=1.5, size=1.0, seed=0, margin=0.2, **options):
    torch.manual_seed(seed)
    options = {"tolerance": 1e-11, "max_steps": 3000, "on_failure": "raise", **options}
    layer = LipschitzBounded(4, 7, 3, gamma, margin, **options).double()
    with torch.no_grad():
        operator = layer.cell.operator
        operator.U.mul_(size)
        operator.W_o.mul_(size)
        operator.log_psi.normal_()
        layer.cell.b.normal_()
    return layer


def weights_of(layer):
    """`W`, `U`, `W_o` and `Psi` as arrays."""
    operator = layer.cell.operator
    tensors = (operator.weights()[0], operator.U, operator.W_o, torch.diag(operator.log_psi.exp()))
    return [tensor.detach().double().numpy() for tensor in tensors]


@torch.no_grad()
def states_of(layer, x):
    """The equilibria, which the read-out hides."""
    cell = layer.cell
    c = torch.nn.functional.linear(x, cell.operator.U, cell.b)
    return Equilibrium(cell.inner, stop=layer.stop)(c)


def theorem_matrix(layer):
    W, U, W_o, P = weights_of(layer)
    gap = P @ (np.eye(len(W)) - W)
    return gap + gap.T - (W_o.T @ W_o + P @ U @ U.T @ P) / layer.gamma


@pytest.mark.parametrize("gamma", [0.1, 1.5, 30.0])
@pytest.mark.parametrize("size", [0.1, 30.0])
def test_matrix_of_the_theorem_is_what_the_parametrisation_makes_it(gamma, size):
    layer = make(gamma, size)
    M, (*_, P) = theorem_matrix(layer), weights_of(layer)
    A = layer.cell.operator.A.detach().numpy()
    np.testing.assert_allclose(M, 2 * 0.2 * P + 2 * A.T @ A, atol=1e-9 * (1 + size**2 / gamma))
    lowest, margin = layer.cell.operator.inequality()
    smallest = np.linalg.eigvalsh(M)[0]
    assert 0 < lowest <= smallest + 1e-12
    assert lowest > 0.9 * smallest
    assert margin >= 0.2 - 1e-9
    assert certify(layer).holds


@pytest.mark.parametrize("activation", ["relu", "hard_tanh", "soft_shrink", "leaky_relu"])
def test_output_moves_by_no_more_than_gamma(activation):
    layer = make(size=4.0, activation=activation, tolerance=1e-9)
    x = torch.randn(20, 4, dtype=FLOAT)
    with torch.no_grad():
        for distance in (1e-3, 1.0, 100.0):
            other = x + distance * torch.randn_like(x)
            slope = (layer(x) - layer(other)).norm(dim=1) / (x - other).norm(dim=1)
            assert float(slope.max()) <= layer.gamma * (1 + 1e-6)
    assert float(layer.slopes(x).max()) <= layer.gamma * (1 + 1e-8)


def test_bound_is_nearly_reached_by_large_weights():
    layer = make(size=30.0)
    assert 0.95 * layer.gamma < float(layer.slopes(torch.randn(20, 4, dtype=FLOAT)).max())


def test_slopes_are_norms_of_the_jacobian_by_elimination():
    layer = make()
    W, U, W_o, _ = weights_of(layer)
    x = torch.randn(5, 4, dtype=FLOAT)
    z = states_of(layer, x)
    for own, state in zip(layer.slopes(x), z.numpy(), strict=True):
        S = np.diag((state > 0).astype(float))
        exact = np.linalg.norm(W_o @ np.linalg.solve(np.eye(7) - S @ W, S @ U), 2)
        assert float(own) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("activation", ["relu", "hard_tanh"])
def test_splittings_and_solvers_agree(activation):
    layer = make(activation=activation)
    x = torch.randn(6, 4, dtype=FLOAT)
    wanted = layer(x).detach()
    W, U, W_o, _ = weights_of(layer)
    z = states_of(layer, x)
    c = x @ torch.from_numpy(U).T + layer.cell.b.detach()
    again = layer.cell.inner.activation(z @ torch.from_numpy(W).T + c)
    torch.testing.assert_close(again, z, atol=1e-9, rtol=0)
    torch.testing.assert_close(wanted, z @ torch.from_numpy(W_o).T, atol=1e-9, rtol=0)
    for splitting in set(get_args(Splitting)) - {"none"}:
        other = make(activation=activation, splitting=splitting)
        other.load_state_dict(layer.state_dict())
        for solver in (FixedPoint(), Anderson(), Broyden(), Newton()):
            # Only plain steps are sure to converge; an accelerator may stall, but must say so.
            sure = solver == FixedPoint()
            with torch.no_grad():
                found = other(x, solver=solver, on_failure="raise" if sure else "ignore")
            done = other.last.converged
            assert int(done.sum()) >= (6 if sure else 5)
            torch.testing.assert_close(found[done], wanted[done], atol=1e-8, rtol=0)


def test_metric_changes_nothing_but_the_scale_of_relu_states():
    layer, other = make(seed=1), make(seed=1)
    operator = other.cell.operator
    with torch.no_grad():
        root = (operator.log_psi / 2).exp()
        operator.A.div_(root)
        operator.B.div_(torch.outer(root, root))
        operator.U.mul_(root[:, None])
        operator.W_o.div_(root)
        other.cell.b.mul_(root)
        operator.log_psi.zero_()
    x = torch.randn(5, 4, dtype=FLOAT)
    torch.testing.assert_close(layer(x), other(x), atol=1e-9, rtol=0)


def test_certificate_looks_at_the_matrix_and_not_at_its_recipe(monkeypatch):
    layer = make(margin=0.05)
    operator = layer.cell.operator
    (W,) = operator.weights()
    monkeypatch.setattr(operator, "weights", lambda: (W + 2 * torch.eye(7, dtype=FLOAT),))
    certificate = layer.cell.certificate()
    assert not certificate.holds
    assert all(one.holds is None for one in certificate.further)


def test_float32_layers_are_certified():
    layer = make(size=10.0).float()
    certificate = certify(layer)
    assert all(one.holds for one in certificate.further)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gamma": 0}, r"LipschitzBounded.gamma must be .*positive.* got 0\."),
        ({"gamma": -1.0}, r"LipschitzBounded.gamma must .* got -1.0"),
        ({"margin": 0.0}, r"LipschitzBounded.margin must .* got 0.0\. Only then"),
        ({"splitting": "douglas"}, r"Did you mean 'douglas-rachford'\?"),
        ({"activation": "tanh"}, r"Use splitting='none'"),
        ({"width": 0}, r"LipschitzBounded.features must"),
        ({"num_classes": 0}, r"LipschitzBounded.out_features must"),
        ({"gama": 1.0}, r"Did you mean 'gamma'\?"),
    ],
)
def test_model_refuses_nonsense(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model("lipschitz-table", **options)


def test_input_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"LipschitzBounded input must have shape \(batch, 4\)"):
        make()(torch.randn(2, 3).double())
