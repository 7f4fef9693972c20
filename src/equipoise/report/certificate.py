"""What is proved of a run's network, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from equipoise.report.curve import to_number
from equipoise.report.format import format_percent
from equipoise.report.markup import escape, make_scrollable, render_table

__all__ = ["render_certificate"]

HEADER = ("statement", "verdict", "number", "margin", "theorem")


def render_certificate(found: Mapping[str, Any] | None) -> str:
    """Return the statements of a certificate by what they are about, and its parts.

    Args:
        found: What `equipoise certify --json` prints; None leaves the section out.
    """
    if not found:
        return ""
    by_subject: dict[str, list[list[str]]] = {}
    for one in found.get("statements") or ():
        row = [escape(one.get(name, "")) for name in ("statement", "verdict")]
        row += [_number(one.get(name)) for name in ("number", "margin")]
        by_subject.setdefault(str(one.get("about")), []).append(
            [*row, escape(one.get("theorem", ""))]
        )
    tables = [
        make_scrollable("counts", escape(about), render_table(escape(about), rows, HEADER))
        for about, rows in by_subject.items()
    ]
    parts = [
        [escape(part.get("name")), _number(part.get("value")), escape(part.get("theorem"))]
        for part in found.get("parts") or ()
    ]
    if parts:
        title = "Lipschitz constant of each part"
        table = render_table(title, parts, ("part", "at most", "theorem"))
        tables.append(make_scrollable("counts", title, table))
    return "".join(tables) + _render_attack(found.get("attack"))


def _render_attack(attack: Mapping[str, Any] | None) -> str:
    if not attack:
        return ""
    rows = [
        [f"{escape(factor)} times the radius", format_percent(to_number(part), 1)]
        for factor, part in (attack.get("changed") or {}).items()
    ]
    title = "How many classes an attack changes"
    return make_scrollable("counts", title, render_table(title, rows, ("within", "changed")))


def _number(value: object) -> str:
    return "" if value is None else f"{to_number(value):.6g}"
