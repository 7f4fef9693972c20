"""Convolutional and residual networks as deep OptEqs (OptEq, Lemma 2 and the remark after it)."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from equipoise import Model, to_opteq


class Block(nn.Module):
    """A residual block as ResNet has it: `relu(f(x) + shortcut(x))`."""

    def __init__(self, into, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        changed = stride != 1 or into != out
        shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride), nn.BatchNorm2d(out))
        self.shortcut = shortcut if changed else nn.Identity()

    def forward(self, x):
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(4, 4), Block(4, 6, 2), Block(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1)
        return self.head(x.view(x.size(0), -1))


class PreActivation(nn.Module):
    """The shortcut carries negative numbers past leaky ReLUs."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.first = nn.Conv2d(3, 3, 3, padding=1, groups=3)
        self.activation = nn.LeakyReLU(0.2)
        self.second = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        x = self.activation(self.stem(x))
        for _ in range(2):  # weights that are used twice
            inner = self.activation(self.first(self.activation(self.norm(x))))
            x = x + self.second(inner)
        return x.mean((2, 3))


class ResidualMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        x = x + self.out(torch.relu(self.into(x)))
        return x + self.out(torch.relu(self.into(x)))


NETWORKS = {
    "pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 6, 3, stride=2, padding=1),  # of an even image: a column is left over
            nn.Dropout(0.5),
            nn.Softplus(),
            nn.Flatten(),
            nn.Linear(6 * 4 * 4, 10),
        ),
        (3, 16, 16),
    ),
    "largest": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(4, 6, 3, dilation=2, padding="same", groups=2),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 10),
            nn.LogSoftmax(1),
        ),
        (3, 17, 15),
    ),
    "resnet": (ResNet, (3, 12, 12)),
    "pre-activation": (PreActivation, (2, 5, 5)),
    "residual-mlp": (ResidualMLP, (6,)),
    "linear": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), (1, 4, 4)),
}


def make(name):
    torch.manual_seed(0)
    build, shape = NETWORKS[name]
    net = build()
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 2)
            nn.init.uniform_(part.weight, -1, 2)
            nn.init.normal_(part.bias)
    return net.eval(), shape, torch.randn(4, *shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_conversion_gives_the_same_outputs_after_one_pass(name):
    net, shape, x = make(name)
    same = to_opteq(net, input_shape=shape, on_failure="raise")
    assert torch.allclose(same(x), net(x), atol=1e-5)
    exact, wide = to_opteq(net.double(), input_shape=shape), x.double()
    assert torch.allclose(exact(wide), net(wide), atol=1e-12)
    assert int(exact.equilibrium.solve(wide).steps.max()) == 1
    start = torch.randn(4, exact.equilibrium.layers.operators[0].weight.shape[1]).double()
    anywhere = exact.head(exact.equilibrium(wide, start))
    assert torch.allclose(anywhere, exact.head(exact.equilibrium(wide)), atol=1e-12)


@pytest.mark.parametrize("name", ["largest", "resnet", "pre-activation"])
def test_conversion_has_the_derivatives_of_the_network(name):
    net, shape, x = make(name)
    net, x = net.double(), x.double().requires_grad_()
    same = to_opteq(net, input_shape=shape)
    (wanted,) = torch.autograd.grad(net(x).square().sum(), x)
    (found,) = torch.autograd.grad(same(x).square().sum(), x)
    assert torch.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("name", ["pooled", "largest", "pre-activation", "residual-mlp"])
def test_operators_of_a_converted_network_have_exact_adjoints_and_proven_norms(name):
    net, shape, _ = make(name)
    same = to_opteq(net.double(), input_shape=shape)
    for operator in same.equilibrium.layers.operators:
        z = torch.randn(3, operator.zeros(torch.zeros(1, 1)).shape[1]).double()
        with torch.no_grad():
            y = torch.randn_like(operator(z))
            pairs = (operator(z) * y).sum(), (z * operator.adjoint(y)).sum()
            assert torch.allclose(*pairs, atol=1e-9)
            for _ in range(30):
                z = operator.adjoint(operator(z))
                z = z / z.norm(dim=1, keepdim=True).clamp_min(1e-30)
            assert operator(z).norm(dim=1).max() <= operator.bound(operator.weights()) + 1e-9


def test_converted_network_trains_and_keeps_its_parameters_in_files():
    net, shape, x = make("resnet")
    same = to_opteq(net, input_shape=shape)
    # Every weight of the network once, one number for each channel in place of batch norms' four,
    # and one for each entry of the state that the first layer forgets.
    state = same.equilibrium.layers.operators[0].weight.shape[1]
    assert sum(own.numel() for own in same.parameters()) <= state + sum(
        own.numel() for own in net.parameters()
    )
    other = to_opteq(ResNet().eval(), input_shape=shape)
    other.load_state_dict(same.state_dict())
    assert torch.equal(other(x), same(x))
    assert torch.equal(copy.deepcopy(same)(x), same(x))
    rate = torch.optim.SGD(same.parameters(), 1e-3)
    before = float(same(x).square().sum().detach())
    for _ in range(3):
        rate.zero_grad()
        same(x).square().sum().backward()
        rate.step()
    assert float(same(x).square().sum().detach()) < before


class TanhBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.outer(x + torch.tanh(self.inner(x)))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("net", "shape", "sentence"),
    [
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU()),
            (1, 4, 4),
            r"to_opteq\.net\.1 must be an admissible activation; got GELU: .* slope is negative",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)),
            (1, 4, 4),
            r"to_opteq\.net\.1 must be a convolution, linear layer, .*; got GroupNorm\.",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2).train()),
            (1, 4, 4),
            r"to_opteq\.net\.1 must be in evaluation mode, .*; got BatchNorm2d.*net\.eval",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, padding=1)),
            (1, 4, 4),
            r"net\.1\.padding must come after a ReLU if it pads",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")),
            (1, 4, 4),
            r"net\.0\.padding_mode must be 'zeros'; got 'reflect'",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2)),
            (1, 5, 5),
            r"net\.1 must divide the image into equal parts; got \(2, 2\) for an image of \(3, 3\)",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(9, 2)),
            (1, 4, 4),
            r"net\.2 must take what the network gives it; got an error: ",
        ),
        (TanhBlock(), (3,), "must have ReLU, leaky ReLU or no activations where a shortcut leads"),
        (Branch(), (3,), "must be a network that does the same whatever its input; got Branch"),
        (nn.Sequential(nn.Linear(3, 3)), (0,), r"to_opteq\.input_shape must be a whole number"),
        (nn.Linear(3, 3), 5, r"to_opteq\.input_shape must be the shape of a sample; got int"),
    ],
)
def test_what_cannot_be_converted_is_told_in_one_sentence(net, shape, sentence):
    net = net if any(isinstance(own, nn.BatchNorm2d) for own in net.modules()) else net.eval()
    with pytest.raises(ValueError, match=sentence):
        to_opteq(net, input_shape=shape)


