"""Images and masks decoded with Pillow, which is imported when the first one is read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import SettingError, require_count
from equipoise.data.bounded_io import data_errors_of
from equipoise.data.errors import DataError

__all__ = [
    "MAX_PIXELS",
    "SUFFIXES",
    "Size",
    "find_greys",
    "find_other_size",
    "find_shape",
    "find_size",
    "is_image_file",
    "list_images",
    "list_subfolders",
    "open_image",
    "read_greys",
    "read_image",
    "read_image_and_mask",
    "require_size",
]

MAX_HEADERS = 2000  # images whose sizes are looked at before a run
MAX_PIXELS = 2**26  # in one image; the largest in ImageNet has 6.1e7
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
# Pillow knows others, some of which call programs.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")

Size = tuple[int, int] | None


def require_size(key: str, size: object) -> None:
    """Raise unless `size` is a pair of height and width."""
    if not isinstance(size, tuple) or len(size) != 2:
        raise SettingError(key, "be a pair (height, width)", size)
    for length in size:
        require_count(key, length)


def is_image_file(path: Path) -> bool:
    """Return whether a file is named like an image and not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def list_subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    with data_errors_of(folder):
        return sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )


def list_images(folder: Path) -> list[Path]:
    """Return the images in a folder and its subfolders, sorted, without hidden ones."""
    found: list[Path] = []
    with data_errors_of(folder):
        # Links to folders are not followed, since they may lead in circles.
        for parent, folders, files in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(parent, name) for name in files)
            found += [path for path in paths if is_image_file(path)]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def read_image(path: Path, size: Size = None) -> Tensor:
    """Return an image as bytes of shape (3, height, width), as a viewer would show it.

    It is turned as its EXIF orientation says, what is transparent in it is laid on white, and grey
    values of 16 bits become bytes by `v / 257`, which is linear and takes 65535 to 255.

    Args:
        path: The file.
        size: Height and width to bring it to: scaled until it covers them, then cropped around its
            centre.
    """
    with data_errors_of(path):
        return _pixels(path, open_image(path), size)


def read_greys(path: Path, size: Size = None) -> Tensor | None:
    """Return an image of 16 bits of grey as floats `v / 65535`, shape (3, height, width).

    Args:
        path: The file.
        size: As of `read_image`.

    Returns:
        The image; `None` of one with bytes, which `read_image` reads as it is.
    """
    with data_errors_of(path):
        image = open_image(path)
        values = find_greys(path, image)
        if values is None:
            return None
        image = _pillow().fromarray((values / 65535).astype(np.float32))
        if size is not None:
            image = _cover(image, size, _pillow().Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).clamp(0, 1).expand(3, -1, -1).contiguous()


