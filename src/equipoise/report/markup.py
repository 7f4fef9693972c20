"""Pieces of HTML: text made harmless, numbers made readable, tables."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "NONE",
    "clean",
    "clock",
    "count",
    "describe",
    "escape",
    "figure",
    "plural",
    "power",
    "sections",
    "table",
]

MAX_TEXT_LENGTH = 4000
NONE = "\u2013"
"""In place of a number that is not there."""
# control characters and halves of surrogate pairs are not text in HTML; marks of direction can make
# one name look like another
UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def clean(value: object) -> str:
    """Return a value as text of a sensible length that HTML can hold."""
    text = str(value)
    return UNFIT.sub("�", text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + " …")


def escape(value: object) -> str:
    """Return a value as text that is safe between tags and in quoted attributes."""
    return html.escape(clean(value))


def describe(value: object) -> str:
    """Return a setting as it would stand in TOML, strings without quotes unless empty."""
    return (
        value
        if isinstance(value, str) and value
        else json.dumps(value, ensure_ascii=False, default=str)
    )


def count(value: float) -> str:
    """Return a whole number with its thousands set apart, a dash for NaN."""
    return f"{value:,.0f}".replace(",", "\u202f") if math.isfinite(value) else NONE


def plural(value: float, noun: str) -> str:
    """Return a count with its noun: 1 step, 2 steps."""
    return f"{count(value)} {noun if value == 1 else noun + 's'}"


def figure(value: float, digits: int = 4) -> str:
    """Return a number with a few significant digits, a dash for NaN."""
    if not math.isfinite(value):
        return NONE
    if value and not 1e-3 <= abs(value) < 1e6:
        return power(value)
    return count(value) if abs(value) >= 1e4 else f"{value:.{digits}g}"


def power(value: float) -> str:
    """Return a number as a power of ten: 2·10⁻⁴."""
    digits, exponent = f"{value:.3e}".split("e")
    digits = digits.rstrip("0").rstrip(".")
    if not value or exponent in ("+00", "+01"):
        return f"{value:.3g}"
    ten = f"10{str(int(exponent)).translate(SUPERSCRIPT)}"
    return ten if digits == "1" else f"{digits}·{ten}"


def clock(seconds: float) -> str:
    """Return a time in its two largest units."""
    if not math.isfinite(seconds):
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f}\u202fs"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{count(days)}\u202fd {hours % 24}\u202fh"
    return (
        f"{hours}\u202fh {minutes % 60}\u202fmin"
        if hours
        else f"{minutes}\u202fmin {whole % 60}\u202fs"
    )


def table(caption: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table whose first column names its rows.

    Args:
        caption: What it shows.
        rows: Cells as HTML; the first of each row is its name.
        header: Names of the columns as HTML.
    """
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>\n'
        for first, *rest in rows
    )
    return f"<table><caption>{caption}</caption>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>\n{body}</tbody></table>"


def sections(settings: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return nested settings as one table for each section.

    Args:
        settings: The settings, nested as in TOML.
        name: The caption of settings that belong to no section.
        path: The section that they are in.
    """
    plain = [
        (escape(key), escape(describe(value)))
        for key, value in settings.items()
        if not isinstance(value, Mapping)
    ]
    found = table(escape(path or name), plain) if plain else ""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found += sections(value, name, f"{path}.{key}" if path else str(key))
    return found