def test_a_network_without_its_input_shape_is_told_to_give_it():
    with pytest.raises(ValueError, match=r"got Conv2d\. For other networks, give to_opteq an inp"):
        to_opteq(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 1)))


def test_a_converted_network_refuses_inputs_of_another_shape():
    net, shape, _ = make("resnet")
    with pytest.raises(ValueError, match=r"The input must have shape \(batch, 3, 12, 12\); got "):
        to_opteq(net, input_shape=shape)(torch.randn(2, 3, 11, 12))


class Follows(nn.Module):
    """A convolution, and what a function does with it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.same = nn.Identity()

    def forward(self, x):
        return self.function(self, self.first(x))


def after_module(net, h):
    return net.second(net.relu(h)) + h  # h is relu(h) by now


def after_function(net, h):
    return net.second(F.relu(h, inplace=True)) + h


def after_sum(net, h):
    other = h
    other += net.second(h)
    return torch.relu(other) + h


def after_identity(net, h):
    other = net.same(h)
    return net.second(net.relu(other)) + h


@pytest.mark.parametrize("function", [after_module, after_function, after_sum, after_identity])
def test_values_written_over_in_place_change_under_all_their_names(function):
    torch.manual_seed(0)
    net = Follows(function).double().eval()
    x = torch.randn(4, 2, 5, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(to_opteq(net, input_shape=(2, 5, 6))(x), net(x))


def test_a_view_that_is_written_over_is_refused_where_the_value_is_used_again():
    net = Follows(lambda net, h: net.relu(h.flatten(1)) + h.view(h.size(0), -1)).eval()
    with pytest.raises(ValueError, match="used again in another shape"):
        to_opteq(net, input_shape=(2, 5, 6))


def test_a_linear_layer_on_the_rows_of_an_image_is_not_scaled_by_its_channels():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    nn.init.normal_(norm.weight)
    norm.running_mean.normal_()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 4), norm, nn.ReLU(), nn.Flatten())
    net = net.double().eval()
    x = torch.randn(3, 2, 6, 6).double()
    with torch.no_grad():
        torch.testing.assert_close(to_opteq(net, input_shape=(2, 6, 6))(x), net(x))


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax, torch.softmax])
def test_a_softmax_by_function_is_the_last_step(function):
    torch.manual_seed(0)
    net = Follows(lambda _, h: function(torch.relu(h), dim=1)).eval()
    x = torch.randn(3, 2, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(to_opteq(net, input_shape=(2, 5, 6))(x), net(x))


@pytest.mark.parametrize("shape", [None, (5,)])
@pytest.mark.parametrize("place", [0, None])
def test_hooks_are_refused(shape, place):
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    (net if place is None else net[place]).register_forward_hook(lambda *call: 2 * call[-1])
    with pytest.raises(ValueError, match="a forward hook may change its output"):
        to_opteq(net, input_shape=shape)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weights_that_a_hook_makes_are_refused():
    net = nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 6)), nn.ReLU(), nn.Linear(6, 2))
    with torch.no_grad():
        net[0].weight_g.mul_(3)  # the weight of the last call is still there
    with pytest.raises(ValueError, match="remove_weight_norm"):
        to_opteq(net)


def test_a_forward_that_was_replaced_is_refused():
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    net[1].forward = torch.tanh
    with pytest.raises(ValueError, match="its forward was replaced"):
        to_opteq(net, input_shape=(5,))


def test_a_model_is_converted_if_it_takes_samples_as_they_are():
    class Halved(Model):
        def __init__(self, factor):
            super().__init__()
            self.factor, self.linear = factor, nn.Linear(5, 2)

        def prepare(self, x):
            return self.factor * x

        def forward(self, x):
            return torch.relu(self.linear(x))

    net, x = Halved(1.0), torch.randn(3, 5)
    torch.testing.assert_close(to_opteq(net, input_shape=(5,))(x), net(x))
    with pytest.raises(ValueError, match="whose prepare changes them"):
        to_opteq(Halved(0.5), input_shape=(5,))
