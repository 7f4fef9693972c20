"""Values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["to_json_values"]


def to_json_values(value: Any) -> Any:
    """Return a value with None in place of all numbers that are not finite.

    Args:
        value: A tree of mappings and lists.
    """
    if isinstance(value, Mapping):
        return {key: to_json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
