"""Whether images to predict for have the scale of those that a model was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from equipoise.data.image_depth import ImageWarning

__all__ = ["describe_scale", "warn_of_scale"]

MAX_RATIO = 16
"""Halfway, in factors, between equal scales and those of bytes and of numbers from 0 to 1."""
MARGIN = 0.1
"""How far images may leave [0, 1], as those that were scaled to another size do."""


def warn_of_scale(
    inputs: Iterator[tuple[str, Tensor]], value_range: tuple[float, float] | None
) -> Iterator[tuple[str, Tensor]]:
    """Pass samples on, and warn of the first image whose scale is not that of training.

    Nobody but the user knows how the images of training were scaled, so nothing is changed.

    Args:
        inputs: Names and samples, as from `read_inputs`.
        value_range: The least and the largest number of the training images, if that is known.
    """
    told = False
    for name, sample in inputs:
        if value_range is not None and not told and sample.dim() == 3 and sample.numel():
            found = describe_scale(sample, *value_range)
            told = bool(found)
            if found:
                low, high = value_range
                warnings.warn(
                    f"{name}: {found}, but the model was trained on images of numbers from "
                    f"{low:.3g} to {high:.3g}, so predictions may mean nothing; give arrays (.npy) "
                    "with images scaled like those",
                    ImageWarning,
                    stacklevel=2,
                )
        yield name, sample


def describe_scale(image: Tensor, low: float, high: float) -> str:
    """Return what the numbers of an image are, if their scale is not that of other images.

    Args:
        image: The image, or several.
        low: The least number of the others.
        high: Their largest.
    """
    if image.dtype == torch.uint8:
        same = low >= -MARGIN and 1 / MAX_RATIO <= high <= 1 + MARGIN
        return "" if same else "its bytes become numbers from 0 to 1"
    largest, usual = float(image.abs().max()), max(-low, high)
    same = largest == 0 or usual / MAX_RATIO <= largest <= usual * MAX_RATIO
    return "" if same else f"its numbers reach {largest:.3g}"
