from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import ModuleTensors, find_untracked_tensor


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x) + self.offset


def test_weights_lists_parameters_and_buffers() -> None:
    module = Holder()
    found = {id(tensor) for tensor in ModuleTensors(module).tensors}
    assert found == {
        id(t) for t in (module.scale, module.offset, module.inner.weight, module.inner.bias)
    }


def test_weights_of_a_bare_module_are_empty() -> None:
    weights = ModuleTensors(nn.Tanh())
    assert weights.tensors == []
    assert weights.matches([])
    assert isinstance(weights.bind([]).module, nn.Tanh)


def test_weights_lists_plain_tensors_that_require_gradients_only() -> None:
    module = Holder()
    module.generated = torch.ones(3, requires_grad=True) * 2
    module.constant = torch.ones(3)
    found = [id(tensor) for tensor in ModuleTensors(module).tensors]
    assert id(module.generated) in found
    assert id(module.constant) not in found


def bound(module: nn.Module, make) -> nn.Module:
    """A copy of the module with `make` of each of its tensors."""
    weights = ModuleTensors(module)
    return weights.bind([make(tensor) for tensor in weights.tensors]).module


def test_bound_copy_uses_the_given_tensors_and_leaves_the_module_alone() -> None:
    module = Holder()
    weights = ModuleTensors(module)
    before = {name: dict(vars(child)) for name, child in module.named_modules()}
    slots = [dict(child._parameters) for child in module.modules()]
    x = torch.randn(2, 3)
    value = module(x)
    others = [torch.full_like(tensor, 0.5) for tensor in weights.tensors]
    copied = weights.bind(others)
    torch.testing.assert_close(
        copied.module(x), 0.5 * (0.5 * x.sum(dim=1, keepdim=True) + 0.5).expand(2, 3) + 0.5
    )
    assert copied.matches(others)
    assert not weights.matches(others)
    assert weights.matches(weights.tensors)
    assert isinstance(copied.module, Holder)
    torch.testing.assert_close(module(x), value, rtol=0, atol=0)
    assert {name: dict(vars(child)) for name, child in module.named_modules()} == before
    for child, old in zip(module.modules(), slots, strict=True):
        assert all(child._parameters[name] is tensor for name, tensor in old.items())


def test_bound_copies_are_independent_of_each_other() -> None:
    module = nn.Linear(2, 2)
    first, second = (bound(module, lambda t, v=v: torch.full_like(t, v)) for v in (1.0, 2.0))
    assert first.weight.max() == 1
    assert second.weight.min() == 2
    assert ModuleTensors(first).bind(list(second.parameters()) or [second.weight, second.bias])


def test_bound_copy_can_be_bound_again() -> None:
    weights = ModuleTensors(Holder())
    ones = weights.bind([torch.ones_like(t) for t in weights.tensors])
    twos = ones.bind([torch.full_like(t, 2.0) for t in ones.tensors])
    assert twos.module.inner.weight.min() == twos.module.offset.min() == 2
    assert ones.module.inner.weight.max() == 1


def test_bound_copy_holds_a_plain_tensor_attribute_wherever_it_stands() -> None:
    module = Holder()
    module.generated = torch.ones(3, requires_grad=True) * 2
    module.listed = [module.generated, {"scale": module.scale}]
    copied = bound(module, lambda tensor: tensor.detach() + 1)
    assert torch.equal(copied.generated, torch.full((3,), 3.0))
    assert copied.listed[0] is copied.generated
    assert copied.listed[1]["scale"] is copied.scale
    assert module.listed[1]["scale"] is module.scale


def test_tied_weights_are_listed_once_and_replaced_everywhere() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.alias = nn.ParameterList([module[0].weight])
    assert len(ModuleTensors(module).tensors) == 3
    copied = bound(module, torch.zeros_like)
    assert copied[0].weight is copied[1].weight is copied.alias[0]
    assert copied[0].weight.abs().max() == 0
    assert module[0].weight.abs().max() > 0


def test_a_module_used_twice_is_listed_and_copied_once() -> None:
    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, shared)
    assert len(ModuleTensors(module).tensors) == 2
    copied = bound(module, torch.zeros_like)
    assert copied[0] is copied[1]
    assert copied[0] is not shared


@pytest.mark.parametrize("old_style", [True, False])
@pytest.mark.filterwarnings("ignore:.*deprecated.*")
def test_normalised_weights_are_recomputed_from_the_given_tensors(old_style: bool) -> None:
    place = nn.utils if old_style else nn.utils.parametrizations
    for wrap in (place.weight_norm, place.spectral_norm):
        torch.manual_seed(0)
        module, other = wrap(nn.Linear(3, 3)).eval(), wrap(nn.Linear(3, 3)).eval()
        x = torch.randn(2, 3)
        expected, mine = other(x), module(x)
        weights = ModuleTensors(module)
        copied = weights.bind([t.detach() for t in ModuleTensors(other).tensors])
        torch.testing.assert_close(copied.module(x), expected)
        torch.testing.assert_close(module(x), mine)


