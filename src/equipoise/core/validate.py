"""Checks of the numbers that users give, with one sentence for what is wrong."""

from __future__ import annotations

import math

__all__ = ["require_count", "require_fraction", "require_positive"]


def require_positive(owner: str, value: object, *, or_zero: bool = False) -> None:
    """Raise unless `value` is a finite number greater than 0, or 0 where that is allowed."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (0 < value < math.inf or (or_zero and value == 0))):  # type: ignore[operator]
        raise ValueError(
            f"{owner} must be {'zero or ' if or_zero else ''}a positive number; got {value!r}."
        )


def require_count(owner: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{owner} must be a whole number of at least 1; got {value!r}.")


def require_fraction(owner: str, value: float) -> None:
    """Raise unless `value` lies in (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"{owner} must be in (0, 1]; got {value}.")