def find_greys(path: Path, image: Any) -> NDArray[np.int64] | None:
    """Return the greys of an image of Pillow that has more than 8 bits of them, else `None`.

    Args:
        path: The file, for messages.
        image: The image.
    """
    if not image.mode.startswith("I"):
        return None
    values: NDArray[np.int64] = np.array(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(path, "is an image of more than 16 bits, whose range is not known")
    # Pillow notes the grey that a PNG declares transparent, but does not apply it to 16 bits.
    values[values == image.info.get("transparency", -1)] = 65535
    return values


def find_shape(paths: Iterable[Path], size: Size) -> tuple[int, ...]:
    """Return the shape of the first image that can be read, or raise for the first if none can.

    Args:
        paths: The files.
        size: What all images are brought to, if anything.
    """
    if size is not None:
        return 3, *size
    first: DataError | None = None
    for path in paths:
        try:
            return tuple(read_image(path).shape)
        except DataError as error:
            first = first or error
    assert first is not None  # readers see to it that there are files
    raise first


def find_other_size(paths: Sequence[Path]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return two sizes (height, width) that images have, or `None` if they all seem to have one.

    It reads the headers of some images, evenly spread; those that cannot be read are left out.

    Args:
        paths: The files.
    """
    first = None
    for path in paths[:: max(1, -(-len(paths) // MAX_HEADERS))]:
        size = find_size(path)
        first = first or size
        if first is not None and size is not None and size != first:
            return first, size
    return None


def find_size(path: Path) -> tuple[int, int] | None:
    """Return the height and width that the header of an image tells, or `None` without one.

    Args:
        path: The file.
    """
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = _pillow().open(file, formats=_FORMATS)
    except Exception:  # whatever a parser raises; whoever needs the image will say so
        return None
    turned = "exif" in image.info and _orientation(image) >= 5
    return (image.width, image.height) if turned else (image.height, image.width)


def read_image_and_mask(path: Path, mask_path: Path, size: Size = None) -> tuple[Tensor, Tensor]:
    """Return an image, and its mask of class numbers as int64 of shape (height, width).

    Args:
        path: The file of the image.
        mask_path: The file of the mask, of the same size, with one channel or a palette.
        size: As for `read_image`; each pixel of the mask gets the class of the nearest one.
    """
    with data_errors_of(path):
        image = open_image(path)
        pixels = _pixels(path, image, size)
    with data_errors_of(mask_path):
        mask = open_image(mask_path)
        if mask.size != image.size:
            raise DataError(
                mask_path,
                f"is a mask of {mask.width} x {mask.height} for an image of {image.width} "
                f"x {image.height}",
            )
        if mask.mode not in ("L", "P", "1"):
            raise DataError(
                mask_path,
                f"is a mask in mode {mask.mode}; it must have one channel of class numbers",
            )
        if size is not None:
            mask = _cover(mask, size, _pillow().Resampling.NEAREST)
        return pixels, torch.from_numpy(np.array(mask).astype(np.int64))


def _pixels(path: Path, image: Any, size: Size) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about transparency in palettes
        image = _opaque(_eight_bits(path, image)).convert("RGB")
    if size is not None:
        image = _cover(image, size, _pillow().Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _eight_bits(path: Path, image: Any) -> Any:
    """An image whose channels are bytes; Pillow would clip larger numbers to 255."""
    if image.mode == "F":
        raise DataError(path, "is an image of floating-point numbers, whose range is not known")
    values = find_greys(path, image)
    if values is None:
        return image
    return _pillow().fromarray(((values + 128) // 257).astype(np.uint8))


def _opaque(image: Any) -> Any:
    """An image laid on white where it is transparent."""
    if "A" not in image.mode and "transparency" not in image.info:
        return image
    image = image.convert("RGBA")
    white = _pillow().new("RGBA", image.size, (255, 255, 255, 255))
    return _pillow().alpha_composite(white, image)


def _upright(image: Any) -> Any:
    """An image turned as its EXIF orientation says."""
    ways = _pillow().Transpose
    # EXIF 2.3, tag 274: 1 is upright, 5 to 8 exchange height and width.
    turns = {
        2: ways.FLIP_LEFT_RIGHT,
        3: ways.ROTATE_180,
        4: ways.FLIP_TOP_BOTTOM,
        5: ways.TRANSPOSE,
        6: ways.ROTATE_270,
        7: ways.TRANSVERSE,
        8: ways.ROTATE_90,
    }
    turn = turns.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def _orientation(image: Any) -> int:
    try:
        value = image.getexif().get(274, 1)
    except Exception:  # whatever a parser raises: a damaged tag says nothing about the pixels
        return 1
    return value if isinstance(value, int) else 1


def _pillow() -> ModuleType:
    from PIL import Image  # when an image is read, not when the library is imported

    return Image


def open_image(path: Path) -> Any:
    """Return the image of Pillow in a file, loaded and upright.

    Args:
        path: The file.
    """
    pillow = _pillow()
    if not path.stat().st_size:
        raise DataError(path, "is empty")
    # Pillow closes the files that it opens only if all goes well.
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sizes, which are checked here
        try:
            image = pillow.open(file, formats=_FORMATS)
        except pillow.DecompressionBombError as error:
            raise DataError(
                path, f"is an image of too many pixels; the limit is {MAX_PIXELS}"
            ) from error
        except pillow.UnidentifiedImageError as error:
            raise DataError(path, "is not an image") from error
        if image.width * image.height > MAX_PIXELS:
            raise DataError(
                path,
                f"is an image of {image.width} x {image.height}; the limit is {MAX_PIXELS} pixels",
            )
        image.load()
        return _upright(image)


def _cover(image: Any, size: tuple[int, int], filter_: Any) -> Any:
    height, width = size
    scale = max(height / image.height, width / image.width)
    box_height, box_width = height / scale, width / scale
    left, top = (image.width - box_width) / 2, (image.height - box_height) / 2
    box = (left, top, min(left + box_width, image.width), min(top + box_height, image.height))
    return image.resize((width, height), filter_, box=box)
