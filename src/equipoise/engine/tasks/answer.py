"""What a trained model says about one sample, and how that is written to a file."""

from __future__ import annotations

import colorsys
import io
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "Answer",
    "FileAnswer",
    "ImageAnswer",
    "LabelAnswer",
    "MaskAnswer",
    "NumberAnswer",
    "RowAnswer",
    "TextAnswer",
]

MAX_COLOURS = 256  # of a palette


class RowAnswer(ABC):
    """An answer that becomes a row of a table.

    Attributes:
        columns: The names of its cells.
    """

    columns: tuple[str, ...]

    @abstractmethod
    def cells(self) -> tuple[str, ...]:
        """Return the cells, as many as there are columns."""


class FileAnswer(ABC):
    """An answer that becomes a file of its own.

    Attributes:
        suffix: Of the name of the file, with its dot.
    """

    suffix: ClassVar[str]

    @abstractmethod
    def encode(self) -> bytes:
        """Return the content of the file, or raise `ValueError` with what is wrong."""


Answer = RowAnswer | FileAnswer


@final
@dataclass(frozen=True)
class LabelAnswer(RowAnswer):
    """A class.

    Args:
        top: The classes with their probabilities, the most probable first.
        shown: How many of them make a row, at most all.
    """

    top: tuple[tuple[str, float], ...]
    shown: int = 1

    @property
    def columns(self) -> tuple[str, ...]:  # type: ignore[override]  # as many as are shown
        names = ("label", "probability")
        return *names, *(f"{name}_{i}" for i in range(2, self.shown + 1) for name in names)

    @property
    def label(self) -> str:
        """The name of the class."""
        return self.top[0][0]

    @property
    def probability(self) -> float:
        """Its probability."""
        return self.top[0][1]

    def cells(self) -> tuple[str, ...]:
        return tuple(
            cell for label, value in self.top[: self.shown] for cell in (label, f"{value:.6g}")
        )


@final
@dataclass(frozen=True)
class NumberAnswer(RowAnswer):
    """Numbers.

    Args:
        columns: Their names.
        values: The numbers.
        digits: How many digits of each are written.
    """

    columns: tuple[str, ...]
    values: tuple[float, ...]
    digits: int = 6

    def cells(self) -> tuple[str, ...]:
        return tuple(f"{value:.{self.digits}g}" for value in self.values)


@final
@dataclass(frozen=True)
class TextAnswer(RowAnswer):
    """A text.

    Args:
        text: The text.
    """

    columns = ("text",)

    text: str

    def cells(self) -> tuple[str, ...]:
        return (self.text,)


@final
@dataclass(frozen=True, eq=False)
class MaskAnswer(FileAnswer):
    """A class for each pixel; a PNG file whose pixels have the number of the class as their value.

    Args:
        mask: The classes, int64 of shape (height, width).
    """

    suffix = ".png"

    mask: Tensor

    def encode(self) -> bytes:
        from PIL import Image

        mask = self.mask.numpy()
        if mask.max(initial=0) >= MAX_COLOURS:
            raise ValueError(
                f"has class {mask.max()} in its mask; a palette has {MAX_COLOURS} colours"
            )
        image = Image.fromarray(mask.astype(np.uint8))
        image.putpalette(_palette())  # turns grey values into numbers of colours
        return _png(image)


@final
@dataclass(frozen=True, eq=False)
class ImageAnswer(FileAnswer):
    """An image, written as a PNG file.

    Args:
        image: The image, floats in [0, 1] of shape (channels, height, width).
        bits: Of each pixel, 8 or 16; colours always have 8, since Pillow writes no more.
    """

    suffix = ".png"

    image: Tensor
    bits: int = 8

    def encode(self) -> bytes:
        from PIL import Image

        values = self.image.clamp(0, 1).double().movedim(0, -1).numpy()
        if values.shape[2] not in (1, 3):
            raise ValueError(f"has {values.shape[2]} channels; an image has 1 or 3")
        if values.shape[2] == 1 and self.bits == 16:
            return _png(Image.fromarray((values[..., 0] * 65535).round().astype(np.uint16)))
        pixels = (values * 255).round().astype(np.uint8)
        return _png(Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels))


def _png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


def _palette() -> list[int]:
    """Black, then hues that differ as much as they can from those before, at several strengths."""
    golden = (math.sqrt(5) - 1) / 2
    colours = [(0.0, 0.0, 0.0)]
    colours += [
        colorsys.hsv_to_rgb(i * golden % 1, (1, 0.55)[i % 2], (1, 0.75, 0.5)[i % 3])
        for i in range(MAX_COLOURS - 1)
    ]
    return [round(255 * channel) for colour in colours for channel in colour]
