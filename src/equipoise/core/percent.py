"""Fractions in percent, as people read them."""

from __future__ import annotations

__all__ = ["to_percent"]


def to_percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction in percent, without the sign; only a fraction of 1 reads as 100.

    Args:
        fraction: A number in [0, 1].
        digits: Digits after the decimal point.
    """
    text = f"{100 * fraction:.{digits}f}"
    if fraction < 1 and float(text) >= 100:
        return f"{100 - 10.0**-digits:.{digits}f}"
    return text
