"""Cells whose equilibria restore images: proximal gradient and gradient descent, with learnt R."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from equipoise.core.transforms import is_wrapped
from equipoise.core.validate import require_positive, require_type
from equipoise.families.imaging.network import ResidualNetwork
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Factor, Link, Statement, significant
from equipoise.layers.problem import Problem
from equipoise.operators.degradation import Degradation

__all__ = ["GradientCell", "ImagingCell", "ImagingProblem", "ProximalCell"]

CONTRACTION = 0.995
"""What the projection keeps the Lipschitz constant below, where that is possible."""

Context = tuple[Tensor, ...]


@dataclass(frozen=True)
class ImagingProblem(Problem):
    """The equation that a restored image solves.

    Args:
        equation: The equation.
        degradation: `A`.
    """

    equation: str
    degradation: Degradation

    def describe(self) -> str:
        return (
            f"The restored image is a zero of {self.equation}, where A is "
            f"{type(self.degradation).__name__} and R a network. No function falls along the way, "
            "because R need not be a gradient."
        )


class ImagingCell(Cell):
    """What both cells have: a degradation `A`, a network `R`, the weight of what was observed.

    Args:
        degradation: `A`.
        network: `N = R - I`.
        weight: The first weight of `A^T (A z - y)`, which is learnt.

    Shape:
        Observations and state (batch, channels, height, width).
    """

    theorem: ClassVar[str]
    equation: ClassVar[str]

    def __init__(self, degradation: Degradation, network: ResidualNetwork, weight: float) -> None:
        super().__init__()
        owner = type(self).__name__
        require_type(f"{owner}.degradation", degradation, Degradation, "a Degradation")
        require_type(f"{owner}.network", network, ResidualNetwork, "a ResidualNetwork")
        require_positive(f"{owner}.weight", weight)
        self.degradation = degradation
        self.network = network
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))
        self._spectrum = _Spectrum()
        self.smallest, self.largest = self._spectrum.find(degradation)

    @property
    def weight(self) -> Tensor:
        """The weight of what was observed, positive."""
        return self.log_weight.exp()

    def _look_at_degradation(self) -> None:
        """Find the range of the eigenvalues of `A^T A` again, if `A` is another one by now."""
        if not any(is_wrapped(weight) for weight in self.degradation.weights()):
            self.smallest, self.largest = self._spectrum.find(self.degradation)

    def inject(self, y: Tensor) -> Context:
        self.degradation.check(y)
        self._look_at_degradation()
        own = self.degradation.weights_for(y)
        turned = self.degradation.transposed(own or self.degradation.weights())
        return (self.degradation.adjoint_with(turned, y), *own)

    def initial(self, x: Tensor, context: Context) -> Tensor:
        return context[0]

    def misfit(self, z: Tensor, context: Context) -> Tensor:
        """Return `A^T (A z - y)`, the gradient of `|A z - y|^2 / 2`.

        Args:
            z: The state.
            context: What `inject` returned.
        """
        weights = context[1:] or self.degradation.weights()
        turned = self.degradation.transposed(weights)
        seen = self.degradation.apply_with(weights, z)
        return self.degradation.adjoint_with(turned, seen) - context[0]

    @property
    def projects(self) -> bool:
        return True

    @torch.no_grad()
    def project_(self) -> None:
        """Bring the network below its `epsilon`, and the weight to where the theorem applies."""
        self._look_at_degradation()
        self.network.project_()
        low, high = self.weight_range(self.network.epsilon)
        self.log_weight.clamp_(math.log(low) if low > 0 else None, math.log(high))

    def weight_range(self, epsilon: float) -> tuple[float, float]:
        """Return the smallest and the largest weight that are allowed.

        The smallest is 0 where none makes the step a contraction, or all do.

        Args:
            epsilon: A Lipschitz constant of `N`.
        """
        raise NotImplementedError  # abstract

    def rate(self, epsilon: float) -> float:
        """Return a Lipschitz constant of the step in the state.

        Args:
            epsilon: A Lipschitz constant of `N`.
        """
        raise NotImplementedError  # abstract

    def condition(self) -> tuple[str, float]:
        """Return the theorem's condition in words, and the number that `epsilon` must be below."""
        raise NotImplementedError  # abstract

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return whether the step contracts, by the theorem of the paper."""
        self._look_at_degradation()
        factors = self.network.factors()
        epsilon = math.prod(factor.value for factor in factors)
        words, least = self.condition()
        further = Statement(
            f"R - I is Lipschitz continuous with a constant below {words}",
            holds=True if epsilon < least else None,
            number=epsilon,
            margin=least - epsilon,
            theorem=self.theorem,
        )
        return Certificate(
            (Link(type(self).__name__, self.rate(epsilon)),),
            factors=(),
            further=(further,),
            basis=f"{self.theorem}, with {_describe(factors)}",
            remedy=self.remedy,
        )

    remedy: ClassVar[str]

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return bounds of the norms of the network's convolutions."""
        return {name: norm for name, _, norm in self.network.factors()}

    def problem(self, x: Tensor) -> ImagingProblem:
        """Return the equation that is solved for the observations `x`."""
        self.degradation.check(x)
        return ImagingProblem(self.equation, self.degradation)


