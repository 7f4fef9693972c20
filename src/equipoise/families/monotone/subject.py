"""What the thesis's statements speak of: a dense monotone network with ReLU and one output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Subject, count_of
from equipoise.core.module_mode import evaluation_mode
from equipoise.families.monotone.cell import MonotoneCell
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.kernel import MonotoneRegression, monotone_forms
from equipoise.prox.activation import ReLU

__all__ = ["MONOTONE", "PAPER"]

PAPER = "Monotone NTK (Nguyen, 2022)"


def _fresh(seed: int) -> Case:
    """A network in the regime of the theorems: a small head, and targets near the predictions."""
    units, samples, inputs = 32, 4, 6
    network = MonotoneRegression(inputs, units).double()
    x = torch.randn(samples, inputs, dtype=torch.float64)
    with torch.no_grad():
        network.u.mul_(1e-3)
        y = monotone_forms(network, x).output + 1e-8 * torch.randn(samples, dtype=torch.float64)
    return Case(network, x, y, f"random, {units} units, {samples} samples, seed {seed}", seed)


def _adapt(model: nn.Module, x: Tensor, y: Tensor) -> Case | None:
    """One dense monotone layer with a linear head; biases are weights of a constant input."""
    layer, head = getattr(model, "equilibrium", None), getattr(model, "head", None)
    cell = getattr(layer, "cell", None)
    if isinstance(model, MonotoneRegression):
        network = _copy(model)
        return Case(network, x.double(), y.double().reshape(len(y)), _label(network, x))
    if not (
        isinstance(cell, MonotoneCell)
        and isinstance(cell.operator, MonotoneMatrix)
        and isinstance(cell.activation, ReLU)
        and isinstance(cell.inputs, nn.Linear)
        and isinstance(head, nn.Linear)
    ):
        return None
    rows = _rows(model, x).double()
    U = cell.inputs.weight.detach().double()
    if cell.inputs.bias is not None:
        U = torch.cat([U, cell.inputs.bias.detach().double()[:, None]], dim=1)
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    network = MonotoneRegression(U.shape[1], len(U), cell.operator.margin).double().to(x.device)
    with torch.no_grad():
        network.operator.A.copy_(cell.operator.A)
        network.operator.B.copy_(cell.operator.B)
        network.U.copy_(U)
        network.u.copy_(head.weight[0])
    target = y.double() if y.is_floating_point() else 2 * (y == 0).double() - 1
    target = target.reshape(len(y), -1)[:, 0]
    if head.bias is not None:
        target = target - head.bias.detach().double()[0]
    return Case(network, rows, target, _label(network, rows))


def _copy(model: MonotoneRegression) -> MonotoneRegression:
    made = MonotoneRegression(model.U.shape[1], len(model.u), model.operator.margin).double()
    made.load_state_dict(model.state_dict())
    return made.to(model.u.device)


def _label(network: MonotoneRegression, x: Tensor) -> str:
    return f"{count_of(len(network.u), 'unit')}, {count_of(len(x), 'sample')}, first output"


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    """What the layer gets for samples."""
    seen: list[Tensor] = []
    layer = model.equilibrium
    assert isinstance(layer, nn.Module)
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        with torch.no_grad(), evaluation_mode(model):
            model(x)
    finally:
        hook.remove()
    return seen[0]


MONOTONE = Subject("a dense monotone network with ReLU and a linear head", _fresh, _adapt)
