"""A proof that a layer contracts, from bounds of its weights' norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from equipoise.families.opteq.layer_problem import changes_of, require_finite, stretch
from equipoise.layers import Cell, ChangeOfVariable, Equilibrium, Regularized

__all__ = ["Certificate", "certify"]

Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Certificate:
    """Proven bounds of a layer at its present weights, for every input.

    Attributes:
        norms: Upper bounds of `|W_l|`.
        factors: Lipschitz constants `alpha_l L_s |W_l|^2/mu + 1 - alpha_l` of the layers.
        changes: What the changes around them do, innermost first: name, and the Lipschitz constant
            so far.
        lipschitz: Lipschitz constant of the whole step; infinite where a part has none that is
            known.
    """

    norms: tuple[float, ...]
    factors: tuple[float, ...]
    changes: tuple[tuple[str, float], ...]
    lipschitz: float

    @property
    def contracts(self) -> bool:
        """Whether the step is a contraction: one equilibrium for every input, and plain iteration finds it."""
        return self.lipschitz < 1

    def error(self, residual: Number) -> Number:
        """Return a bound of the distance to the equilibrium, `|z - z*| <= |f(z) - z|/(1 - lipschitz)`.

        Args:
            residual: `|f(z) - z|`, absolute (`Solution.residual` is divided by `|f(z)|`).
        """
        if not self.contracts:
            raise ValueError(
                "Certificate.error must be asked of a contraction; got the Lipschitz "
                f"constant {self.lipschitz:.6g}."
            )
        return residual / (1 - self.lipschitz)

    def __str__(self) -> str:
        ending = "one equilibrium for every input" if self.contracts else "not certified"
        lines = [f"Lipschitz constant at most {_up(self.lipschitz)}: {ending}."]
        rows = zip(self.norms, self.factors, strict=True)
        lines += [
            f"  layer {place}: |W| <= {_up(norm)}, factor {_up(factor)}"
            for place, (norm, factor) in enumerate(rows, start=1)
        ]
        lines += [f"  {name}: {_up(bound)} so far" for name, bound in self.changes]
        return "\n".join(lines)


def _up(value: float) -> str:
    """Four decimals, rounded up: an upper bound stays one."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if value < math.inf else "unknown"


@torch.no_grad()
def certify(layer: Equilibrium, *, strict: bool = True) -> Certificate:
    """Prove that a layer contracts, so that it has one equilibrium for every input, and return the numbers.

    The step of an OptEq has at most the Lipschitz constant
    `prod_l (alpha_l L_s |W_l|^2/mu + 1 - alpha_l)`. A skip with share `a` makes `L` to
    `a L + 1 - a`; a change of variable multiplies it by its condition number; a regulariser by 1 if
    it is convex and its step a proximal map or short, and by `1 + gamma L_R` otherwise, with `L_R`
    a Lipschitz constant of its gradient.

    Args:
        layer: An `OptEq`, an `OptEqConv2d`, or an `Equilibrium` around an `OptEqCell` with changes.
        strict: Whether to raise `ValueError` where the proof fails, rather than return a
            certificate that does not contract.
    """
    found, cell = changes_of("certify", layer)
    require_finite("certify", cell)
    norms, factors = [], []
    operators = list(cell.operators)
    for operator, weights, activation, alpha in zip(
        operators, cell.effective_weights(), cell.activations, cell.alpha, strict=True
    ):
        norm = float(operator.bound(tuple(weight.double() for weight in weights)))  # type: ignore[operator]
        share = float(alpha)
        norms.append(norm)
        factors.append(share * activation.slopes[1] * norm**2 / cell.mu + 1 - share)
    bound = math.prod(factors)
    changes: list[tuple[str, float]] = []
    for change in found:
        bound = _through(change, bound)
        changes.append((type(change).__name__, bound))
    certificate = Certificate(tuple(norms), tuple(factors), tuple(changes), bound)
    if strict and not certificate.contracts:
        raise ValueError(_refusal(certificate, cell.norm))
    return certificate


def _through(change: Cell, bound: float) -> float:
    if isinstance(change, ChangeOfVariable):
        return bound * stretch(change)[2]
    if isinstance(change, Regularized):
        return math.inf if change.factor is None else bound * change.factor
    share = float(change.alpha)  # type: ignore[arg-type]
    return share * bound + 1 - share


def _refusal(certificate: Certificate, norm: str) -> str:
    product = math.prod(certificate.factors)
    for (name, bound), (_, before) in zip(
        certificate.changes, (("", product), *certificate.changes), strict=False
    ):
        if before < 1 <= bound:
            what = f"{bound:.6g}" if bound < math.inf else "no known constant"
            return (
                f"certify.layer must have a Lipschitz constant below 1; got {before:.6g} for "
                f"its layers but {what} after {name}. "
                "Use a convex regulariser with a proximal map, a smaller strength, or an "
                "orthogonal matrix."
            )
    worst = max(range(len(certificate.factors)), key=lambda layer: certificate.factors[layer])
    remedy = (
        "Call project after each optimiser step."
        if norm == "project"
        else "Use norm='scale', or norm='project' with project."
    )
    return (
        f"certify.layer must have a Lipschitz constant below 1; got {product:.6g}, because "
        f"layer {worst + 1} of "
        f"{len(certificate.factors)} has the factor {certificate.factors[worst]:.6g} (|W| <= "
        f"{certificate.norms[worst]:.6g}). "
        f"{remedy}"
    )
