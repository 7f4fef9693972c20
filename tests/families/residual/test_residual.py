"""The residual DEQ and its weight-tied twin."""

from __future__ import annotations

import pytest
import torch

from equipoise import Equilibrium, Unrolled, create_model
from equipoise.families.residual import ResidualCell, WeightTied


def _cell() -> ResidualCell:
    return ResidualCell(2, 4, groups=2, deviation=0.05)


def test_residual_cell_is_the_printed_formula() -> None:
    torch.manual_seed(0)
    cell, z, x = _cell(), torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)
    inner = cell.norm1(torch.relu(cell.conv1(z)))
    expected = cell.norm3(torch.relu(z + cell.norm2(x + cell.conv2(inner))))
    torch.testing.assert_close(cell(z, cell.inject(x)), expected)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_weight_tied_network_is_the_unrolled_equilibrium(checkpoint: bool) -> None:
    torch.manual_seed(0)
    cell, x = _cell(), torch.randn(2, 2, 3, 3)
    tied = WeightTied(cell, 6, checkpoint=checkpoint)
    layer = Equilibrium(cell, gradient=Unrolled(6), on_failure="ignore")
    weight = cell.conv1.weight
    torch.testing.assert_close(tied(x), layer(x))
    own, other = (torch.autograd.grad(net(x).pow(3).sum(), weight)[0] for net in (tied, layer))
    torch.testing.assert_close(own, other)


def test_weight_tied_network_has_the_size_of_the_residual_deq() -> None:
    tied, deq = create_model("weight-tied-cifar10"), create_model("residual-deq-cifar10")
    assert tied.parameter_counts()["total"] == deq.parameter_counts()["total"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inner": 7}, r"ResidualCell.inner must be a multiple of groups, 8; got 7"),
        ({"deviation": 0.0}, r"ResidualCell.deviation must"),
    ],
)
def test_residual_deq_refuses_nonsense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("residual-deq-cifar10", **options)
