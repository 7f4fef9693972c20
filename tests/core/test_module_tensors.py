from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
    with weights.bind([]):
        pass


def test_weights_lists_plain_tensors_that_require_gradients_only() -> None:
    module = Holder()
    module.generated = torch.ones(3, requires_grad=True) * 2
    module.constant = torch.ones(3)
    found = [id(tensor) for tensor in ModuleTensors(module).tensors]
    assert id(module.generated) in found
    assert id(module.constant) not in found


def test_bind_swaps_tensors_and_restores_them() -> None:
    module = Holder()
    weights = ModuleTensors(module)
    before = list(weights.tensors)
    x = torch.randn(2, 3)
    value = module(x)
    others = [torch.full_like(tensor, 0.5) for tensor in weights.tensors]
    with weights.bind(others):
        torch.testing.assert_close(
            module(x), 0.5 * (0.5 * x.sum(dim=1, keepdim=True) + 0.5).expand(2, 3) + 0.5
        )
        assert weights.matches(others)
        assert not weights.matches(before)
    assert weights.matches(before)
    assert isinstance(module.scale, nn.Parameter)
    torch.testing.assert_close(module(x), value, rtol=0, atol=0)


def test_bind_restores_after_an_error() -> None:
    module = Holder()
    weights = ModuleTensors(module)
    before = list(weights.tensors)
    with (
        pytest.raises(RuntimeError, match="inside"),
        weights.bind([torch.zeros_like(t) for t in before]),
    ):
        raise RuntimeError("inside")
    assert weights.matches(before)


def test_bind_nests() -> None:
    module = nn.Linear(2, 2)
    weights = ModuleTensors(module)
    outer, inner = ([torch.full_like(t, value) for t in weights.tensors] for value in (1.0, 2.0))
    with weights.bind(outer):
        with weights.bind(inner):
            assert module.weight is inner[0]
        assert module.weight is outer[0]


def test_bind_swaps_a_plain_tensor_attribute() -> None:
    module = Holder()
    module.generated = torch.ones(3, requires_grad=True) * 2
    weights = ModuleTensors(module)
    others = [tensor.detach() + 1 for tensor in weights.tensors]
    before = module.generated
    with weights.bind(others):
        assert torch.equal(module.generated, torch.full((3,), 3.0))
    assert module.generated is before


def test_tied_weights_are_listed_once_and_swapped_everywhere() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.alias = nn.ParameterList([module[0].weight])
    weights = ModuleTensors(module)
    assert len(weights.tensors) == 3
    others = [torch.zeros_like(tensor) for tensor in weights.tensors]
    with weights.bind(others):
        assert module[0].weight is module[1].weight is module.alias[0]
        assert module[0].weight.abs().max() == 0
    assert module[0].weight is module[1].weight


def test_a_module_used_twice_is_listed_once() -> None:
    shared = nn.Linear(3, 3)
    assert len(ModuleTensors(nn.Sequential(shared, shared)).tensors) == 2


def test_parametrised_weights_are_recomputed_from_the_swapped_tensor() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = nn.Linear(3, 3, bias=False)
    parametrize.register_parametrization(module, "weight", Double())
    weights = ModuleTensors(module)
    (original,) = weights.tensors
    assert original is module.parametrizations.weight.original
    with weights.bind([torch.ones(3, 3)]):
        assert torch.equal(module.weight, torch.full((3, 3), 2.0))
    assert torch.equal(module.weight, 2 * original)


def test_matches_notices_a_replaced_parameter() -> None:
    module = nn.Linear(3, 3)
    weights = ModuleTensors(module)
    assert weights.matches(weights.tensors)
    module.weight = nn.Parameter(torch.zeros(3, 3))
    assert not weights.matches(weights.tensors)


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
