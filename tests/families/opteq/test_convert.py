"""Conversions are checked against their networks, scikit-learn, SciPy and printed formulas."""

import warnings
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from samples import reference
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import nn

from equipoise import Equilibrium, Status, Stop, objective
from equipoise.families.opteq import OptEq, OptEqConv2d
from equipoise.families.opteq.convert import (
    HiddenUnits,
    to_blocks,
    to_hidden_units,
    to_opteq,
    to_wide,
)

ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "leaky": lambda: nn.LeakyReLU(0.2),
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "identity": nn.Identity,
}
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-10}


def sequential(widths, make, dtype=torch.float64, bias=True):
    """Linear layers of these widths, with an activation between any two."""
    modules = []
    for place, (into, out) in enumerate(pairwise(widths)):
        linear = nn.Linear(into, out, bias=bias)
        nn.init.normal_(linear.weight, std=1.5 / into**0.5)
        modules += [linear, make(place)]
    return nn.Sequential(*modules[:-1]).to(dtype)


def badly_scaled(dtype):
    """Eleven weights of mixed widths and widely different scales, some of them of rank 1.

    The scales differ by six orders of magnitude.

    The activations are homogeneous and the biases of the scale of what they are added to, so that
    the output depends on the input.
    """
    widths = [7, 20, 3, 35, 12, 1, 17, 40, 5, 28, 9, 4]
    net = sequential(widths, lambda place: (nn.LeakyReLU(0.3), nn.Identity())[place % 2], dtype)
    scale = 1.0
    with torch.no_grad():
        for place, exponent in enumerate([2, -3, 3, -2.5, 0, 3, -3, 2, -1, 3, -3]):
            linear = net[2 * place]
            if place in (2, 5, 8):
                linear.weight[:, 1:] = linear.weight[:, :1]
            scale *= 10.0**exponent
            linear.weight.mul_(10.0**exponent)
            linear.bias.mul_(scale)
    return net


def relative(value, reference):
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm())


def error(converted, net, x):
    """Of a conversion, relative to its network in float64."""
    reference = net.double()(x.double())
    net.to(x.dtype)
    return relative(converted(x), reference)


CONVERSIONS = pytest.mark.parametrize("convert", [to_hidden_units, to_opteq])
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=["float32", "float64"])


# Lemma 1 and 2: feed-forward networks


@CONVERSIONS
@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_conversion_computes_the_same(convert, dtype, name):
    for widths in ([4, 6, 3], [5, 3, 8, 2], [3, 9, 2, 7, 7, 1]):
        net = sequential(widths, lambda _: ACTIVATIONS[name](), dtype)
        x = torch.randn(10, widths[0], dtype=dtype)
        converted = convert(net)
        assert converted(x).dtype == dtype
        assert error(converted, net, x) < ALLOWED[dtype]


@CONVERSIONS
@DTYPES
def test_conversion_of_a_deep_badly_scaled_network_stays_at_rounding_level(convert, dtype):
    net = badly_scaled(dtype)
    x = torch.randn(20, 7, dtype=dtype)
    y = convert(net)(x)
    before, reference = net(x), net.double()(x.double())
    spread = (reference - reference.mean(dim=0)).norm()
    assert spread > 0.1 * reference.norm()  # not a constant, which would be easy
    own = (before - reference).norm() / spread
    assert (y - reference).norm() / spread < max(20 * own, torch.finfo(dtype).eps * 20)


@DTYPES
def test_hidden_units_factor_the_weights_of_any_rank(dtype):
    net = badly_scaled(dtype)
    with torch.no_grad():
        net[6].weight.zero_()
    hidden = to_hidden_units(net)
    assert hidden.state_features == 57  # of 17 and 40
    matrices = [module.weight for module in net if isinstance(module, nn.Linear)]
    for before, Wb, A in zip(hidden.weights, hidden.weights[1:], matrices, strict=False):
        gap = Wb.double() @ before.double().mT - A.double()
        assert gap.norm() <= 10 * torch.finfo(dtype).eps * A.double().norm().clamp_min(1e-6)
    for Wb in hidden.weights[1:-1]:
        values = torch.linalg.svdvals(Wb.detach().double())
        assert values[0] <= 4 * values[-1]