def test_recurrent_modules_use_the_given_tensors() -> None:
    """They keep a list of their weights besides the parameters."""
    module, other = nn.GRU(3, 3), nn.GRU(3, 3)
    x = torch.randn(2, 1, 3)
    weights = ModuleTensors(module)
    copied = weights.bind([t.detach() for t in ModuleTensors(other).tensors])
    torch.testing.assert_close(copied.module(x)[0], other(x)[0].detach())


class Referring(nn.Module):
    """Reaches its weights on detours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False)
        weight = self.inner.weight
        self.ways = {
            "list": [self.inner],
            "method": self.multiply,
            "partial": partial(torch.mul, weight),
            "closure over the module": lambda x: self.inner(x),
            "closure over a tensor": lambda x: x @ weight.T,
            "tuple": (self.inner, 1),
            "named tuple": Pair(self.inner, 1),
            "set": {self.inner},
        }

    def multiply(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Pair(NamedTuple):
    module: nn.Module
    number: int


def test_detours_of_a_copy_lead_to_the_copy() -> None:
    module = Referring()
    copied = bound(module, torch.ones_like)
    x, wanted = torch.ones(1, 3), torch.full((1, 3), 3.0)
    ways = copied.ways
    assert torch.equal(ways["list"][0](x), wanted)
    assert torch.equal(ways["method"](x), wanted)
    assert torch.equal(ways["partial"](x), torch.ones(3, 3))
    assert torch.equal(ways["closure over the module"](x), wanted)
    assert torch.equal(ways["closure over a tensor"](x), wanted)
    assert ways["tuple"][0] is ways["named tuple"].module is copied.inner
    assert ways["set"] == {copied.inner}
    assert torch.equal(module.ways["method"](x), module.inner(x))
    assert module.ways["method"].__self__ is module


def test_copy_ends_where_containers_and_functions_contain_themselves() -> None:
    module = nn.Linear(2, 2)
    module.loop = [1]
    module.loop.append(module.loop)

    def recurse(n: int) -> int:
        return 0 if n == 0 else recurse(n - 1)

    module.function = recurse
    copied = bound(module, torch.zeros_like)
    assert copied.loop[1] is copied.loop
    assert copied.function(3) == 0


def test_frozen_copy_keeps_attributes_modes_and_containers() -> None:
    module = Holder()
    module.mask, module.sizes, module.factor = torch.ones(3), {"H": [1]}, 2
    frozen = ModuleTensors(module).freeze().module
    mask = module.mask
    module.mask, module.factor = torch.zeros(3), 3
    module.sizes["H"].append(2)
    module.eval()
    module.inner = nn.Linear(3, 3)
    module.inner.register_forward_hook(lambda *_: torch.zeros(2, 3))
    assert frozen.mask is mask
    assert frozen.factor == 2
    assert frozen.sizes == {"H": [1]}
    assert frozen.training
    assert frozen.inner.training
    assert frozen.inner is not module.inner
    assert frozen.scale is module.scale


def test_frozen_copy_names_what_was_written_to() -> None:
    module = Holder()
    module.inner.mask = torch.ones(3)
    frozen = ModuleTensors(module).freeze()
    assert frozen.written() == []
    module.offset.add_(1)
    module.inner.mask.zero_()
    assert frozen.written() == ["offset", "inner.mask"]


def test_frozen_copy_has_its_own_of_buffers_that_the_module_writes_to() -> None:
    module = nn.BatchNorm1d(3)
    weights = ModuleTensors(module)
    module(torch.randn(5, 3))
    frozen = weights.freeze().module
    kept = module.running_mean.clone()
    module(torch.randn(5, 3))
    assert torch.equal(frozen.running_mean, kept)
    assert frozen.weight is module.weight


# strangers


def test_stranger_finds_a_leaf_that_is_not_known() -> None:
    known, unknown = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert find_untracked_tensor((known * unknown).sin(), [known]) is unknown
    assert find_untracked_tensor((known * unknown).sin(), [known, unknown]) is None


def test_stranger_looks_behind_computed_tensors() -> None:
    leaf = torch.ones(3, requires_grad=True)
    hidden = (leaf * 2).exp()
    known = torch.ones(3, requires_grad=True)
    assert find_untracked_tensor(known + hidden, [known]) is leaf


def test_stranger_ignores_constants_and_unrecorded_results() -> None:
    known = torch.ones(3, requires_grad=True)
    assert find_untracked_tensor(known * torch.ones(3), [known]) is None
    assert find_untracked_tensor(torch.ones(3), []) is None


def test_stranger_finds_a_bare_leaf_of_the_step_through_long_chains() -> None:
    value = known = torch.ones(1, requires_grad=True)
    for _ in range(2000):
        value = value + 1
    assert find_untracked_tensor(value, [known]) is None
    assert find_untracked_tensor(value, []) is known
