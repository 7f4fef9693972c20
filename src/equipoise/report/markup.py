"""Pieces of HTML: text made harmless, tables, legends."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "clean",
    "escape",
    "make_scrollable",
    "render_setting_tables",
    "render_swatch",
    "render_table",
]

MAX_TEXT_LENGTH = 4000
# Control characters and halves of surrogate pairs are not text in HTML; direction marks can make
# one name look like another.
UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)


def clean(value: object) -> str:
    """Return a value as text that HTML can hold, cut to a sensible length."""
    text = str(value)
    return UNFIT.sub("�", text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + " …")


def escape(value: object) -> str:
    """Return a value as text that is safe between tags and in quoted attributes."""
    return html.escape(clean(value))


def render_table(caption: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return a table whose first column names its rows.

    Args:
        caption: What it shows.
        rows: Cells as HTML; the first of each row is its name.
        header: Names of the columns as HTML.
    """
    names = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    head = f"<thead><tr>{names}</tr></thead>" if names else ""
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>\n'
        for first, *rest in rows
    )
    return f"<table><caption>{caption}</caption>{head}<tbody>\n{body}</tbody></table>"


def render_setting_tables(settings: Mapping[str, Any], name: str, path: str = "") -> str:
    """Return nested settings as one table for each section.

    Args:
        settings: The settings, nested as in TOML.
        name: The caption of settings that belong to no section.
        path: The section that they are in.
    """
    plain = [
        (escape(key), escape(_describe_setting(value)))
        for key, value in settings.items()
        if not isinstance(value, Mapping)
    ]
    tables = render_table(escape(path or name), plain) if plain else ""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            tables += render_setting_tables(value, name, f"{path}.{key}" if path else str(key))
    return tables


def make_scrollable(kind: str, name: str, content: str) -> str:
    """Wrap what may be wider than a phone, so that finger and keyboard can scroll it."""
    return (
        f'<div class="scroll {kind}" role="region" aria-label="{name}" tabindex="0">{content}</div>'
    )


def render_swatch(colour: str, name: object) -> str:
    """Return the entry of a legend for a filled colour."""
    key = (
        '<svg class="swatch" viewBox="0 0 13 13" aria-hidden="true">'
        f'<rect width="13" height="13" fill="{colour}"/></svg>'
    )
    return f"<li>{key}{escape(name)}</li>"


def _describe_setting(value: object) -> str:
    """Return a setting as TOML would have it, strings without quotes unless empty."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
