"""Any feed-forward network as one weight-tied layer: outputs, gradients, steps, refusals."""

import pytest
import torch
from torch import nn

from equipoise import certify
from equipoise.families.explicit import to_weight_tied
from equipoise.families.residual import WeightTied

FLOAT = torch.float64


def dense():
    return nn.Sequential(
        nn.Linear(3, 5),
        nn.ReLU(),
        nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh()),
        nn.Linear(4, 6),
        nn.GELU(),
        nn.Linear(6, 2),
    )


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    )


CASES = {"dense": (dense, (7, 3), 4), "convolutional": (convolutional, (3, 1, 6, 6), 2)}


@pytest.fixture(params=CASES)
def case(request):
    make, shape, depth = CASES[request.param]
    torch.manual_seed(0)
    return make().double(), torch.randn(shape, dtype=FLOAT, requires_grad=True), depth


def test_output_and_gradients_are_those_of_the_network(case):
    net, x, depth = case
    layer = to_weight_tied(net, on_failure="raise")
    wanted, found = net(x), layer(x)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    tensors = [x, *net.parameters()]
    assert {id(p) for p in layer.parameters()} == {id(p) for p in net.parameters()}
    exact = torch.autograd.grad(wanted.pow(3).sum(), tensors)
    for own, other in zip(torch.autograd.grad(found.pow(3).sum(), tensors), exact, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=0)
    assert int(layer.last.steps.max()) <= depth + 1


def test_equivalent_depth_suffices_and_one_less_does_not(case):
    net, x, depth = case
    cell = to_weight_tied(net).cell
    assert torch.equal(WeightTied(cell, depth)(x), net(x))
    assert not torch.allclose(WeightTied(cell, depth - 1)(x), net(x))


def test_equilibrium_is_reached_from_any_start(case):
    net, x, _ = case
    layer = to_weight_tied(net, on_failure="raise")
    z = layer.cell.initial(x, layer.cell.inject(x))
    start = tuple(torch.randn_like(own) for own in z)
    torch.testing.assert_close(layer(x, start), net(x), atol=1e-10, rtol=0)
    assert certify(layer).holds


def test_matrices_are_those_of_the_theorem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    net = nn.Sequential(*net, nn.Tanh()).double()  # one activation for all blocks
    cell, x = to_weight_tied(net).cell, torch.randn(6, 3, dtype=FLOAT)
    W_z, W_x, b = cell.matrices()
    assert not bool(torch.linalg.matrix_power(W_z, 3).any())
    z = torch.zeros(6, 11, dtype=FLOAT)
    for _ in range(3):
        z = torch.tanh(z @ W_z.T + x @ W_x.T + b)
    torch.testing.assert_close(z[:, -2:], net(x), atol=1e-12, rtol=0)


def test_float32_networks_converge():
    torch.manual_seed(0)
    net = dense()
    x = torch.randn(64, 3)
    torch.testing.assert_close(to_weight_tied(net, on_failure="raise")(x), net(x))


@pytest.mark.parametrize(
    ("net", "sentence"),
    [
        (nn.Linear(3, 2), r"to_weight_tied.net must be an nn.Sequential; got "),
        (nn.Sequential(), r"to_weight_tied.net must have at least one module; got none"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
            r"rows alike .*; got BatchNorm1d\. Fold",
        ),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)), r"rows alike .*; got Dropout"),
    ],
)
def test_networks_that_are_no_functions_of_rows_are_refused(net, sentence):
    with pytest.raises(ValueError, match=sentence):
        to_weight_tied(net)


def test_matrices_of_convolutions_are_refused():
    with pytest.raises(ValueError, match=r"linear maps and activations; got Conv2d"):
        to_weight_tied(convolutional()).cell.matrices()
