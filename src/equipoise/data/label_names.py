"""The classes that the labels of a table name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from equipoise.data.cell_text import parse_number

__all__ = ["label_name", "list_label_names"]


def list_label_names(labels: Collection[str]) -> tuple[str, ...]:
    """Return the classes of some labels: different numbers in their order, or texts in theirs.

    Labels of which one is a text are all texts. Numbers that are not whole name no classes: nothing
    is returned.

    Args:
        labels: The labels, without spaces around them.
    """
    numbers = [parse_number(label) for label in labels]
    if any(number is None for number in numbers):
        return tuple(sorted(set(labels)))
    whole = [number for number in numbers if number is not None and _is_whole(number)]
    if len(whole) < len(numbers):
        return ()
    return tuple(sorted({label_name(label) for label in labels}, key=lambda n: (float(n), n)))


def label_name(label: str) -> str:
    """Return the class that a label names: 1, 1.0 and +1 are one, 01 is another, a text is its own.

    Args:
        label: The label as it is written.
    """
    if re.fullmatch(r"[+-]?[1-9]\d*|[+-]?0", label):
        return str(int(label))  # exact, however long
    number = parse_number(label)
    # What begins with 0 is a code, such as that of a post office.
    if number is None or not _is_whole(number) or re.fullmatch(r"[+-]?0\d+", label):
        return label
    return str(int(number))


def _is_whole(number: float) -> bool:
    return math.isfinite(number) and number == round(number)
