"""The runs of a sweep as a table for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["columns_of", "format_cell", "format_table"]

WIDTH = 80  # columns of the terminal
MIN_CELL = 8  # columns of a cell that is cut
SAME = ("epochs", "missed", "status")  # left out first where it is the same in all rows
MINOR = ("seconds", "missed", "loss", "epochs")  # left out next


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as aligned text of at most 80 columns, and below them why runs failed.

    Settings go by the last part of their keys, and the score by its name. Columns that are empty
    are left out, and so are the least important where there is no room for all of them; `sweep.csv`
    has them.

    Args:
        rows: What `sweep` returned.
    """
    table = {
        key: [format_cell(row["run"][:3] if key == "run" else row.get(key)) for row in rows]
        for key in columns_of(rows)
    }
    reasons = table.pop("reason", [])
    table = _name_score({key: cells for key, cells in table.items() if any(cells)})
    table = _shorten_keys(table)
    left_out = False
    for key in (*(key for key in SAME if len(set(table.get(key, ()))) == 1), *MINOR):
        if _width(table) > WIDTH and key in table:
            del table[key]
            left_out = True
    widths = _cut(table)
    lines = [
        "  ".join(
            _fit(cell, width).ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in (list(table), *zip(*table.values(), strict=True))
    ]
    for row, reason in zip(rows, reasons, strict=False):
        if reason:
            text = f"{row['run'][:3]}: {reason}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent="     ")
    return "\n".join([*lines, *(["more columns: sweep.csv"] if left_out else [])])


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all keys, in the order in which complete rows have them.

    Args:
        rows: As of `format_table`.
    """
    return list(dict.fromkeys(key for row in sorted(rows, key=len, reverse=True) for key in row))


def format_cell(value: Any) -> str:
    """Return a value as it stands in a table; empty if there is none.

    Args:
        value: Any.
    """
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _name_score(table: dict[str, list[str]]) -> dict[str, list[str]]:
    """Call the score what it is, where it is the same in all runs that have one."""
    said = [set(table.get(key, ())) - {""} for key in ("split", "metric")]
    if not all(len(words) == 1 for words in said):
        return table
    name = " ".join(words.pop() for words in said)
    return {
        name if key == "score" else key: cells
        for key, cells in table.items()
        if key not in ("split", "metric")
    }


def _shorten_keys(table: dict[str, list[str]]) -> dict[str, list[str]]:
    """Name settings by the last parts of their keys, unless two would be the same."""
    short = [key.rpartition(".")[2] for key in table]
    if len(set(short)) < len(short):
        return table
    return dict(zip(short, table.values(), strict=True))


def _widths(table: Mapping[str, Sequence[str]]) -> list[int]:
    return [max(map(len, (key, *cells))) for key, cells in table.items()]


def _width(table: Mapping[str, Sequence[str]]) -> int:
    return sum(_widths(table)) + 2 * (len(table) - 1)


def _cut(table: Mapping[str, Sequence[str]]) -> list[int]:
    """The widths of the columns, the widest made narrower until all fit."""
    widths = _widths(table)
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH and max(widths) > MIN_CELL:
        widths[widths.index(max(widths))] -= 1
    return widths


def _fit(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 3]}..."
