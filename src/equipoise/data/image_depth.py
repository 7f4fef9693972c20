"""What becomes of images with more than 8 bits for each channel."""

from __future__ import annotations

import warnings
from pathlib import Path

from equipoise.data.bounded_io import data_errors_of
from equipoise.data.errors import DataError
from equipoise.data.image import find_greys, open_image

__all__ = ["ImageWarning", "warn_of_depth"]

MAX_DARK = 2**14 - 1  # the largest grey of what cameras write with 10, 12 or 14 bits
PNG = b"\x89PNG\r\n\x1a\n"


class ImageWarning(UserWarning):
    """An image is read in a way that may not be meant."""


def warn_of_depth(path: Path) -> None:
    """Warn if greys fill only the bottom of 16 bits, or if half of the bits cannot be read.

    A file of 16 bits does not say how many of them its camera filled, so all of them are taken.
    An image that cannot be read is told by whoever reads it.

    Args:
        path: The file.
    """
    try:
        with data_errors_of(path):
            if not _may_be_deep(path):
                return
            values = find_greys(path, open_image(path))
    except DataError:
        return
    largest = 0 if values is None else int(values.max())
    if 0 < largest <= MAX_DARK:
        warnings.warn(
            f"{path}: its greys reach {largest} of 65535, so it is read as nearly black; if they "
            f"have {max(largest.bit_length(), 8)} bits, stretch them to 65535 beforehand",
            ImageWarning,
            stacklevel=3,
        )
    elif values is None:
        warnings.warn(
            f"{path}: it has 16 bits for each channel, of which only the upper 8 are read",
            ImageWarning,
            stacklevel=3,
        )


def _may_be_deep(path: Path) -> bool:
    """Whether a file is a PNG of 16 bits, or one of portable greys, which may have as many."""
    with path.open("rb") as file:
        header = file.read(25)  # the mark, then the chunk IHDR: length, name, width, height, bits
    return (header.startswith(PNG) and header[24:] == b"\x10") or header.startswith(b"P5")
