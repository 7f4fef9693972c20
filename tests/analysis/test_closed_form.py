"""Networks that do not compute what their weights say are refused by the checks of each family."""

import pytest
import torch

from equipoise import JacobianFree, Phantom, create_model, verify
from equipoise.core import SettingError
from equipoise.families.monotone import MonotoneRegression
from equipoise.families.opteq import OptEq
from equipoise.families.relu_implicit import ReluImplicitNetwork

CHECKS = {
    "opteq": "opteq-theorem-1",
    "monotone": "monotone-lemma-3.3.6",
    "regression": "monotone-lemma-3.3.6",
    "relu-implicit": "relu-implicit-lemma-2.1",
}


def make(kind):
    torch.manual_seed(0)
    if kind == "opteq":
        return OptEq(5, 6, [10, 7])
    if kind == "monotone":
        return create_model("monotone-table", input_shape=(5,), num_classes=2, width=8)
    if kind == "regression":
        return MonotoneRegression(5, 8)
    return ReluImplicitNetwork((5,), width=32, outputs=2)


def check(kind, model):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    return verify(CHECKS[kind], model, x, torch.zeros(4))


def same(value):
    return value


def layer_of(model):
    return getattr(model, "equilibrium", model)


def override(module, name, change=same, given=same):
    """Give a module a class of its own, in which a method gets or returns something else."""
    own = type(module)

    def method(self, x, *args, **options):
        return change(getattr(own, name)(self, given(x), *args, **options))

    module.__class__ = type(f"Other{own.__name__}", (own,), {name: method})


BREAKERS = {
    "another step": lambda model: override(layer_of(model).cell, "step", lambda z: -3 * z),
    "another step of other inputs": lambda model: override(
        layer_of(model).cell, "inject", given=lambda x: 10 * x
    ),
    "something else than its state": lambda model: override(
        layer_of(model).cell, "readout", lambda z: 2 * z
    ),
    "has a forward hook": lambda model: layer_of(model).register_forward_hook(
        lambda *found: 10 * found[2]
    ),
    "a forward of its own": lambda model: override(layer_of(model), "forward", lambda z: 2 * z),
    "another head": lambda model: override(model, "forward", lambda y: 2 * y),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_network_that_computes_what_its_weights_say_is_checked(kind):
    assert check(kind, make(kind)).outcome != "unknown"


@pytest.mark.parametrize("said", BREAKERS)
@pytest.mark.parametrize("kind", CHECKS)
def test_network_that_computes_something_else_is_refused(kind, said):
    model = make(kind)
    if layer_of(model) is model and said == "another head":
        pytest.skip("a layer has no head")
    BREAKERS[said](model)
    sentence = said.partition(" of other")[0]
    with pytest.raises(SettingError, match=f"must compute what its weights say; .*{sentence}"):
        check(kind, model)


@pytest.mark.parametrize("gradient", [JacobianFree(), Phantom()])
@pytest.mark.parametrize("kind", CHECKS)
def test_network_may_return_where_its_gradient_ends(kind, gradient):
    """Not the state that the solver found, but steps from it."""
    model = make(kind)
    layer_of(model).gradient = gradient
    assert check(kind, model).outcome != "unknown"
    for said in ("has a forward hook", "a forward of its own"):
        other = make(kind)
        layer_of(other).gradient = gradient
        BREAKERS[said](other)
        with pytest.raises(SettingError, match=said):
            check(kind, other)


@pytest.mark.parametrize("splitting", ["douglas-rachford", "forward-backward", "none"])
def test_every_splitting_of_a_monotone_network_is_known(splitting):
    torch.manual_seed(0)
    model = create_model("monotone-digits", splitting=splitting, on_failure="ignore")
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2])
    assert verify("monotone-lemma-3.3.6", model, x, y).outcome == "holds"
