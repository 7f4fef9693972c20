"""Notes that come again and again, shown twice at most."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Self

__all__ = ["RepeatedNotes"]

# What differs between notes that say the same: numbers, and how often it was so.
NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?|\binf\b|\bnan\b")
COUNT = re.compile(r" This was failure .*$")


class RepeatedNotes:
    """Shows the first of several notes that differ only in numbers, and in the end the last one.

    Args:
        show: Shows a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._repeats: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def note(self, text: str) -> None:
        """Show a note, or keep it for the end if one like it was shown."""
        kind = NUMBER.sub("#", COUNT.sub("", " ".join(text.split())))
        if kind in self._repeats:
            self._repeats[kind] += 1
            self._last[kind] = text
        else:
            self._repeats[kind] = 0
            self._show(text)

    def close(self) -> None:
        """Show the last note of each kind that came again, with how often it did."""
        for kind, text in self._last.items():
            count = self._repeats[kind]
            self._show(f"{text} ({count} more warning{'s' * (count > 1)} like the first)")
        self._repeats.clear()
        self._last.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
