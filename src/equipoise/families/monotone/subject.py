"""What the thesis's statements speak of: a dense monotone network with ReLU and one output."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Subject, count_of
from equipoise.analysis.closed_form import ClosedForm, call_layer, require_closed_form
from equipoise.families.monotone.cell import MonotoneCell, ReflectionCell
from equipoise.families.monotone.dense import MonotoneMatrix
from equipoise.families.monotone.kernel import MonotoneRegression, monotone_forms
from equipoise.layers.equilibrium import Equilibrium
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
        call = call_layer(model, model.equilibrium, x)
        form = _closed_form(model.equilibrium.cell, call.x, model.u[None], None)
        require_closed_form(model.equilibrium, model.equilibrium.cell, call, form)
        network = _copy(model)
        return Case(network, x.double(), y.double().reshape(len(y)), _label(network, x))
    if not (
        isinstance(layer, Equilibrium)
        and isinstance(cell, MonotoneCell)
        and isinstance(cell.operator, MonotoneMatrix)
        and isinstance(cell.activation, ReLU)
        and isinstance(cell.inputs, nn.Linear)
        and isinstance(head, nn.Linear)
    ):
        return None
    call = call_layer(model, layer, x)
    require_closed_form(layer, cell, call, _closed_form(cell, call.x, head.weight, head.bias))
    rows = call.x.double()
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


@torch.no_grad()
def _closed_form(cell: MonotoneCell, x: Tensor, head: Tensor, bias: Tensor | None) -> ClosedForm:
    """A step of the cell's splitting, and the head, that the weights say."""
    operator, inputs = cell.operator, cell.inputs
    assert isinstance(operator, MonotoneMatrix)
    assert isinstance(inputs, nn.Linear)
    A, B, U, H = (one.detach().double() for one in (operator.A, operator.B, inputs.weight, head))
    c = x.double() @ U.T + (0 if inputs.bias is None else inputs.bias.double())
    gap = operator.margin * torch.eye(len(A), dtype=A.dtype, device=A.device) + A.T @ A - B + B.T
    a = cell.effective_step_size()

    def forward_backward(z: Tensor) -> Tensor:
        return torch.relu(z - a * (z @ gap.T - c))

    def reflections(z: Tensor) -> Tensor:
        # `2 relu(z) - z` is |z|; the resolvent is that of a (I - W).
        whole = torch.eye(len(gap), dtype=gap.dtype, device=gap.device) + a * gap
        moved = 2 * torch.linalg.solve(whole, (z.abs() + a * c).T).T - z.abs()
        assert isinstance(cell, ReflectionCell)
        return torch.lerp(z, moved, cell.fraction)

    enlarged = isinstance(cell, ReflectionCell)
    return ClosedForm(
        "a monotone network",
        "relu(W z + U x + b) and a linear head",
        step=reflections if enlarged else forward_backward,
        readout=torch.relu if enlarged else torch.clone,
        head=lambda z: z @ H.T + (0 if bias is None else bias.double()),
    )


def _copy(model: MonotoneRegression) -> MonotoneRegression:
    made = MonotoneRegression(model.U.shape[1], len(model.u), model.operator.margin).double()
    made.load_state_dict(model.state_dict())
    return made.to(model.u.device)


def _label(network: MonotoneRegression, x: Tensor) -> str:
    return f"{count_of(len(network.u), 'unit')}, {count_of(len(x), 'sample')}, first output"


MONOTONE = Subject("a dense monotone network with ReLU and a linear head", _fresh, _adapt)
