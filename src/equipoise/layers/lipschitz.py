"""How far an output moves with its input: what modules and cells say of it, as an expression.

A module says so by a method `output_lipschitz()`, which returns a `Part`: a number that it has
proved (`Bound`), modules to be asked in turn, and what is made of them by composing (`Chain`) and
adding (`Sum`). `equipoise.analysis.lipschitz_bound` reads the expression.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

from torch import nn

from equipoise.core.validate import require_between

__all__ = [
    "Bound",
    "Chain",
    "Part",
    "Sum",
    "reciprocal_up",
    "round_up",
    "unknown",
]

ROUNDING = 1e-13
"""Far more, relatively, than what a few products and roots lose in float64."""


def round_up(value: float) -> float:
    """Return a number above what a few exact operations would have given in place of `value`."""
    return value * (1 + ROUNDING)


def reciprocal_up(value: float) -> float:
    """Return the smallest float that is not below `1/value`."""
    found = 1 / value
    return found if Fraction(found) * Fraction(value) >= 1 else math.nextafter(found, math.inf)


@dataclass(frozen=True)
class Bound:
    """A proven number `L` with `|f(x) - f(y)| <= L |x - y|` for all `x` and `y`, Euclidean norms.

    Args:
        name: What `f` is.
        value: `L`, rounded up; infinite if none is known.
        theorem: What the proof rests on; where none is known, why.
    """

    name: str
    value: float
    theorem: str = ""

    def __post_init__(self) -> None:
        require_between(f"{self.name}.lipschitz", self.value, 0, math.inf)


@dataclass(frozen=True)
class Chain:
    """One part after the other, the first one first: constants are multiplied.

    Args:
        parts: The parts.
    """

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sum:
    """The sum of what parts make of the same input: constants are added.

    Args:
        parts: The parts.
        name: What adds them.
    """

    parts: tuple[Part, ...]
    name: str = "sum"


Part = Union[nn.Module, Bound, Chain, Sum]  # noqa: UP007  # evaluated at run time, before Bound is known


def unknown(name: str, reason: str) -> Bound:
    """Return a bound that says that none is known.

    Args:
        name: Of what.
        reason: Why, worded to follow the name.
    """
    return Bound(name, math.inf, reason)