class ProximalCell(ImagingCell):
    """`z = R(z - eta A^T (A z - y))`: equilibrium proximal gradient (DE-Prox).

    Gilton, Ongie & Willett, 2021: a network in the place of a proximal map. `R - I` is
    Lipschitz continuous with `epsilon`, the eigenvalues of `A^T A` lie in `[mu, L]`, and so the
    step is with `(1 + epsilon) max(|1 - eta mu|, |1 - eta L|)` (Theorem 2). That is never below 1
    where `mu = 0`, as it is with missing pixels. The step size `eta` is learnt.
    """

    theorem = "Gilton, Ongie & Willett, 2021, Theorem 2"
    equation = "R(z - eta A^T (A z - y)) - z"
    remedy = (
        "Lower epsilon, or use GradientCell, which needs no lower bound of the eigenvalues of "
        "A^T A."
    )

    def step(self, z: Tensor, context: Context) -> Tensor:
        moved = z - self.weight * self.misfit(z, context)
        value: Tensor = moved + self.network(moved - self.network.centre)
        return value

    def weight_range(self, epsilon: float) -> tuple[float, float]:
        high = 1 / self.largest
        low = (1 - CONTRACTION / (1 + epsilon)) / self.smallest if self.smallest > 0 else math.inf
        return (low if low <= high else 0.0), high

    def _shrinkage(self) -> float:
        eta = float(self.weight)
        return max(abs(1 - eta * self.smallest), abs(1 - eta * self.largest))

    def rate(self, epsilon: float) -> float:
        return (1 + epsilon) * self._shrinkage()

    def condition(self) -> tuple[str, float]:
        shrinkage = self._shrinkage()
        least = 1 / shrinkage - 1 if shrinkage > 0 else math.inf
        return f"1/max(|1 - eta mu|, |1 - eta L|) - 1 = {significant(least)}", least


class GradientCell(ImagingCell):
    """`z = z - eta (tau A^T (A z - y) + R(z))`: descent along a learnt regulariser (DE-Grad).

    Gilton, Ongie & Willett, 2021, with a learnt weight `tau`, which is 1 in the paper. Here
    `R(z) = z - c + N(z - c)`, so that what nothing is known of becomes the grey `c`. `R - I` is
    Lipschitz continuous with `epsilon`, the eigenvalues of `A^T A` lie in `[mu, L]`, and so the
    step is with

        max(|1 - eta (1 + tau mu)|, |1 - eta (1 + tau L)|) + eta epsilon,

    which is Theorem 1 for `eta < 1/(1 + tau L)`. The step contracts if `epsilon < 1 + tau mu`,
    hence for every `A` if `epsilon < 1`. Equilibria do not depend on `eta`, so it is the best one,
    `2/(2 + tau (mu + L))`, which makes both terms of the maximum equal.
    """

    theorem = "Gilton, Ongie & Willett, 2021, Theorem 1"
    equation = "tau A^T (A z - y) + R(z)"
    remedy = "Lower epsilon below 1."

    def __init__(self, degradation: Degradation, network: ResidualNetwork, weight: float) -> None:
        super().__init__(degradation, network, weight)
        network.begin_at_(-1)  # R is next to nothing, and what was observed is kept

    def step(self, z: Tensor, context: Context) -> Tensor:
        tau = self.weight
        eta = 2 / (2 + tau * (self.smallest + self.largest))
        away = z - self.network.centre
        value: Tensor = z - eta * (tau * self.misfit(z, context) + away + self.network(away))
        return value

    def weight_range(self, epsilon: float) -> tuple[float, float]:
        if epsilon < 1 or self.smallest == 0:
            return 0.0, MAX_WEIGHT
        return (epsilon / CONTRACTION - 1) / self.smallest, MAX_WEIGHT

    def rate(self, epsilon: float) -> float:
        tau = float(self.weight)
        eta = 2 / (2 + tau * (self.smallest + self.largest))
        ends = (abs(1 - eta * (1 + tau * end)) for end in (self.smallest, self.largest))
        return max(ends) + eta * epsilon

    def condition(self) -> tuple[str, float]:
        least = 1 + float(self.weight) * self.smallest
        return f"1 + tau mu = {significant(least)}", least


class _Spectrum:
    """Remembers the range of the eigenvalues of `A^T A` as long as `A` stays the same."""

    def __init__(self) -> None:
        self._known: tuple[Degradation, list[Tensor], tuple[float, float]] | None = None

    def __reduce__(self) -> tuple[type[_Spectrum], tuple[()]]:
        return _Spectrum, ()  # copies of a cell begin anew

    @torch.no_grad()
    def find(self, degradation: Degradation) -> tuple[float, float]:
        """Return bounds of the eigenvalues, from below and from above."""
        weights = degradation.weights()
        if any(weight.is_meta for weight in weights):  # without values
            return 0.0, math.inf
        if self._known is not None:
            last, values, bounds = self._known
            if last is degradation and all(map(_is_equal, values, weights)):
                return bounds
        bounds = degradation.gram_bounds()
        self._known = degradation, [weight.clone() for weight in weights], bounds
        return bounds


def _is_equal(one: Tensor, other: Tensor) -> bool:
    kinds = ((own.dtype, own.device, own.shape) for own in (one, other))
    return len(set(kinds)) == 1 and torch.equal(one, other)


MAX_WEIGHT = 1e4
"""Of what was observed; beyond it, the rest of the equation does not count in float32."""


def _describe(factors: tuple[Factor, ...]) -> str:
    epsilon = math.prod(factor.value for factor in factors)
    product = " x ".join(significant(factor.value, 3, up=True) for factor in factors)
    return f"epsilon = {product} = {significant(epsilon, up=True)}"