def rescale_units(net, places, decades):
    """Rescale the units behind these linear layers of a ReLU network, computing the same."""
    with torch.no_grad():
        for place in places:
            scale = (
                2.0
                ** torch.empty(len(net[place].weight))
                .uniform_(-decades * 3.3, decades * 3.3)
                .round()
            )
            net[place].weight.mul_(scale[:, None])
            net[place].bias.mul_(scale)
            net[place + 2].weight.div_(scale)


@CONVERSIONS
@pytest.mark.parametrize("places", [(2,), (4,), (6,), (0, 2, 4, 6)])
def test_conversion_takes_a_larger_state_for_units_of_different_scales(convert, places):
    net = sequential([6, 20, 30, 25, 20, 3], lambda _: nn.ReLU(), torch.float32)
    assert to_hidden_units(net).state_features == 55
    x = torch.randn(20, 6)
    before = net(x)
    rescale_units(net, places, 4.5)
    assert torch.equal(net(x), before)
    assert to_hidden_units(net).state_features == 75
    assert relative(convert(net)(x), before) < 1e-6
    with pytest.raises(
        ValueError, match=rf"{convert.__name__}.state_features must be larger .*; got 55"
    ):
        convert(net, state_features=55)


def test_hidden_units_are_accurate_for_units_of_any_scale():
    for seed in range(60):
        torch.manual_seed(seed)
        widths = [7, *torch.randint(2, 40, (3 + seed % 8,)).tolist(), 3]
        net = sequential(widths, lambda _: nn.LeakyReLU(0.3), torch.float32)
        rescale_units(net, range(0, len(net) - 1, 2), (seed % 5) / 4)
        x = torch.randn(16, 7)
        y = to_hidden_units(net)(x)
        reference = net.double()(x.double())
        assert (y - reference).norm() < 1e-5 * (reference - reference.mean(dim=0)).norm()


def test_conversion_reads_what_surrounds_the_layers():
    make = nn.Sequential(
        nn.Identity(),
        nn.Flatten(),
        nn.Sequential(nn.Linear(6, 5, bias=False), nn.Dropout(0.5), nn.ELU(0.7)),
        nn.Linear(5, 4),  # two linear layers without an activation between them
        nn.Linear(4, 3),
        nn.Identity(),
        nn.Softshrink(0.3),
        nn.Linear(3, 2),
        nn.LogSoftmax(dim=-1),
    )
    net = make.double().eval()
    x = torch.randn(7, 2, 3, dtype=torch.float64)
    assert torch.allclose(to_hidden_units(net)(x), net(x), atol=1e-12)
    assert torch.allclose(to_opteq(net)(x), net(x), atol=1e-12)


@CONVERSIONS
@pytest.mark.parametrize(
    "net", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Tanh())], ids=["bare", "activated"]
)
def test_conversion_accepts_a_single_linear_layer(convert, net):
    x = torch.randn(4, 3)
    assert torch.allclose(convert(net)(x), net(x), atol=1e-6)


