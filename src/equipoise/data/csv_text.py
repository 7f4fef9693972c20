"""The text of CSV files: in which bytes it is written, and what divides its columns."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from equipoise.data.cell_text import has_comma_number
from equipoise.data.errors import DataError

__all__ = ["COMMAS", "SEPARATORS", "decode_csv", "find_separator"]

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
COMMAS = "write decimal points, and nothing between thousands"
UTF_8 = "save it as CSV in UTF-8"


def decode_csv(path: Path, content: bytes) -> str:
    """Return the text of a file: UTF-8, or UTF-16 that begins with its byte-order mark.

    Args:
        path: The file, for messages.
        content: Its bytes.
    """
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        if marked:
            raise DataError(path, f"begins like UTF-16 and is none; {UTF_8}") from None
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise DataError(
            path, f"is not text in UTF-8 (byte 0x{byte:02x} in line {line}); {UTF_8}"
        ) from None
    if "\0" in text:
        raise DataError(path, f"holds zero bytes, as UTF-16 without its mark does; {UTF_8}")
    return text


def find_separator(path: Path, text: str) -> str:
    """Return what divides the columns of the first row, or raise if that cannot be told.

    Args:
        path: The file, for messages.
        text: Its text.
    """
    first = next((line for line in text.splitlines() if line.strip()), "")
    first = re.sub(r'"[^"]*"', "", first)
    found = [separator for separator in SEPARATORS if separator in first]
    if len(found) > 1:
        cells = [cell for cell in re.split("[;\t]", first) if has_comma_number(cell)]
        if found[0] == "," and len(found) == 2 and cells:
            raise DataError(
                path, f"has {cells[0].strip()!r} in its first row, a number with a comma; {COMMAS}"
            )
        names = " and ".join(f"{SEPARATORS[each]}s" for each in found)
        raise DataError(
            path,
            f"has {names} in its first row, so it cannot be told which of them divide columns; "
            "say so by the option separator (data.options.separator) of training",
        )
    return found[0] if found else ","
