"""Images inside a page: PNG as data, colours of labels."""

from __future__ import annotations

import base64
import colorsys
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from equipoise.report.markup import escape

__all__ = [
    "encode",
    "label_colour",
    "paint_heat",
    "paint_mask",
    "render_figures",
    "shrink",
    "to_bytes",
]

# Pixels along the longer side; four samples of this size keep any page under 2 MB.
MAX_SIDE = 256
# Paul Tol's muted scheme and three of his bright one: distinct to any colour vision.
COLOURS = (
    "#cc6677",
    "#332288",
    "#ddcc77",
    "#117733",
    "#88ccee",
    "#882255",
    "#44aa99",
    "#999933",
    "#aa4499",
    "#4477aa",
    "#ee8866",
    "#bbcc33",
)
# Visible on white and on black; the strength goes into the alpha channel.
HEAT = (47, 127, 196)


def encode(pixels: np.ndarray) -> str:
    """Return an image of uint8 as a data URL of a PNG.

    Args:
        pixels: Height x width (grey), x 3 (colour) or x 4 (with alpha).
    """
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(content, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def render_figures(figures: Sequence[tuple[bytes, str]]) -> str:
    """Return PNG files with their captions as HTML; empty if there are none.

    Args:
        figures: The content of each file, and its caption as text.
    """
    return "".join(
        f'<figure class="plot"><img src="data:image/png;base64,{base64.b64encode(png).decode()}" '
        f'alt="{escape(caption)}"><figcaption>{escape(caption)}</figcaption></figure>'
        for png, caption in figures
    )


def to_bytes(image: Any) -> np.ndarray:
    """Return an image as uint8; other numbers are scaled from the smallest to the largest."""
    pixels: np.ndarray = np.asarray(image)
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    if pixels.dtype == np.uint8:
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    scaled: np.ndarray = np.rint((values - low) / (high - low or 1.0) * 255).astype(np.uint8)
    return scaled


def shrink(pixels: np.ndarray, side: int = MAX_SIDE) -> np.ndarray:
    """Return every n-th pixel, so that an image is at most `side` pixels wide and high."""
    every = -(-max(pixels.shape[:2]) // side)
    return pixels[::every, ::every]


def label_colour(label: int) -> str:
    """Return the colour of a label."""
    if label < len(COLOURS):
        return COLOURS[label]
    # the golden ratio spreads hues evenly, however many there are
    red, green, blue = colorsys.hsv_to_rgb(
        label * 0.618034 % 1, 0.45 + 0.2 * (label % 3), 0.9 - 0.15 * (label % 4)
    )
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def paint_mask(labels: np.ndarray, ignore: int | None) -> np.ndarray:
    """Return a mask in the colours of its labels, transparent where pixels do not count.

    Args:
        labels: Height x width.
        ignore: The label of pixels that do not count.
    """
    painted = np.zeros((*labels.shape, 4), np.uint8)
    for label in np.unique(labels):
        if label >= 0 and label != ignore:
            painted[labels == label] = (*bytes.fromhex(label_colour(int(label))[1:]), 255)
    return painted


def paint_heat(fractions: np.ndarray) -> np.ndarray:
    """Return a square matrix of fractions as an image of at most 400 x 400 pixels.

    Args:
        fractions: Numbers in [0, 1]; of a larger matrix, each pixel shows the largest of a block.
    """
    every = -(-len(fractions) // 400)
    for axis in (0, 1):
        starts = np.arange(0, fractions.shape[axis], every)
        fractions = np.maximum.reduceat(fractions, starts, axis=axis)
    painted = np.empty((*fractions.shape, 4), np.uint8)
    painted[..., :3] = HEAT
    # the root makes small fractions visible
    painted[..., 3] = np.rint(np.sqrt(np.clip(fractions, 0, 1)) * 255)
    return painted
