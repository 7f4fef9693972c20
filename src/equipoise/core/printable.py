"""Text for terminals: names of classes and files may hold codes that a terminal would obey."""

from __future__ import annotations

from typing import Any, TextIO

__all__ = ["PrintableStream", "printable", "printable_name"]


def printable(text: str) -> str:
    """Show control characters by their codes: they would move the cursor or change colours.

    Args:
        text: Any text; the ends of its lines stay, and so do tabs.
    """
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else ascii(sign)[1:-1] for sign in text
    )


def printable_name(name: object) -> str:
    """Show a name, such as a path, in one line: the ends of lines in it by their codes, too.

    Args:
        name: Anything that has a name as its text.
    """
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(name))


class PrintableStream:
    """A stream to which control characters are written by their codes.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, and return how long it was."""
        self._stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
