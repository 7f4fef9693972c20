"""What the text in a cell of a table says."""

from __future__ import annotations

import re

__all__ = ["fold_truth", "has_comma_number", "is_missing", "parse_number"]

MISSING = {"", "na", "n/a", "#n/a", "nan", "null", "none", "<na>", "?"}
TRUTHS = {"true", "false"}
COMMA_NUMBER = re.compile(r"[-+]?\d[\d.' ]*,\d[\d,]*(e[-+]?\d+)?", re.IGNORECASE)


def is_missing(cell: str) -> bool:
    """Return whether a cell is empty or says that nothing is known: NA, NaN, null, None, ?."""
    return cell.strip().lower() in MISSING


def parse_number(cell: str) -> float | None:
    """Return the number in a cell, or `None` if there is none."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def fold_truth(cell: str) -> str:
    """Return a cell with `TRUE` and `True` as `true`, since programs write them differently."""
    lower = cell.lower()
    return lower if lower in TRUTHS else cell


def has_comma_number(cell: str) -> bool:
    """Return whether a cell holds a number with a comma in it, such as 1,5 or 1,000."""
    return COMMA_NUMBER.fullmatch(cell.strip()) is not None
