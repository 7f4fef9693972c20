"""How long a run still takes, and times in words."""

from __future__ import annotations

import math

__all__ = ["describe_duration"]


def describe_duration(seconds: float | None) -> str:
    """Return a time in its largest units; nothing for one that is not known.

    Args:
        seconds: The time.
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min"
        if hours
        else f"{minutes} min {rest:02d} s"
        if minutes
        else f"{rest} s"
    )