def test_conversion_copies_the_weights():
    net = sequential([3, 4, 5, 2], lambda _: nn.Tanh())
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = net(x).detach()
    hidden, opteq = to_hidden_units(net), to_opteq(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    assert torch.allclose(hidden(x), expected)
    assert torch.allclose(opteq(x), expected)


@DTYPES
def test_to_opteq_reaches_its_equilibrium_in_one_pass(dtype):
    net = sequential([5, 8, 3, 6, 2], lambda _: nn.Sigmoid(), dtype)
    opteq = to_opteq(net, tolerance=1e-6)
    opteq(torch.randn(9, 5, dtype=dtype))
    last = opteq.equilibrium.last
    assert (last.status == Status.CONVERGED).all()
    assert last.steps.max() <= 1
    assert not last.residual.any()


def test_to_opteq_is_a_deep_opteq_as_in_the_proof():
    net = sequential([5, 8, 3, 6, 2], lambda place: nn.Tanh() if place else nn.ReLU())
    cell = to_opteq(net).equilibrium.layers
    assert cell.alpha == (1.0,) * 4
    assert cell.norm == "none"
    assert not cell.operators[0].weight.any()
    assert torch.equal(cell.inputs[1].weight, net[0].weight)
    assert not any(inputs.weight.any() for place, inputs in enumerate(cell.inputs) if place != 1)
    for place in (2, 3):
        product = cell.operators[place].weight @ cell.operators[place - 1].weight.T
        assert torch.allclose(product, net[2 * place - 2].weight)


def test_to_opteq_has_the_gradients_of_the_network_and_trains():
    net = sequential([5, 8, 3, 2], lambda _: nn.Softplus())
    opteq = to_opteq(net, tolerance=1e-10)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    losses = [nn.functional.mse_loss(model(x), y) for model in (net, opteq)]
    for loss in losses:
        loss.backward()
    cell = opteq.equilibrium.layers
    assert torch.allclose(cell.inputs[1].weight.grad, net[0].weight.grad)
    for own, linear in ((cell.inputs[1], net[0]), (cell.inputs[2], net[2]), (opteq.head, net[4])):
        assert torch.allclose(own.bias.grad, linear.bias.grad)
    optimizer = torch.optim.SGD(opteq.parameters(), lr=0.02)
    for _ in range(20):
        optimizer.step()
        optimizer.zero_grad()
        nn.functional.mse_loss(opteq(x), y).backward()
    assert nn.functional.mse_loss(opteq(x), y) < 0.9 * losses[1]
    assert not cell.operators[0].weight.any()
    assert opteq.equilibrium.last.steps.max() <= 1


def test_conversion_state_of_the_least_size_works_and_a_smaller_one_is_refused():
    for ranks, least in (
        ((2, 5), 7),
        ((0, 5), 9),
        ((4, 3), 8),
    ):  # n = 4, 5, 6 in the middle: 9 - rank and 11 - rank
        net = sequential([4, 4, 5, 6, 6], lambda _: nn.Tanh())
        with torch.no_grad():
            for place, rank in zip((2, 4), ranks, strict=True):
                weight = net[place].weight
                weight.copy_(
                    torch.randn(len(weight), rank).double()
                    @ torch.randn(rank, weight.shape[1]).double()
                )
        x = torch.randn(8, 4, dtype=torch.float64)
        assert error(to_hidden_units(net, least), net, x) < 1e-10
        with pytest.raises(
            ValueError,
            match=(
                f"state_features must be at least {least} for weights of these ranks, 11 "
                "for any; got"
            ),
        ):
            to_hidden_units(net, least - 1)


def test_hidden_units_state_that_would_lose_digits_is_refused():
    net = sequential([4, 4, 4, 4, 4], lambda _: nn.Tanh(), torch.float64)
    with torch.no_grad():
        U, _, Vh = torch.linalg.svd(net[2].weight)
        net[2].weight.copy_(
            U @ torch.diag(torch.tensor([1, 1, 1, 1e-11], dtype=torch.float64)) @ Vh
        )
    with pytest.raises(
        ValueError, match=r"state_features must be larger .*; got 4. With 12 none are"
    ):
        to_hidden_units(net, 4)
    x = torch.randn(8, 4, dtype=torch.float64)
    assert error(to_hidden_units(net), net, x) < 1e-12


@CONVERSIONS
@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (
            nn.Sequential(nn.Linear(2, 3), nn.GELU(), nn.Linear(3, 1)),
            r"net\[1\] .* got GELU: activation 'gelu' is not admissible: its slope",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.SiLU(), nn.Linear(3, 1)),
            r"net\[1\] .* got SiLU: activation 'silu' is not admissible: its slope",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1), nn.GELU()),
            r"net\[3\] .* got GELU",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3))),
            r"net\[1\]\[0\] must be an nn.Linear or .*; got BatchNorm1d\.",
        ),
        (
            nn.Sequential(nn.Conv2d(2, 3, 1)),
            r"net\[0\] must be an nn.Linear, as nothing but nn.Flatten may come before; got Conv2d",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Tanh()),
            r"net\[2\] must be an nn.Linear, as two activations .*; got Tanh",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.Flatten(), nn.Linear(3, 1)),
            r"net\[1\] .*; got Flatten",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.Softmax(-1), nn.Linear(3, 1)),
            r"net\[1\] .*; got Softmax",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)),
            r"net\[1\] must be in evaluation mode, .* Call net.eval\(\)",
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(4, 1)),
            r"net\[2\] must take the 3 numbers of the layer before; got 4",
        ),
        (nn.Sequential(), "net must hold at least one nn.Linear; got none"),
        (nn.LSTM(2, 3), "net must be an nn.Linear, as nothing .*; got LSTM"),
        (torch.relu, "net must be an nn.Sequential, or an MLP of scikit-learn; got builtin"),
        (
            MLPClassifier(),
            r"net must be fitted; got MLPClassifier without coefs_. Call its fit\(X, y\) first",
        ),
    ],
)
def test_conversion_refuses_in_one_sentence(convert, net, sentence):
    with pytest.raises(ValueError, match=f"^{convert.__name__}.{sentence}"):
        convert(net)


