"""Inputs that are no tensors, inference tensors, dtypes that change, batch normalisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, Unrolled

FLOAT = torch.float64


class Plain(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(3, 3)
        nn.init.orthogonal_(self.W.weight, 0.5)

    def inject(self, x: Any) -> Any:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + context)


class Normalised(Plain):
    coupled = True

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, **options)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.norm(self.W(z) + context))


@pytest.mark.parametrize("given", [None, "abc", [1, 2]])
def test_an_input_without_tensors_is_told_as_such(given: object) -> None:
    with pytest.raises(ValueError, match=r"inject must return a tensor, .* type (None|str|list)"):
        Equilibrium(Plain())(given)


def test_weights_that_change_their_dtype_before_backward_are_refused() -> None:
    layer = Equilibrium(Plain()).double()
    loss = layer(torch.randn(4, 3, dtype=FLOAT)).sum()
    layer.float()
    with pytest.raises(RuntimeError, match=r"was torch.float64 and is torch.float32 now"):
        loss.backward()


def test_tensors_made_in_inference_mode_can_be_inputs_and_starts() -> None:
    cell, x = Plain(), torch.randn(4, 3)
    layer = Equilibrium(cell)
    (wanted,) = torch.autograd.grad(layer(x).sum(), cell.W.weight)
    with torch.inference_mode():
        given, start = x * 1, torch.zeros(4, 3)
    (found,) = torch.autograd.grad(layer(given, start).sum(), cell.W.weight)
    torch.testing.assert_close(found, wanted)


def _derivatives(layer: Equilibrium, weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    return g.detach(), *torch.autograd.grad(g.square().sum(), [x, weight])


def test_batch_normalisation_of_a_coupled_step_has_second_derivatives() -> None:
    cell, x = Normalised().double(), torch.randn(8, 3, dtype=FLOAT)
    layer = Equilibrium(cell, tolerance=1e-12)
    exact = _derivatives(layer, cell.W.weight, x)
    unrolled = _derivatives(Equilibrium(cell, gradient=Unrolled(60)), cell.W.weight, x)
    for own, other in zip(exact, unrolled, strict=True):
        torch.testing.assert_close(own, other)
    functional = torch.func.grad(lambda x: layer(x).pow(3).sum())(x)
    torch.testing.assert_close(functional.detach(), exact[0])


def test_batch_normalisation_in_forward_mode_is_refused_while_it_keeps_statistics() -> None:
    x = torch.randn(8, 3)
    with pytest.raises(ValueError, match=r"running statistics .* Use torch.func.vjp or jacrev"):
        torch.func.jvp(Equilibrium(Normalised()), (x,), (x,))
    torch.func.jvp(Equilibrium(Normalised(track_running_stats=False)), (x,), (x,))
