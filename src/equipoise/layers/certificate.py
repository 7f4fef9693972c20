"""What is proved of a cell's equilibria, and through which bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import NamedTuple, TypeVar, overload

from torch import Tensor

from equipoise.core.validate import SettingError, require_between, require_flag

__all__ = ["Certificate", "Factor", "Link", "Statement", "averaged", "significant"]

Number = TypeVar("Number", float, Tensor)

MAX_DIGITS = 17  # that a float has
MAX_FIXED = 1e6  # from where numbers are printed with an exponent


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
        unique: Whether the claim implies that there is exactly one equilibrium for every input.
            Only such claims survive a one-to-one change of the equilibria, and prove what
            `certify` asks for.
    """

    claim: str
    holds: bool | None = None
    number: float | None = None
    margin: float | None = None
    theorem: str = ""
    unique: bool = False

    def __post_init__(self) -> None:
        if not (self.holds is None or isinstance(self.holds, bool)):
            raise SettingError("Statement.holds", "be True, False or None", self.holds)
        require_flag("Statement.unique", self.unique)

    @property
    def verdict(self) -> str:
        """`holds`, `fails` or `unknown`."""
        return {True: "holds", False: "fails", None: "unknown"}[self.holds]

    def __str__(self) -> str:
        verdict = {True: "proved", False: "refuted", None: "not proved"}[self.holds]
        number = "" if self.number is None else f", {significant(self.number)}"
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
        rate: What is proved of how fast the layer's solver is, if anything.
    """

    chain: tuple[Link, ...] = ()
    factors: tuple[Factor, ...] = ()
    further: tuple[Statement, ...] = ()
    basis: str = ""
    remedy: str = ""
    rate: Statement | None = None

    def __post_init__(self) -> None:
        for name, lipschitz in self.chain:
            require_between(f"{name}.lipschitz", lipschitz, 0, math.inf)

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
        rate = () if self.rate is None else (self.rate,)
        if self._others_stand_in:
            return (*self.further, *rate)
        known = self.lipschitz < math.inf
        contraction = Statement(
            "the step is a contraction, so that there is one equilibrium for every input",
            holds=True if self.contracts else None,
            number=self.lipschitz if known else None,
            margin=1 - self.lipschitz if known else None,
            theorem="Banach's fixed-point theorem" + (self.basis and f"; {self.basis}"),
            unique=True,
        )
        return (contraction, *self.further, *rate)

    @property
    def holds(self) -> bool:
        """Whether it is proved that there is one equilibrium for every input, and nothing refuted.

        The proof is that of a contraction, or of another statement that is `unique`. Statements
        that are neither proved nor refuted do not matter beside it.
        """
        proved = any(one.unique and one.holds is True for one in self.statements)
        return proved and all(one.holds is not False for one in self.statements)

    @property
    def _others_stand_in(self) -> bool:
        """Whether there is no contraction, but another claim that there is one equilibrium."""
        return not self.contracts and any(one.unique for one in self.further)

    def through(self, name: str, lipschitz: float, *, same_equilibria: bool) -> Certificate:
        """Return the certificate of a wrapper around the cell.

        Args:
            name: The wrapper.
            lipschitz: The Lipschitz constant of the step with it.
            same_equilibria: Whether the wrapped cell's equilibria correspond one to one to the
                cell's, so that there is still one for every input if there was; other claims,
                about their values or the step, may no longer be true and are dropped.
        """
        further = tuple(one for one in self.further if one.unique) if same_equilibria else ()
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
                got=f"the Lipschitz constant {significant(self.lipschitz, 6)}",
            )
        return residual / (1 - self.lipschitz)

    def __str__(self) -> str:
        bound = f"at most {_up(self.lipschitz)}" if self.lipschitz < math.inf else "unknown"
        verdict = "one equilibrium for every input" if self.contracts else "not certified"
        lines = [] if self._others_stand_in else [f"Lipschitz constant {bound}: {verdict}."]
        lines += map(str, self.further)
        lines += [f"  {self.basis}"] if self.basis else []
        lines += [
            f"  {name}: |W| <= {_up(norm)}, factor {_up(value)}"
            for name, value, norm in self.factors
        ]
        lines += [f"  {name}: {_up(bound)} so far" for name, bound in self.chain[1:]]
        return "\n".join(lines)


def significant(value: float, digits: int = 4, *, up: bool = False, down: bool = False) -> str:
    """Return a number in a few digits, or as many as tell it from 1, which decides a proof.

    Args:
        value: The number.
        digits: How many significant digits, if they tell it from 1.
        up: Whether to round up, so that an upper bound stays one.
        down: Whether to round down, so that a lower bound stays one.
    """
    value = float(value)
    if not math.isfinite(value):
        return f"{value}"
    rounding = ROUND_CEILING if up else ROUND_FLOOR if down else ROUND_HALF_EVEN
    exact = Decimal(repr(value))
    for some in range(digits, MAX_DIGITS):
        rounded = float(Context(prec=some, rounding=rounding).plus(exact))
        if value == 1 or (rounded - 1) * (value - 1) > 0:
            return f"{rounded:.{some}g}"
    return repr(value)


def _up(value: float) -> str:
    """Four decimals or more, rounded up: an upper bound stays one, and one below 1 stays below."""
    if not abs(value) < math.inf:
        return "unknown"
    if abs(value) >= MAX_FIXED:
        return significant(value, 5, up=True)
    exact = Decimal(repr(float(value)))
    for places in range(4, MAX_DIGITS):
        rounded = exact.quantize(Decimal(1).scaleb(-places), ROUND_CEILING)
        if rounded < 1 or value >= 1:
            return f"{rounded:f}"
    return repr(value)
