"""Norm control: bounds that stay proven while weights move, and what they cost."""

import copy

import pytest
import torch
from torch.nn import functional

from equipoise import OptEq, OptEqConv2d, certify, project_norms_after
from equipoise.families.opteq.norm_control import NormControl
from equipoise.operators import Convolution, Dense, Pooled, separable


def make(kind: str, norm: str) -> OptEq | OptEqConv2d:
    torch.manual_seed(3)
    if kind == "dense":
        layer = OptEq(5, 6, [7, 8], norm=norm, bound=0.9)
    else:
        form = {"separable": {"separable": True}, "pooled": {"pool": [1, 2], "kernel_size": 2}}
        layer = OptEqConv2d(2, 3, [4, 5], norm=norm, bound=0.9, **form.get(kind, {}))
    with torch.no_grad():
        layer.layers.operators[1].scale_(1.8)  # near the limit, the first one far below
    return layer


def input_of(kind: str) -> torch.Tensor:
    torch.manual_seed(4)
    return torch.randn(4, 5) if kind == "dense" else torch.randn(2, 2, 6, 6)


def train(layer, kind, rate, steps, *, forget=False):
    x = input_of(kind)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
    if layer.layers.projects:
        project_norms_after(optimizer, layer)
    for _ in range(steps):
        if forget:
            layer.layers._control = NormControl()
        optimizer.zero_grad()
        functional.mse_loss(layer(x), torch.ones_like(layer(x)) * 2).backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize("rate", [0.002, 0.1])
@pytest.mark.parametrize("norm", ["scale", "project"])
@pytest.mark.parametrize("kind", ["dense", "convolution", "separable", "pooled"])
def test_kept_bounds_never_change_a_result(kind, norm, rate):
    kept, forgetful = (
        train(make(kind, norm), kind, rate, 12, forget=forget) for forget in (False, True)
    )
    for one, other in zip(kept.parameters(), forgetful.parameters(), strict=True):
        assert torch.equal(one, other)
    assert certify(kept).holds


def test_a_bound_is_computed_again_only_where_weights_may_have_crossed_the_limit(monkeypatch):
    calls = []
    bound = Convolution.bound
    monkeypatch.setattr(
        Convolution, "bound", lambda self, weights: calls.append(self) or bound(self, weights)
    )
    layer = make("convolution", "project")
    first = layer.layers.operators[0]
    train(layer, "convolution", 0.002, 12)
    assert calls.count(first) == 1


def test_projected_weights_have_room_for_the_next_steps(monkeypatch):
    layer = make("convolution", "project")
    operator = layer.layers.operators[1]
    operator.scale_(10)
    layer.layers.project_()
    assert operator.bound(operator.weights()).item() == pytest.approx(0.99 * 0.9, rel=1e-5)
    with torch.no_grad():
        operator.kernel[0, 0, 0, 0] += 1e-4
    monkeypatch.setattr(Convolution, "bound", lambda *_: pytest.fail("not needed"))
    monkeypatch.setattr(Convolution, "within", lambda *_: pytest.fail("not needed"))
    before = operator.kernel.clone()
    layer.layers.project_()
    assert torch.equal(operator.kernel, before)


def test_long_steps_ask_whether_the_limit_holds_and_not_for_the_bound(monkeypatch):
    layer = make("convolution", "scale")
    weights = layer.layers.effective_weights()
    before = copy.deepcopy(layer.layers.operators[0].kernel)
    with torch.no_grad():  # a rotation of the channels moves far and changes no norm
        layer.layers.operators[0].kernel.copy_(before.flip(0))
    monkeypatch.setattr(Convolution, "bound", lambda *_: pytest.fail("not needed"))
    assert torch.equal(layer.layers.effective_weights()[0][0], before.flip(0))
    assert torch.equal(weights[0][0], before.flip(0))  # the same parameter
    monkeypatch.setattr(Convolution, "within", lambda *_: pytest.fail("asked already"))
    layer.layers.effective_weights()


@pytest.mark.parametrize("norm", ["scale", "project"])
def test_weights_changed_behind_the_back_of_autograd_are_noticed(norm):
    layer = make("convolution", norm)
    x = input_of("convolution")
    layer(x)
    for operator in layer.layers.operators:
        operator.kernel.data.mul_(30)
    if norm == "project":
        layer.layers.project_()
    assert certify(layer).holds
    assert max(layer.layers.norms().values()) <= 0.9 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "operator",
    [
        Dense(6, 4),
        Convolution(3, 5),
        Convolution(4, 6, (2, 3), groups=2),
        Convolution(3, 4, 1),
        separable(3, 5),
        separable(3, 5, multiplier=2),
        Pooled(Convolution(3, 5), 2),
    ],
    ids=repr,
)
def test_drift_is_above_what_a_bound_can_gain(operator, dtype):
    operator = copy.deepcopy(operator).to(dtype)
    weights = operator.weights()
    for size in (0, 1e-4, 0.1, 10):
        for direction in ("random", "along"):
            moved = tuple(
                (w + size * (torch.randn_like(w) if direction == "random" else w)).detach()
                for w in weights
            )
            gain = float(operator.bound(moved)) - operator.bound(weights).item()
            assert gain <= operator.drift(moved, weights) + 1e-15


@pytest.mark.parametrize(
    "operator",
    [
        Dense(6, 4),
        Convolution(3, 5),
        Convolution(3, 4, 1),
        separable(3, 5),
        separable(4, 4, 1),
        Pooled(Convolution(3, 5), 2),
    ],
    ids=repr,
)
def test_within_agrees_with_the_bound(operator):
    weights = operator.weights()
    bound = float(operator.bound(weights).detach())
    assert not operator.within(weights, bound * (1 - 1e-6))
    assert operator.within(weights, bound * (1 + 1e-6))
    assert not operator.within(tuple(w * torch.nan for w in weights), 1.0)


def test_layer_above_its_limit_at_each_step_is_bounded_once_a_step(monkeypatch):
    """Where the last norm was too large, asking whether this one is would be in vain."""
    asked = []
    within = Convolution.within
    monkeypatch.setattr(Convolution, "within", lambda *args: asked.append(args) or within(*args))
    torch.manual_seed(0)
    operator, control = Convolution(3, 4, 3), NormControl()
    for _ in range(5):
        operator.scale_(1.5 / operator.bound(operator.weights()))
        control.project_(0, operator, 0.9)
        assert operator.bound(operator.weights()) <= 0.9
    assert not asked
