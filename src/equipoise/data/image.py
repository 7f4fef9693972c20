"""Pictures and masks decoded with Pillow, which is imported when the first one is read."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core import require_count
from equipoise.data.bounded_io import reading
from equipoise.data.errors import DataError

__all__ = [
    "MAX_PIXELS",
    "SUFFIXES",
    "Size",
    "check_size",
    "is_picture",
    "read_pair",
    "read_picture",
]

MAX_PIXELS = 2**26  # in one picture; the largest in ImageNet has 6.1e7
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
_FORMATS = (
    "BMP",
    "GIF",
    "JPEG",
    "PNG",
    "PPM",
    "WEBP",
)  # Pillow knows others, some of which call programs

Size = tuple[int, int] | None


def check_size(owner: str, size: object) -> None:
    """Raise unless `size` is `None` or a pair of height and width."""
    if size is None:
        return
    if not isinstance(size, tuple) or len(size) != 2:
        raise ValueError(f"{owner}.size must be None or a pair (height, width); got {size!r}.")
    for length in size:
        require_count(f"{owner}.size", length)


def is_picture(path: Path) -> bool:
    """Whether a file is called like a picture; hidden files are not."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def read_picture(path: Path, size: Size = None) -> Tensor:
    """Return a picture as bytes of shape (3, height, width).

    Args:
        path: The file.
        size: Height and width to bring it to: scaled until it covers them, then cropped about its
            centre.
    """
    with reading(path):
        return _pixels(_open(path), size)


def read_pair(path: Path, beside: Path, size: Size = None) -> tuple[Tensor, Tensor]:
    """Return a picture, and its mask of class numbers as int64 of shape (height, width).

    Args:
        path: The file of the picture.
        beside: The file of the mask, of the same size, with one channel or a palette.
        size: As for `read_picture`; each pixel of the mask gets the class of the nearest one.
    """
    with reading(path):
        picture = _open(path)
        pixels = _pixels(picture, size)
    with reading(beside):
        mask = _open(beside)
        if mask.size != picture.size:
            raise DataError(
                beside,
                f"is a mask of {mask.width} x {mask.height} for a picture of {picture.width} "
                f"x {picture.height}",
            )
        if mask.mode not in ("L", "P", "1"):
            raise DataError(
                beside, f"is a mask in mode {mask.mode}; it must have one channel of class numbers"
            )
        if size is not None:
            mask = _cover(mask, size, _pillow().Resampling.NEAREST)
        return pixels, torch.from_numpy(np.array(mask).astype(np.int64))


def _pixels(picture: Any, size: Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about transparency, which is dropped
        picture = picture.convert("RGB")
    if size is not None:
        picture = _cover(picture, size, _pillow().Resampling.BILINEAR)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _pillow() -> ModuleType:
    from PIL import Image  # when a picture is read, not when the library is imported

    return Image


def _open(path: Path) -> Any:
    image = _pillow()
    if not path.stat().st_size:
        raise DataError(path, "is empty")
    # Pillow closes the files that it opens only if all goes well.
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes, which are checked here
        try:
            picture = image.open(file, formats=_FORMATS)
        except image.DecompressionBombError as error:
            raise DataError(
                path, f"is a picture of too many pixels; the limit is {MAX_PIXELS}"
            ) from error
        except image.UnidentifiedImageError as error:
            raise DataError(path, "is not a picture") from error
        if picture.width * picture.height > MAX_PIXELS:
            raise DataError(
                path,
                f"is a picture of {picture.width} x {picture.height}; the limit is "
                f"{MAX_PIXELS} pixels",
            )
        picture.load()
    return picture


def _cover(picture: Any, size: tuple[int, int], filter_: Any) -> Any:
    height, width = size
    scale = max(height / picture.height, width / picture.width)
    box_height, box_width = height / scale, width / scale
    left, top = (picture.width - box_width) / 2, (picture.height - box_height) / 2
    box = (left, top, min(left + box_width, picture.width), min(top + box_height, picture.height))
    return picture.resize((width, height), filter_, box=box)
