"""Numbers as people read them on a page, with narrow spaces that do not break."""

from __future__ import annotations

import math

from equipoise.core import to_percent

__all__ = [
    "DASH",
    "format_count",
    "format_duration",
    "format_number",
    "format_percent",
    "format_plural",
    "format_power",
]

DASH = "\u2013"
"""Stands for a number that is missing."""
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_count(value: float) -> str:
    """Return a whole number with its thousands set apart, a dash for NaN."""
    return f"{value:,.0f}".replace(",", "\u202f") if math.isfinite(value) else DASH


def format_plural(value: float, noun: str) -> str:
    """Return a count with its noun: 1 step, 2 steps."""
    return f"{format_count(value)} {noun if value == 1 else noun + 's'}"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number with a few significant digits, a dash for NaN."""
    if not math.isfinite(value):
        return DASH
    if value and not 1e-3 <= abs(value) < 1e6:
        return format_power(value)
    return format_count(value) if abs(value) >= 1e4 else f"{value:.{digits}g}"


def format_power(value: float) -> str:
    """Return a number as a multiple of a power of ten: 2·10⁻⁴."""
    digits, exponent = f"{value:.3e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    if not value or exponent in ("+00", "+01"):
        return f"{value:.3g}"
    power = f"10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return power if digits == "1" else f"{digits}·{power}"


def format_percent(count: float, total: float, digits: int = 1) -> str:
    """Return a ratio in percent, a dash where the total is zero; only all of them are 100 %."""
    return f"{to_percent(count / total, digits)}\u202f%" if total else DASH


def format_duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 59.95:
        return f"{seconds:.1f}\u202fs"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{format_count(days)}\u202fd {hours % 24}\u202fh"
    if hours:
        return f"{hours}\u202fh {minutes % 60}\u202fmin"
    return f"{minutes}\u202fmin {whole % 60}\u202fs"
