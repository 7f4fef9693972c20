"""What the paper's statements speak of: a network with one output, in double precision."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Subject, count_of
from equipoise.analysis.closed_form import ClosedForm, call_layer, require_closed_form
from equipoise.families.relu_implicit.network import ReluImplicitNetwork
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions

__all__ = ["PAPER", "RELU_IMPLICIT", "exact_network"]

PAPER = "ReLU-implicit (Gao et al., 2022)"

EXACT: SolveOptions = {
    "solver": "fixed_point",
    "tolerance": 1e-13,
    "max_steps": 2000,
    "on_failure": "ignore",
}
"""Solved until rounding is all that is left; a network without equilibria is told by its checks."""


def exact_network(network: ReluImplicitNetwork) -> ReluImplicitNetwork:
    """Return a copy with its first output alone, in float64, whose equilibria are exact.

    Args:
        network: The network, which stays as it is.
    """
    made = copy.deepcopy(network).double()
    made.equilibrium = Equilibrium(made.cell, **EXACT)
    made.u = nn.Parameter(made.u.detach()[:1].clone())
    made.v = nn.Parameter(made.v.detach()[:1].clone())
    return made


def _fresh(seed: int) -> Case:
    """A network in the regime of the theorems: few samples, and targets near the predictions.

    The width that the theorems ask for grows with `|y - yhat(0)|^2`, and would otherwise be beyond
    all memory.
    """
    width, samples, inputs = 256, 4, 16
    network = exact_network(ReluImplicitNetwork((inputs,), width, gamma=0.1))
    x = nn.functional.normalize(torch.randn(samples, inputs, dtype=torch.float64))
    with torch.no_grad():
        y = network(x)[:, 0] + 1e-4 * torch.randn(samples, dtype=torch.float64)
    return Case(network, x, y, f"random, {width} units, {samples} samples, seed {seed}", seed)


def _adapt(model: nn.Module, x: Tensor, y: Tensor) -> Case | None:
    if not isinstance(model, ReluImplicitNetwork):
        return None
    call = call_layer(model, model.equilibrium, x)
    require_closed_form(model.equilibrium, model.cell, call, _closed_form(model, call.x))
    network = exact_network(model)
    rows = network.prepare(x.double())
    output = "" if len(model.u) == 1 else ", first output"
    label = f"{count_of(model.cell.width, 'unit')}, {count_of(len(rows), 'sample')}{output}"
    return Case(network, rows, _targets(y, len(model.u)), label)


def _closed_form(model: ReluImplicitNetwork, x: Tensor) -> ClosedForm:
    """The step and the head that the weights say, at inputs of the layer."""
    A, V, u, v = (one.detach().double() for one in (model.cell.A, model.cell.V, model.u, model.v))
    phi = torch.relu(x.double() @ V.T) / math.sqrt(len(A))
    scale = model.cell.gamma / math.sqrt(len(A))
    return ClosedForm(
        "an implicit ReLU network",
        "relu((gamma/sqrt(m)) A z + phi), and of u^T z + v^T phi,",
        step=lambda z: torch.relu(scale * z @ A.T + phi),
        head=lambda z: z @ u.T + phi @ v.T,
    )


def _targets(y: Tensor, outputs: int) -> Tensor:
    """The targets of the first output: -1 and 1 for classes, as in training."""
    if y.is_floating_point():
        return y.double().reshape(len(y), -1)[:, 0]
    wanted = y == (1 if outputs == 1 else 0)
    return 2 * wanted.double() - 1


RELU_IMPLICIT = Subject("an implicit ReLU network", _fresh, _adapt)
