"""Monotone networks on vectors: splittings, gradients, certificates and refusals."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from equipoise import Status, certify
from equipoise.families.monotone import MonotoneDense, Splitting
from equipoise.solvers import Anderson, Broyden, FixedPoint, Newton

SPLITTINGS = get_args(Splitting)
SOLVERS = (FixedPoint(), Anderson(plain_rate=0.75), Broyden(), Newton())


def make(seed=0, margin=1.0, size=1.0, features=5, splitting="peaceman-rachford", **options):
    torch.manual_seed(seed)
    layer = MonotoneDense(3, features, margin, splitting=splitting, **options).double()
    with torch.no_grad():
        layer.cell.operator.A.mul_(size)
        layer.cell.operator.B.mul_(size)
    return layer


def with_splitting(layer, splitting, **options):
    """A layer of the same weights with another splitting."""
    other = MonotoneDense(3, layer.features, layer.margin, splitting=splitting, **options).double()
    other.load_state_dict(layer.state_dict())
    return other


def by_enumeration(W, c):
    """The equilibrium of each sample: of all active sets, the one whose solution fits.

    Active units solve `((I - W) z)_S = c_S`, and the others have no positive pre-activation.
    """
    n = len(W)
    masks = torch.tensor(list(product([0.0, 1.0], repeat=n)), dtype=W.dtype)
    systems = torch.eye(n, dtype=W.dtype) - masks[:, :, None] * W
    z = torch.linalg.solve(systems[None], (masks * c[:, None])[..., None])[..., 0]
    wrong = (torch.relu(z @ W.T + c[:, None]) - z).abs().amax(dim=2)
    return z[torch.arange(len(c)), wrong.argmin(dim=1)]


def test_splittings_and_solvers_agree_with_enumeration_on_100_random_networks():
    checked = dict.fromkeys(SPLITTINGS, 0)
    for seed in range(100):
        torch.manual_seed(seed)
        margin, size = 0.5 + 1.5 * torch.rand(()).item(), 0.3 + torch.rand(()).item()
        layer = make(seed, margin, size)
        x = torch.randn(3, 3, dtype=torch.float64)
        with torch.no_grad():
            (W,) = layer.cell.operator.weights()
            wanted = by_enumeration(W, layer.cell.inputs(x))
            for splitting, solver in product(SPLITTINGS, SOLVERS):
                # The equation itself need not contract: its solver may fail, but must say so.
                sure = splitting != "none"
                other = with_splitting(
                    layer,
                    splitting,
                    solver=solver,
                    tolerance=1e-10,
                    max_steps=2000 if sure else 50,
                    on_failure="raise" if sure else "ignore",
                )
                found = other(x)
                done = other.last.converged
                assert (found - wanted)[done].abs().le(1e-8).all(), (seed, splitting, solver)
                checked[splitting] += int(done.sum())
    assert all(checked[splitting] == 1200 for splitting in SPLITTINGS if splitting != "none")
    assert checked["none"] > 600


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_gradient_is_that_of_finite_differences(splitting):
    layer = make(3, 0.7, 0.6, splitting=splitting, tolerance=1e-13, max_steps=2000)
    x = torch.randn(2, 3, dtype=torch.float64)
    y = torch.randn(2, 5, dtype=torch.float64)
    tensors = [x, *(p.data for p in layer.parameters())]
    (layer(x.requires_grad_()) * y).sum().backward()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    h = 1e-4
    with torch.no_grad():
        for tensor, grad in zip(tensors, grads, strict=True):
            direction = torch.randn_like(tensor)
            start = tensor.clone()

            def at(steps, tensor=tensor, start=start, direction=direction):
                tensor.copy_(start + steps * h * direction)
                return float((layer(x) * y).sum())

            # Of fourth order: what is left is rounding, about 1e-13/h.
            slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)
            at(0)
            assert abs(slope - float((grad * direction).sum())) < 1e-7


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_derivatives_of_both_modes_and_orders_are_exact(splitting):
    layer = make(1, 0.9, 0.5, 3, splitting, activation="leaky_relu", tolerance=1e-14)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(run, (x, *weights), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, (x, *weights), fast_mode=True)


def test_plain_iteration_that_diverges_says_so():
    layer = make(0, 1.0, 4.0, 30, "none", solver="fixed_point", on_failure="ignore")
    x = torch.randn(8, 3, dtype=torch.float64)
    with torch.no_grad():
        layer(x)
        assert (layer.last.status == Status.DIVERGED).all()
        other = with_splitting(layer, "peaceman-rachford", solver="fixed_point", max_steps=1000)
        other(x)
    assert other.last.converged.all()


def test_adjoint_converges_by_plain_steps_where_those_of_the_equation_do_not():
    layer = make(0, 1.0, 4.0, 30, tolerance=1e-8, max_steps=2000, solver="fixed_point")
    layer.gradient = type(layer.gradient)(solver="neumann")
    x = torch.randn(8, 3, dtype=torch.float64)
    layer(x).sum().backward()
    assert layer.last.adjoint.converged.all()


def test_resolvent_is_made_once_for_each_update_of_the_weights(monkeypatch):
    layer = make()
    operator, made = layer.cell.operator, []
    factor = operator.factor
    monkeypatch.setattr(operator, "factor", lambda *args: made.append(1) or factor(*args))
    x = torch.randn(2, 3, dtype=torch.float64)
    first = layer(x)
    assert torch.equal(layer(x), first)
    assert len(made) == 1
    with torch.no_grad():
        operator.A.data.mul_(2)  # which torch's version counter does not see
    assert not torch.equal(layer(x), first)
    assert len(made) == 2


def test_ensembles_of_weights_are_solved_under_vmap():
    layers = [make(seed, tolerance=1e-10) for seed in range(3)]
    x = torch.randn(2, 3, dtype=torch.float64)
    stacked, _ = torch.func.stack_module_state(layers)
    found = torch.func.vmap(lambda values: torch.func.functional_call(layers[0], values, (x,)))(
        stacked
    )
    wanted = torch.stack([layer(x) for layer in layers])
    assert torch.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_certificate_proves_one_equilibrium_and_how_it_moves(splitting):
    layer = make(2, 0.5, 0.8, splitting=splitting, tolerance=1e-12, max_steps=5000)
    certificate = certify(layer)
    assert certificate.holds
    numbers = {one.claim: one.number for one in certificate.statements}
    (bound,) = (number for claim, number in numbers.items() if "|U|/m" in claim)
    x = torch.randn(2, 50, 3, dtype=torch.float64)
    with torch.no_grad():
        moved = (layer(x[0]) - layer(x[1])).norm(dim=1)
    assert (moved <= bound * (x[0] - x[1]).norm(dim=1)).all()
    (W,) = layer.cell.operator.weights()
    gap = torch.eye(5, dtype=torch.float64) - W
    assert torch.linalg.eigvalsh((gap + gap.T) / 2)[0] >= 0.5 - 1e-12
    assert layer.cell.norms()["I - W"] >= torch.linalg.matrix_norm(gap, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"margin": 0.0}, r"MonotoneDense.margin must be .*positive.* got 0.0\. Only then"),
        ({"margin": -1}, r"MonotoneDense.margin must .*got -1"),
        ({"splitting": "peaceman"}, "MonotoneDense.splitting .* Did you mean 'peaceman-rachford'"),
        ({"step_size": 0.0}, r"Monotone.step_size must .*got 0.0"),
        ({"splitting": "none", "step_size": 0.5}, "MonotoneDense.step_size must be left out"),
        ({"activation": "tanh"}, "activation must be relu.*Use splitting='none'"),
        ({"features": 0}, "MonotoneDense.features must"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MonotoneDense(3, **{"features": 4, **options})


def test_input_of_another_shape_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"MonotoneDense input must have shape \(batch, 3\)"):
        make()(torch.randn(2, 4).double())
    with pytest.raises(ValueError, match=r"must be torch\.float64"):
        make()(torch.randn(2, 3))
