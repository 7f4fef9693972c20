"""What is proved of a cell's equilibria, and through which bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, overload

from torch import Tensor

from equipoise.core.validate import SettingError

__all__ = ["Certificate", "Factor", "Link", "Statement", "averaged"]

Number = TypeVar("Number", float, Tensor)


@overload
def averaged(lipschitz: float, alpha: float) -> float: ...
@overload
def averaged(lipschitz: Tensor | float, alpha: Tensor | float) -> Tensor | float: ...
def averaged(lipschitz: Tensor | float, alpha: Tensor | float) -> Tensor | float:
    """Return a Lipschitz constant of `alpha f + (1 - alpha) I`, given one of `f`."""
    return alpha * lipschitz + (1 - alpha)


@dataclass(frozen=True)
class Statement:
    """One claim about a cell's equilibria at its present weights, for every input.

    Args:
        claim: What is claimed, in words that follow "it is proved that".
        holds: Whether it is proved; False if it is refuted, None if neither is known.
        number: The number that decides, if there is one.
        margin: How far the number is on the safe side; negative on the other.
        theorem: What the proof rests on.
    """

    claim: str
    holds: bool | None = None
    number: float | None = None
    margin: float | None = None
    theorem: str = ""

    def __str__(self) -> str:
        verdict = {True: "proved", False: "refuted", None: "not proved"}[self.holds]
        number = "" if self.number is None else f", {self.number:.4g}"
        margin = "" if self.margin is None else f" with a margin of {self.margin:.4g}"
        return f"{self.claim}: {verdict}{number}{margin}" + (self.theorem and f" ({self.theorem})")


class Link(NamedTuple):
    """A cell or a wrapper, and the Lipschitz constant of the step up to and including it."""

    name: str
    lipschitz: float


class Factor(NamedTuple):
    """One factor of the innermost cell's Lipschitz constant.

    Attributes:
        name: What it belongs to, such as `layer 1`.
        value: The factor.
        norm: Upper bound of the norm of the weight that it comes from.
    """

    name: str
    value: float
    norm: float


@dataclass(frozen=True)
class Certificate:
    """What is proved of a cell's equilibria at its present weights, for every input.

    Args:
        chain: Upper bounds of the step's Lipschitz constant, from the innermost cell through the
            wrappers around it; infinite from where none is known.
        factors: What the innermost cell's constant is the product of, if anything.
        further: Claims besides that of a contraction.
        basis: What the innermost cell's constant rests on, if not on the factors.
        remedy: What to do where the proof fails, as a sentence.
    """

    chain: tuple[Link, ...] = ()
    factors: tuple[Factor, ...] = ()
    further: tuple[Statement, ...] = ()
    basis: str = ""
    remedy: str = ""

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of the whole step; infinite if none is known."""
        return self.chain[-1].lipschitz if self.chain else math.inf

    @property
    def contracts(self) -> bool:
        """Whether the step contracts: one equilibrium for every input, found by plain iteration."""
        return self.lipschitz < 1

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All claims. That of a contraction is left out where others stand in for its proof."""
        if self.further and not self.contracts:
            return self.further
        known = self.lipschitz < math.inf
        contraction = Statement(
            "the step is a contraction, so that there is one equilibrium for every input",
            holds=True if self.contracts else None,
            number=self.lipschitz if known else None,
            margin=1 - self.lipschitz if known else None,
            theorem="Banach's fixed-point theorem" + (self.basis and f"; {self.basis}"),
        )
        return (contraction, *self.further)

    @property
    def holds(self) -> bool:
        """Whether every statement is proved."""
        return all(statement.holds is True for statement in self.statements)

    def through(self, name: str, lipschitz: float, *, same_equilibria: bool) -> Certificate:
        """Return the certificate of a wrapper around the cell.

        Args:
            name: The wrapper.
            lipschitz: The Lipschitz constant of the step with it.
            same_equilibria: Whether the wrapped cell's equilibria correspond one to one to the
                cell's, so that what is claimed of these stays true.
        """
        further = self.further if same_equilibria else ()
        return replace(self, chain=(*self.chain, Link(name, lipschitz)), further=further)

    def error(self, residual: Number) -> Number:
        """Return a bound of the distance to the equilibrium, `|f(z) - z|/(1 - lipschitz)`.

        Args:
            residual: `|f(z) - z|`, absolute (`Solution.residual` is divided by `|f(z)|`).
        """
        if not self.contracts:
            raise SettingError(
                "Certificate.error",
                "be asked of a contraction",
                self.lipschitz,
                got=f"the Lipschitz constant {self.lipschitz:.6g}",
            )
        return residual / (1 - self.lipschitz)

    def __str__(self) -> str:
        bound = f"at most {_up(self.lipschitz)}" if self.lipschitz < math.inf else "unknown"
        verdict = "one equilibrium for every input" if self.contracts else "not certified"
        stands_in = bool(self.further) and not self.contracts
        lines = [] if stands_in else [f"Lipschitz constant {bound}: {verdict}."]
        lines += map(str, self.further)
        lines += [f"  {self.basis}"] if self.basis else []
        lines += [
            f"  {name}: |W| <= {_up(norm)}, factor {_up(value)}"
            for name, value, norm in self.factors
        ]
        lines += [f"  {name}: {_up(bound)} so far" for name, bound in self.chain[1:]]
        return "\n".join(lines)


def _up(value: float) -> str:
    """Four decimals, rounded up: an upper bound stays one."""
    return f"{math.ceil(value * 1e4) / 1e4:.4f}" if value < math.inf else "unknown"
