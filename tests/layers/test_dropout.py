"""Dropout with one mask for a whole solve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Unrolled, VariationalDropout
from equipoise.families.residual import ResidualCell


class Masked(Cell):
    """`tanh(W m z + x)`, which keeps what masks its step was given."""

    def __init__(self, *, probability: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        nn.init.normal_(self.linear.weight, std=0.15)
        self.dropout = VariationalDropout(probability)
        self.seen: list[Tensor | None] = []

    def inject(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, self.dropout.draw(x, 6)

    def initial(self, x: Tensor, context: tuple[Tensor, Tensor | None]) -> Tensor:
        return torch.zeros_like(x)

    def step(self, z: Tensor, context: tuple[Tensor, Tensor | None]) -> Tensor:
        x, mask = context
        self.seen.append(mask)
        return torch.tanh(self.linear(self.dropout(z, mask)) + x)


def test_mask_is_the_same_in_all_steps_and_in_backward() -> None:
    torch.manual_seed(0)
    cell = Masked().double()
    layer = Equilibrium(cell, "fixed_point", tolerance=1e-10)
    layer(torch.randn(1, 6, dtype=torch.float64)).sum().backward()
    masks = [mask for mask in cell.seen if mask is not None]
    assert len(masks) == len(cell.seen) > 5
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert set(masks[0].flatten().tolist()) == {0.0, 2.0}


def test_masks_of_samples_differ_and_evaluation_has_none() -> None:
    torch.manual_seed(0)
    dropout, x = VariationalDropout(0.5), torch.randn(8, 3)
    mask = dropout.draw(x, 20, 1)
    assert mask is not None
    assert mask.shape == (8, 20, 1)
    assert len(mask.unique(dim=0)) == 8
    assert dropout.eval().draw(x, 20, 1) is None
    assert dropout(x, None) is x
    assert VariationalDropout(0.0).draw(x, 20) is None


def test_gradient_of_a_masked_residual_cell_is_that_of_its_unrolled_steps() -> None:
    torch.manual_seed(0)
    cell = ResidualCell(4, 4, groups=2, dropout=0.5).double()
    with torch.no_grad():
        cell.norm3.weight.fill_(0.3)  # so that many steps come close to the equilibrium
    x, grads = torch.randn(3, 4, 4, 4, dtype=torch.float64), []
    for gradient in ("implicit", Unrolled(80)):
        layer = Equilibrium(cell, "anderson", gradient, tolerance=1e-9, on_failure="raise")
        torch.manual_seed(5)  # of the mask
        grads.append(torch.autograd.grad(layer(x).pow(3).sum(), cell.conv2.weight)[0])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-8)
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)


def test_dropout_refuses_to_drop_everything() -> None:
    with pytest.raises(ValueError, match=r"VariationalDropout.probability must be in \[0, 1\)"):
        VariationalDropout(1.0)
