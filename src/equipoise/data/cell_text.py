"""What the text in a cell of a table says."""

from __future__ import annotations

__all__ = ["is_missing", "parse_number"]

MISSING = {"", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "?"}


def is_missing(cell: str) -> bool:
    """Return whether a cell is empty or says that nothing is known: NA, NaN, null, None, ?."""
    return cell.strip().lower() in MISSING


def parse_number(cell: str) -> float | None:
    """Return the number in a cell, or `None` if there is none."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
