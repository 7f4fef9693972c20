"""What OptEq's statements speak of: its layers at some inputs, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Inequality, Subject, count_of
from equipoise.analysis.closed_form import ClosedForm, call_layer, require_closed_form
from equipoise.core.module_mode import evaluation_mode
from equipoise.families.opteq.layer import OptEq, OptEqLayer
from equipoise.families.opteq.potential import Potential
from equipoise.solvers import Newton, Stop, solve

__all__ = [
    "OPTEQ",
    "PAPER",
    "Composition",
    "assumption_2",
    "equilibrium_of",
    "nonexpansive",
    "points",
    "residual_of",
]

PAPER = "OptEq (Xie et al., 2021 and 2023)"
MAX_SAMPLES = 8
"""Samples of a run that are looked at: each check draws several points for each of them."""
SMALL = 1e-9
"""What float64 leaves of an equality, relative to the sizes in it."""


@dataclass(frozen=True)
class Composition:
    """The layers `F_l = alpha_l f_l + (1 - alpha_l) I` of an OptEq at some inputs.

    States are rows, shape (samples, m).

    Attributes:
        potentials: `f_1, ..., f_L`, each the gradient of its potential.
        alphas: `alpha_1, ..., alpha_L`.
        layer: The dense layer that they come from, for statements about its training; None for a
            convolution, or with wrappers around it.
    """

    potentials: tuple[Potential, ...]
    alphas: tuple[float, ...]
    layer: OptEq | None = None

    def apply(self, number: int, z: Tensor) -> Tensor:
        """Return `F_l(z)`, counted from 0."""
        return torch.lerp(z, self.potentials[number].prox(z), self.alphas[number])

    def __call__(self, z: Tensor) -> Tensor:
        """Return `F_L o ... o F_1(z)`."""
        return reduce(lambda w, number: self.apply(number, w), range(len(self.potentials)), z)

    @property
    def start(self) -> Tensor:
        """The state zero."""
        first = self.potentials[0]
        return torch.zeros_like(first.prox(first.adjoint(torch.zeros_like(first.c))))

    @property
    def factor(self) -> float:
        """A proven Lipschitz constant of the composition."""
        value = 1.0
        for potential, alpha in zip(self.potentials, self.alphas, strict=True):
            value *= alpha * potential.smoothness + 1 - alpha
        return value


def equilibrium_of(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return an equilibrium as exact as float64 allows; `residual_of` says how exact.

    Args:
        step: The map.
        start: Where to begin.
    """
    newton = Newton(forcing=1e-2, inner_steps=500)
    found: Tensor = solve(step, start, newton, Stop(1e-13, max_steps=200)).value
    return found


def residual_of(step: Callable[[Tensor], Tensor], z: Tensor) -> Inequality:
    """Return that `z` is an equilibrium of a map, which other claims rest on."""
    size = max(1.0, float(z.norm(dim=1).max()))
    value = float((step(z) - z).norm(dim=1).max()) / size
    return Inequality("|f(z) - z| at the equilibrium that was found", value, "<=", SMALL)


def points(case: Case, count: int = 8) -> list[Tensor]:
    """Return random states around zero, as large as what the layers add to it and larger.

    Args:
        case: The case.
        count: How many.
    """
    composition: Composition = case.network
    start = composition.start
    generator = torch.Generator(start.device).manual_seed(case.seed)
    size = 1 + composition(start).norm(dim=1, keepdim=True) / start.shape[1] ** 0.5
    drawn = [
        torch.randn(start.shape, dtype=start.dtype, device=start.device, generator=generator)
        for _ in range(count)
    ]
    return [scale * size * own for own, scale in zip(drawn, [0.3, 1.0, 3.0] * count, strict=False)]


def nonexpansive(case: Case) -> list[Inequality]:
    """Return what Theorem 1 assumes of each layer: slopes from 0 to `L_s`, `mu >= L_s |W|^2`."""
    composition: Composition = case.network
    slopes = [own.activation.slopes for own in composition.potentials]
    return [
        Inequality("smallest slope of the activation", min(low for low, _ in slopes), ">=", 0.0),
        Inequality(
            "L_s |W|^2/mu, the largest of all layers",
            max(own.smoothness for own in composition.potentials),
            "<=",
            1.0,
            1e-12,
        ),
    ]


def assumption_2(case: Case) -> list[Inequality]:
    """Return what Assumption 2 says, for any `mu`, and that `alpha` is a fraction."""
    alphas = case.network.alphas
    return [
        *nonexpansive(case),
        Inequality("smallest alpha", min(alphas), ">", 0.0),
        Inequality("largest alpha", max(alphas), "<=", 1.0),
    ]


def _fresh(seed: int) -> Case:
    layer = OptEq(5, 6, [8, 7], alpha=0.8, norm="none").double()
    for operator in layer.layers.operators:
        weight: Any = operator.weight
        with torch.no_grad():
            weight.mul_(0.95 / torch.linalg.matrix_norm(weight, 2))
    x = torch.randn(4, 5, dtype=torch.float64)
    y = torch.randn(4, dtype=torch.float64)
    return Case(_read(layer, x), x, y, f"random, two layers, 4 samples, seed {seed}", seed)


def _read(layer: OptEqLayer, x: Tensor) -> Composition:
    cell = layer.layers
    potentials = cell.potentials(x)
    for potential in potentials:
        potential.sharpen()
    own = layer if isinstance(layer, OptEq) and layer.cell is cell else None
    return Composition(tuple(potentials), tuple(float(alpha) for alpha in cell.alpha), own)


@torch.no_grad()
def _adapt(model: nn.Module, x: Tensor, y: Tensor) -> Case | None:
    layers = [own for own in model.modules() if isinstance(own, OptEqLayer)]
    if len(layers) != 1:
        return None
    (layer,) = layers
    call = call_layer(model, layer, x[:MAX_SAMPLES])
    with evaluation_mode(layer):
        composition = _read(layer, call.x)
    form = ClosedForm("an OptEq", "W^T s(W z + U x + b)/mu", composition)
    require_closed_form(layer, layer.layers, call, form)
    count = len(layer.layers.operators)
    what = "without its regulariser" if layer.cell is not layer.layers else "as it is"
    label = f"{count_of(count, 'layer')} {what}, {count_of(len(call.x), 'sample')}"
    targets = y[:MAX_SAMPLES].double()
    return Case(composition, call.x.double(), targets, label)


OPTEQ = Subject("an OptEq network", _fresh, _adapt)