def test_conversion_refuses_weights_that_are_not_finite():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    net[2].bias.data.fill_(torch.nan)
    with pytest.raises(
        ValueError, match=r"to_opteq.net\[2\] must have finite weights; got NaN or infinity"
    ):
        to_opteq(net)


@pytest.mark.parametrize("size", [0, 2.5])
def test_conversion_refuses_a_state_size_that_is_no_size(size):
    with pytest.raises(
        ValueError, match=r"to_opteq.state_features must be a whole number of at least 1; got"
    ):
        to_opteq(nn.Linear(2, 3), state_features=size)


def test_hidden_units_refuse_lists_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"HiddenUnits.weights must be two more .*; got 2, 2 and 0"
    ):
        HiddenUnits([torch.eye(2)] * 2, [torch.zeros(2)] * 2, [])


# scikit-learn


def fitted(estimator, X, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return estimator.fit(X, y)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X[:400] / 16, y[:400]


@CONVERSIONS
@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
@pytest.mark.parametrize("kind", ["classes", "two", "labels"])
def test_conversion_of_a_classifier_predicts_its_probabilities(convert, activation, kind, digits):
    X, y = digits
    y = {
        "classes": y,
        "two": y > 4,
        "labels": np.stack([y > 4, y % 2, y % 3 == 0], axis=1).astype(int),
    }[kind]
    net = fitted(
        MLPClassifier(
            hidden_layer_sizes=(24, 16, 9), activation=activation, max_iter=15, random_state=0
        ),
        X,
        y,
    )
    converted = convert(net)
    proba = converted(torch.tensor(X)).detach().numpy()
    assert proba.dtype == np.float64
    np.testing.assert_allclose(proba, net.predict_proba(X), rtol=1e-10, atol=1e-12)
    if kind != "labels":
        assert (net.classes_[proba.argmax(axis=1)] == net.predict(X)).all()


@CONVERSIONS
@pytest.mark.parametrize("kind", ["one", "several", "counts"])
def test_conversion_of_a_regressor_predicts_the_same(convert, kind, digits):
    X, _ = digits
    y = {"one": X[:, 20], "several": X[:, 20:23], "counts": np.round(4 * X[:, 20])}[kind]
    options = {"loss": "poisson"} if kind == "counts" else {}
    net = fitted(
        MLPRegressor(
            hidden_layer_sizes=(13, 11), activation="tanh", max_iter=15, random_state=0, **options
        ),
        X[:, :20],
        y,
    )
    value = convert(net)(torch.tensor(X[:, :20])).detach().numpy()
    assert value.shape == (len(X), 3 if kind == "several" else 1)
    np.testing.assert_allclose(value.reshape(y.shape), net.predict(X[:, :20]), rtol=1e-10)


# The lemmas as printed


def test_lemma_4_of_version_1_fails_for_a_weight_of_low_rank():
    # "k >= max(m, n), A of full rank: there is B of full rank with W = A B^T", by C = S^-1 U^T W
    # and B = C^T V^T.
    n = 4
    A, W = torch.randn(n, n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(A)
    B = (U.T @ W / S[:, None]).T @ Vh
    assert torch.allclose(A @ B.T, W)
    assert torch.linalg.matrix_rank(B) == 0  # and A is invertible, so that there is no other B
    # So a layer of W = 0 between two of full rank has no hidden units of size n; nor of any size
    # below 2 n, as the rows of Wb_2 would have to be n independent vectors orthogonal to the n
    # independent rows of Wb_1:
    for m in range(n, 2 * n + 1):
        Wb_1 = np.random.default_rng(m).standard_normal((n, m))
        assert (scipy.linalg.null_space(Wb_1).shape[1] >= n) == (m >= 2 * n)
    net = sequential([n] * 4, lambda _: nn.Tanh())
    with torch.no_grad():
        net[2].weight.zero_()
    with pytest.raises(ValueError, match="must be at least 8"):
        to_hidden_units(net, state_features=7)
    assert to_hidden_units(net).state_features == 8


def test_lemma_2_of_version_1_carries_no_bias_through_tanh():
    # "changing each layer's output x to [x; 1] and A to [[A, b], [0, 1]]" sends the constant
    # through the activation.
    net = sequential([3, 4, 2], lambda _: nn.Tanh())
    x = torch.randn(5, 3, dtype=torch.float64)

    def printed(activation):
        extended = torch.cat([x, torch.ones(5, 1)], dim=1)
        for place, linear in enumerate((net[0], net[2])):
            last = torch.tensor([[0.0] * linear.in_features + [1.0]])
            A = torch.cat([torch.cat([linear.weight, linear.bias[:, None]], dim=1), last], dim=0)
            extended = extended @ A.T if place else activation(extended @ A.T)
        return extended[:, :-1]

    assert (printed(torch.tanh) - net(x)).abs().max() > 1e-2
    assert torch.allclose(printed(torch.relu), net[2](torch.relu(net[0](x))))
    assert torch.allclose(to_opteq(net)(x), net(x))


def test_lemma_2_needs_alpha_1_which_version_3_excludes():
    net = sequential([3, 4, 2], lambda _: nn.Tanh())
    x = torch.randn(5, 3, dtype=torch.float64)
    opteq = to_opteq(net)
    opteq.equilibrium.layers.fixed_alpha = (0.9,)
    assert relative(opteq(x), net(x)) > 1e-3


# Lemma 3: blocks


def deep_opteq(alpha=0.7, **options):
    deep = OptEq(
        5,
        6,
        [7, 3, 8],
        alpha=alpha,
        tolerance=1e-12,
        max_steps=2000,
        **{"activation": "tanh"} | options,
    ).double()
    with torch.no_grad():
        for operator in deep.layers.operators:
            operator.weight.mul_(1.5)
    return deep


def passes(deep, x):
    """The states of one pass through a deep OptEq at its equilibrium, in the order of Lemma 3."""
    states = [deep(x)]
    for own in reference(deep, x):
        states.append(own.step(states[-1]))
    return torch.cat(states[1:], dim=1)


@pytest.mark.parametrize("alpha", [0.7, [1.0, 0.5, 0.3]])
def test_to_blocks_holds_the_states_of_the_deep_network(alpha):
    deep, x = deep_opteq(alpha), torch.randn(4, 5, dtype=torch.float64)
    cell = to_blocks(deep)
    blocks = Equilibrium(cell, tolerance=1e-12, max_steps=2000)
    assert torch.allclose(blocks(x), passes(deep, x), atol=1e-10)
    assert torch.allclose(blocks(x)[:, -6:], deep(x), atol=1e-10)
    deep.layers.operators[0].weight.data.zero_()
    assert cell.layers[0].operators[0].weight.any()


def test_to_blocks_keeps_alpha_exactly():
    blocks = to_blocks(OptEq(3, 4, [5, 6], alpha=[0.3, 0.7]).double())
    assert [layer.alpha for layer in blocks.layers] == [(0.3,), (0.7,)]


def test_to_blocks_of_convolutions_and_learned_alpha():
    deep = OptEqConv2d(2, 3, [4, 5], learn_alpha=True, tolerance=1e-11, max_steps=500).double()
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    blocks = Equilibrium(to_blocks(deep), tolerance=1e-11, max_steps=500)
    assert torch.allclose(blocks(x), passes(deep, x), atol=1e-8)


def test_to_blocks_declares_the_sharp_lipschitz_constant():
    deep, x = (
        deep_opteq([1.0, 0.5, 0.3], activation="identity"),
        torch.randn(1, 5, dtype=torch.float64),
    )
    with torch.no_grad():
        for operator in deep.layers.operators:
            operator.weight.mul_(10)  # so that norm control makes them as large as it allows
    cell = to_blocks(deep)
    jacobian = torch.func.jacrev(Equilibrium(cell).map(x))(
        torch.zeros(1, 18, dtype=torch.float64)
    ).reshape(18, 18)
    assert float(torch.linalg.matrix_norm(jacobian.detach(), 2)) == pytest.approx(cell.lipschitz())


def test_to_blocks_declares_no_bound_without_norm_control():
    assert to_blocks(deep_opteq(norm="none")).lipschitz() is None


def test_lemma_3_of_version_3_lacks_the_shift():
    deep, x = deep_opteq(), torch.randn(4, 5, dtype=torch.float64)
    states = passes(deep, x)
    z_1, z_2, z_0 = states.split(6, dim=1)
    layers = reference(deep, x)
    with_shift = torch.cat(
        [own.prox(z) for own, z in zip(layers, (z_0, z_1, z_2), strict=True)], dim=1
    )
    without = torch.cat(
        [own.prox(z) for own, z in zip(layers, (z_1, z_2, z_0), strict=True)], dim=1
    )
    skip = 0.3 * torch.cat([z_0, z_1, z_2], dim=1)
    assert torch.allclose(0.7 * with_shift + skip, states, atol=1e-10)
    assert relative(0.7 * without + skip, states) > 1e-3


# Theorem 3: wide


@pytest.mark.parametrize("norm", ["none", "scale", "project"])
@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_to_wide_solves_the_mean_of_the_layers(norm, mu):
    deep, x = (
        deep_opteq(norm=norm, mu=mu, bias=norm != "none"),
        torch.randn(1, 5, dtype=torch.float64),
    )
    with torch.no_grad():
        deep.layers.operators[1].weight.mul_(
            5 if norm == "scale" else 1
        )  # so that norm control has something to do
    layers = reference(deep, x)

    def balance(y):
        y = torch.tensor(y)[None]
        return (3 * y - sum(own.prox(y) for own in layers))[0].detach().numpy()

    root = scipy.optimize.root(balance, np.zeros(6), tol=1e-13).x
    wide = to_wide(deep)
    assert (len(wide.layers.operators), wide.layers.alpha, wide.layers.mu, wide.layers.norm) == (
        1,
        (1.0,),
        3 * mu,
        norm,
    )
    np.testing.assert_allclose(wide(x)[0].detach(), root, atol=1e-9)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_theorem_3_deep_approaches_wide_at_first_order(activation):
    deep, x = (
        deep_opteq(activation=activation, solver="newton"),
        torch.randn(6, 5, dtype=torch.float64),
    )
    with torch.no_grad():
        y = to_wide(deep)(x)
        gaps = []
        for alpha in (0.04, 0.02, 0.01, 0.005):
            deep.layers.fixed_alpha = (alpha,)
            states = passes(deep, x).split(6, dim=1)
            gaps.append(max(float((state - y).norm()) for state in states))
    assert gaps[-1] < 0.01 * y.norm()
    for coarse, fine in pairwise(gaps):
        assert 0.45 < fine / coarse < 0.55


def test_to_wide_is_certified_without_being_rescaled():
    deep = deep_opteq(norm="scale", bound=0.9)
    with torch.no_grad():
        for operator in deep.layers.operators:  # the worst case: aligned, and all at the bound
            operator.weight.copy_(torch.outer(torch.randn(len(operator.weight)), torch.ones(6)))
    wide = to_wide(deep).layers
    (weight,) = wide.effective_weights()[0]
    assert relative(weight, wide.operators[0].weight) < 1e-12
    assert wide.lipschitz() == pytest.approx(0.81)
    assert float(torch.linalg.matrix_norm(weight.detach(), 2)) ** 2 / wide.mu == pytest.approx(0.81)


@pytest.mark.parametrize(
    ("groups", "size", "padding"),
    [(1, 3, "zeros"), (2, 3, "circular"), (2, 2, "zeros"), (1, (3, 5), "zeros")],
)
def test_to_wide_stacks_the_channels_of_convolutions(groups, size, padding):
    options = {"groups": groups, "padding": padding, "tolerance": 1e-11, "max_steps": 500}
    deep = OptEqConv2d(2, 4, [4, 6, 2], size, "softplus", **options).double()
    with torch.no_grad():
        for operator in deep.layers.operators:
            operator.kernel.mul_(10)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    wide = to_wide(deep)
    y = wide(x)
    assert torch.allclose(3 * y, sum(own.prox(y) for own in reference(deep, x)), atol=1e-9)
    (weight,) = wide.layers.effective_weights()[0]
    assert relative(weight, wide.layers.operators[0].kernel) < 1e-12


def test_to_wide_refuses_layers_that_do_not_shrink_together():
    with pytest.raises(ValueError, match=r"one alpha for all layers, .*; got 0.001, 0.009"):
        to_wide(OptEq(5, 6, hidden=[7, 8], alpha=[0.001, 0.009]))


def test_to_wide_keeps_how_the_deep_network_is_solved_and_trains():
    deep = OptEq(
        3,
        4,
        [5, 6],
        solver="broyden",
        gradient="jacobian_free",
        stop=Stop(1e-3, max_steps=7),
        on_failure="ignore",
    )
    wide = to_wide(deep)
    assert (wide.solver, wide.gradient, wide.stop, wide.solves.on_failure) == (
        deep.solver,
        deep.gradient,
        deep.stop,
        "ignore",
    )
    assert to_wide(OptEq(3, 4, [5, 6])).solver is None
    wide(torch.randn(2, 3)).sum().backward()
    assert all(weight.grad is not None for weight in wide.parameters())
    assert all(weight.grad is None for weight in deep.parameters())


@pytest.mark.parametrize(
    ("deep", "sentence"),
    [
        (
            OptEq(3, 4, [5, 6], activation=["relu", "tanh"]),
            r"must have one elementwise activation for all layers; got ReLU\(\), Tanh\(\)",
        ),
        (OptEq(3, 4, [5, 6], regularizer="l1"), "must have no regulariser"),
        (
            OptEqConv2d(3, 4, [5, 6], separable=True),
            "must have plain matrices or convolutions as weights; got separable",
        ),
        (
            OptEqConv2d(3, 4, [5, 6], pool=2),
            "must have plain matrices or convolutions as weights; got separable or pooled",
        ),
        (nn.Linear(2, 2), "must be an OptEq or OptEqConv2d; got Linear"),
    ],
)
def test_to_wide_refuses_in_one_sentence(deep, sentence):
    with pytest.raises(ValueError, match=f"to_wide.deep {sentence}"):
        to_wide(deep)


def test_objective_of_a_converted_network_says_why_there_is_none() -> None:
    """Lemma 2 says nothing of the norms, which Theorem 2 needs to be at most 1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    net[2].weight.data *= 20
    made = to_opteq(net)
    with pytest.raises(ValueError, match=r"made by to_opteq .* minimises nothing"):
        objective(made.equilibrium, torch.randn(2, 3))
