"""The cell of Lipschitz-bounded networks: a splitting, and a linear read-out that it knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.families.lipschitz.matrix import LipschitzMatrix
from equipoise.families.monotone import Splitting
from equipoise.families.monotone.cell import StepSize, monotone_cell
from equipoise.families.monotone.sensitivity import Ellipsoid, find_weights
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement
from equipoise.layers.lipschitz import Bound, Part, round_up, unknown
from equipoise.layers.problem import Problem
from equipoise.operators import dense_norm
from equipoise.prox.activation import Activation
from equipoise.solvers.problem import Linearization

__all__ = ["LipschitzCell", "WeightedInclusion"]


@dataclass(frozen=True)
class WeightedInclusion(Problem):
    """`0 in (I - W) z - U x - b + dphi(z)`, monotone in the metric of `Psi`.

    Args:
        margin: `m`.
        activation: `s`.
    """

    margin: float
    activation: Activation

    def describe(self) -> str:
        return (
            "The equilibrium is the one zero of (I - W) z - U x - b + dphi(z), where "
            f"{type(self.activation).__name__} is the proximal map of phi and "
            f"Psi (I - W) + (I - W)^T Psi >= {2 * self.margin:g} Psi: monotone in the metric of "
            "the diagonal matrix Psi. No function falls along the way, because W is not symmetric."
        )


class LipschitzCell(Cell):
    """`z = s(W z + U x + b)`, read out as `y = W_o z + b_o` (Revay, Wang & Manchester, 2020).

    `W` is made of `U` and `W_o`, so that `y` is Lipschitz continuous in `x` with the constant
    `gamma`; see `LipschitzMatrix`. The equilibrium is found by a splitting of monotone networks.

    Args:
        operator: `W`, with `U` and `W_o`.
        activation: `s`, elementwise with slopes in [0, 1].
        splitting: Its name.
        step_size: That of the splitting, or `auto`.
        bias: Whether there are `b` and `b_o`.
    """

    linearize_keeps_graph = True

    def __init__(
        self,
        operator: LipschitzMatrix,
        activation: Activation,
        splitting: Splitting = "peaceman-rachford",
        step_size: StepSize = "auto",
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        # U belongs to the operator, and the inner cell takes U x + b.
        self.inner = monotone_cell(
            "LipschitzBounded", operator, nn.Identity(), activation, splitting, step_size
        )
        self.b = nn.Parameter(torch.zeros(len(operator.U))) if bias else None
        self.b_o = nn.Parameter(torch.zeros(len(operator.W_o))) if bias else None

    @property
    def operator(self) -> LipschitzMatrix:
        """`W`."""
        operator = self.inner.operator
        assert isinstance(operator, LipschitzMatrix)
        return operator

    @property
    def gamma(self) -> float:
        """The Lipschitz constant."""
        return self.operator.gamma

    def inject(self, x: Tensor) -> Any:
        self.operator.check(x)
        return self.inner.inject(functional.linear(x, self.operator.U, self.b))

    def initial(self, x: Tensor, context: Any) -> Tensor:
        start: Tensor = self.inner.initial(x, context)
        return start

    def step(self, z: Tensor, context: Any) -> Tensor:
        new: Tensor = self.inner.step(z, context)
        return new

    def linearize(self, z: Tensor, context: Any) -> Linearization | None:
        return self.inner.linearize(z, context)

    def readout(self, z: Tensor, context: Any) -> Tensor:
        """Return `y`."""
        return functional.linear(self.inner.readout(z, context), self.operator.W_o, self.b_o)

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return that there is one equilibrium, and that the output has the constant `gamma`."""
        lowest, margin = self.operator.inequality()
        # The splitting's factor is one in the metric of Psi.
        euclidean = self.inner.factor_bound() * self.operator.condition()
        return Certificate(
            (Link(type(self).__name__, euclidean),),
            further=(
                Statement(
                    "I - W is strongly monotone in the metric of Psi, so that there is one "
                    "equilibrium for every input",
                    holds=True if margin > 0 else None,
                    margin=margin,
                    theorem="Revay, Wang & Manchester, 2020",
                    unique=True,
                ),
                Statement(
                    "the output is Lipschitz continuous in x with the constant gamma",
                    holds=True if lowest > 0 else None,
                    number=self.gamma,
                    theorem="Revay, Wang & Manchester, 2020; the smallest eigenvalue of the matrix "
                    f"inequality is {lowest:.2g}",
                ),
            ),
            remedy="Raise margin, or convert the layer to float64.",
        )

    @torch.no_grad()
    def output_lipschitz(self) -> Part:
        """Return `gamma`, if the matrix inequality is proved."""
        name = type(self).__name__
        if not self.operator.inequality().lowest > 0:
            return unknown(name, "its matrix inequality is not proved at these weights")
        return Bound(name, self.gamma, "Revay, Wang & Manchester, 2020")

    @torch.no_grad()
    def row_lipschitz(self, rows: Tensor) -> Tensor | None:
        """Return the bounds of `Ellipsoid` for functions of the output, where `gamma` is more."""
        operator = self.operator
        gap, U, W_o = operator.gap_matrix(), operator.U.double(), operator.W_o.double()
        pulled = rows @ W_o
        weights = find_weights(gap, U, pulled, operator.log_psi)
        found = Ellipsoid.make(gap, U, weights) or Ellipsoid.make(gap, U, operator.log_psi.double())
        return None if found is None else found.rows(pulled)

    @torch.no_grad()
    def error_factor(self) -> float:
        """Return `|W_o| sqrt(max/min Psi)/(1 - L)`, `L` the splitting's factor in `Psi`'s metric.

        The proximal map is nonexpansive in Euclidean norms, as it acts on entries.
        """
        factor = round_up(self.inner.factor_bound())
        if not factor < 1:
            return math.inf
        size = float(dense_norm(self.operator.W_o.double())) * self.operator.condition()
        return round_up(size / (1 - factor))

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return a bound of `|I - W|` in the metric of `Psi`."""
        return {"I - W": self.operator.gap_bound()}

    def problem(self, x: Tensor) -> WeightedInclusion:
        """Return the monotone inclusion at the input `x`."""
        self.operator.check(x)
        return WeightedInclusion(self.operator.margin, self.inner.activation)
