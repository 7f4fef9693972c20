"""Muon: steps of matrices that are orthogonal, and of the size of AdamW's."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import equipoise
from equipoise.engine import OptimizerConfig, make_optimizer
from equipoise.engine.muon import Muon, hidden_matrices


def _step(weight, gradient, **options):
    before = weight.detach().clone()
    weight.grad = gradient
    Muon([{"params": [weight], "orthogonal": True}], **options).step()
    return weight.detach() - before


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 4, 3, 3), (30, 2, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_step_has_the_singular_vectors_of_the_gradient_and_equal_singular_values(shape, dtype):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=dtype))
    gradient = torch.randn(shape, dtype=dtype)
    moved = -_step(weight, gradient, lr=0.1).flatten(1)
    u, s, vh = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    size = 0.1 * 0.2 * max(moved.shape) ** 0.5
    inner = u.mH @ moved @ vh.mH / size  # diagonal where the singular vectors are the same
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-4)
    assert inner.diagonal().abs().min() > 0.6
    assert inner.diagonal().abs().max() < 1.3
    assert s.max() / s.min() > 1.5  # the gradient's own are not equal


def test_step_does_not_depend_on_the_scale_of_the_gradient():
    torch.manual_seed(0)
    first, gradient = torch.randn(5, 7), torch.randn(5, 7)
    scales = (1.0, 1e-36, 1e-25, 1e-12, 1e12, 1e30)
    moved = [_step(nn.Parameter(first.clone()), gradient * k) for k in scales]
    for other in moved[1:]:
        # Differences of weights of about 1 are rounded to 1e-7, whatever the step.
        assert torch.allclose(moved[0], other, rtol=1e-4, atol=5e-7)


def test_parameters_without_entries_are_left_alone():
    assert _step(nn.Parameter(torch.zeros(0, 3)), torch.zeros(0, 3)).shape == (0, 3)


def test_bare_parameters_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"Muon.groups must be groups .* got Parameter. Use make_"):
        Muon(nn.Linear(2, 3).parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"Muon.lr must be .*got -1"),
        ({"lr": math.nan}, r"Muon.lr must be .*got nan"),
        ({"momentum": 1.0}, r"Muon.momentum must .*got 1"),
        ({"betas": (2.0, 0.9)}, r"Muon.betas must .*got 2"),
        ({"eps": -1.0}, r"Muon.eps must be .*got -1"),
    ],
)
def test_odd_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))]}], **options)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": 1.0}, "got a group without params"),
        ({"params": [nn.Parameter(torch.ones(2))], "orthogonal": "no"}, "orthogonal must be"),
        ({"params": [nn.Parameter(torch.ones(2))], "orthogonal": True}, "two dimensions"),
        (
            {"params": [nn.Parameter(torch.ones(2, 2))], "orthogonal": True, "maximize": True},
            "must have only the settings .*got 'maximize'",
        ),
    ],
)
def test_odd_groups_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        Muon([group])


def test_zero_gradient_moves_nothing_and_weight_decay_shrinks():
    weight = nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    Muon([{"params": [weight], "orthogonal": True, "weight_decay": 0.5}], lr=0.1).step()
    assert torch.allclose(weight, torch.full((3, 4), 0.95))


def test_other_parameters_take_the_steps_of_adamw():
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
    matrix = nn.Parameter(torch.randn(3, 3))
    muon = Muon([{"params": [matrix], "orthogonal": True}, {"params": [ours]}], lr=0.1)
    adamw = torch.optim.AdamW([theirs], 0.1, weight_decay=0.0)
    for _ in range(3):
        theirs.grad = ours.grad = torch.randn(4)
        matrix.grad = torch.randn(3, 3)
        muon.step()
        adamw.step()
    assert torch.equal(ours, theirs)


def test_saved_state_goes_on_bit_for_bit():
    def run(saved_after):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
        optimizer = make_optimizer(net, OptimizerConfig("muon", learning_rate=0.01))
        for step in range(6):
            if step == saved_after:
                state = optimizer.state_dict()
                optimizer = make_optimizer(net, OptimizerConfig("muon", learning_rate=0.01))
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            net(
                torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            ).square().sum().backward()
            optimizer.step()
        return [weight.detach() for weight in net.parameters()]

    assert all(map(torch.equal, run(None), run(3)))


def test_hooks_run_once_for_each_step():
    first = nn.Parameter(torch.ones(2, 2))
    torch.optim.AdamW([first])  # torch adds its hooks to the class with the first of them
    optimizer = Muon(
        [{"params": [first], "orthogonal": True}, {"params": [nn.Parameter(torch.ones(2))]}]
    )
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


def test_matrices_and_kernels_are_hidden_but_not_the_classifier_and_embeddings():
    names = hidden_matrices(equipoise.create_model("opteq-digits"))
    assert names == {
        "extractor.0.weight",
        "equilibrium.cell.operators.0.kernel",
        "equilibrium.cell.inputs.0.weight",
    }
    assert hidden_matrices(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))) == {"1.weight"}


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("monotone-digits", {"head.weight"}),
        ("monotone-cifar10-170k", {"head.2.weight"}),
        ("well-posed-table", {"head.weight"}),
        ("opteq-table", {"head.weight"}),
        ("lipschitz-table", {"equilibrium.cell.inner.operator.W_o"}),
        ("mlp-table", {"classifier.weight"}),
        ("fcn-cityscapes", {"classifier.classifier.weight"}),
        ("multiscale-digits", {"head.classifier.weight"}),
        ("transformer-tiny", {"embedding.weight"}),
    ],
)
def test_of_the_matrices_of_a_family_only_the_last_map_is_not_hidden(name, last):
    model = equipoise.create_model(name)
    weights = dict(model.named_parameters())
    matrices = {name for name, weight in weights.items() if weight.squeeze().dim() > 1}
    assert matrices - hidden_matrices(model) == last


@pytest.mark.parametrize("first", ["embedding", "linear"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_matrix_tied_to_an_embedding_is_one(first, kind):
    embedding, linear = kind(5, 4), nn.Linear(4, 5)
    linear.weight = embedding.weight
    parts = {"embedding": embedding, "linear": linear, "hidden": nn.Linear(4, 4)}
    model = nn.ModuleDict({first: parts.pop(first), **parts})
    assert hidden_matrices(model) == {"hidden.weight"}


def test_matrix_tied_to_the_last_map_is_one():
    encoder, classifier = nn.Linear(4, 5), nn.Linear(4, 5)
    encoder.weight = classifier.weight
    assert not hidden_matrices(nn.ModuleDict({"encoder": encoder, "classifier": classifier}))


def test_last_maps_of_an_implicit_relu_network_are_not_hidden():
    model = equipoise.create_model("relu-implicit", num_classes=3)
    assert hidden_matrices(model) == {"equilibrium.cell.A", "equilibrium.cell.V"}


@pytest.mark.parametrize("name", ["imaging-gradient", "dnn-cifar10-199k", "multiscale-digits"])
def test_biases_and_scales_of_channels_are_not_hidden(name):
    model = equipoise.create_model(name)
    weights = dict(model.named_parameters())
    vectors = {name for name, weight in weights.items() if weight.squeeze().dim() < 2}
    assert any(weights[name].dim() > 1 for name in vectors)
    assert not vectors & hidden_matrices(model)


def test_learning_rates_and_decay_by_group_are_kept():
    net = equipoise.create_model("opteq-digits")
    settings = OptimizerConfig("muon", 0.02, weight_decay=0.1, rates={"operators": 0.5})
    groups = make_optimizer(net, settings).param_groups
    found = {(g["orthogonal"], g["rate"], g["weight_decay"]): len(g["params"]) for g in groups}
    assert found[True, 0.5, 0.1] == 1
    assert found[True, 1.0, 0.1] == 2
    assert sum(found.values()) == len(list(net.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copy_takes_the_same_steps(copied):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    pair = net, make_optimizer(net, OptimizerConfig("muon"))
    x = torch.randn(4, 5)
    results = []
    for own, optimizer in (copied(pair), pair):
        own(x).square().sum().backward()
        optimizer.step()
        results.append([weight.detach() for weight in own.parameters()])
    assert all(map(torch.equal, *results))
