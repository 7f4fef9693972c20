"""Random operations on images, some for each: colours, contrast, and small movements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import require_between, require_count
from equipoise.data.transform import Transform, require_floats, require_generator

__all__ = ["RandAugment"]

MAX_FACTOR = 0.9  # of brightness, contrast, saturation and sharpness
MAX_ANGLE = math.radians(30)
MAX_SHEAR = 0.3
MAX_SHIFT = 0.3  # of the height or the width
MIN_BITS = 4


@final
@dataclass(frozen=True)
class RandAugment(Transform):
    """Applies operations drawn at random to each image, all equally strong (Cubuk et al., 2020).

    Each of `operations` rounds draws one of twelve for each image: none, brightness, contrast,
    saturation, sharpness, solarize, posterize, autocontrast, rotate, shear, shift across, shift
    down. Those with a direction get a random one. What moves in from outside is black, and ignored
    in masks, which move along.

    Args:
        operations: Operations on each image, one after another.
        strength: Of the largest distortion, in [0, 1]: 30 degrees, say.
        ignore: The label of what moves in from outside in masks.
    """

    moves_pixels = True
    random = True

    operations: int = 2
    strength: float = 0.3
    ignore: int = 255

    def __post_init__(self) -> None:
        require_count("RandAugment.operations", self.operations)
        require_between("RandAugment.strength", self.strength, 0, 1)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats("RandAugment", x)
        generator = require_generator("RandAugment", generator)
        count = 1 + len(COLOURS) + len(MOVES)
        for _ in range(self.operations):
            draws = torch.rand(2, len(x), generator=generator, device=generator.device).to(x.device)
            chosen = (draws[0] * count).long().clamp(max=count - 1)
            signed = torch.where(draws[1] < 0.5, -self.strength, self.strength).to(x.dtype)
            x, y = self._round(x, y, chosen, signed)
        return x, y

    def _round(self, x: Tensor, y: Tensor, chosen: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the operation of each image: 0 is none, then come colours, then moves."""
        x = x.clone()
        for number, change in enumerate(COLOURS.values(), start=1):
            rows = torch.nonzero(chosen == number).flatten()
            if len(rows):
                x[rows] = change(x[rows], signed[rows].reshape(-1, 1, 1, 1)).clamp(0, 1)
        for number, move in enumerate(MOVES.values(), start=1 + len(COLOURS)):
            rows = torch.nonzero(chosen == number).flatten()
            if len(rows):
                grid = _grid(move(signed[rows]), x[rows])
                x[rows] = _sample(x[rows], grid, "bilinear")
                if y.dim() == 3:  # outside there are zeros, which become the label to ignore
                    mask = (y[rows] - self.ignore)[:, None].to(x.dtype)
                    moved = _sample(mask, grid, "nearest")[:, 0].to(y.dtype) + self.ignore
                    y = y.index_copy(0, rows, moved)
        return x, y


def _scale_about(centre: Tensor, x: Tensor, signed: Tensor) -> Tensor:
    return centre + (1 + MAX_FACTOR * signed) * (x - centre)


def _brightness(x: Tensor, signed: Tensor) -> Tensor:
    return _scale_about(torch.zeros_like(x), x, signed)


def _contrast(x: Tensor, signed: Tensor) -> Tensor:
    return _scale_about(_grey(x).mean((1, 2, 3), keepdim=True), x, signed)


def _saturation(x: Tensor, signed: Tensor) -> Tensor:
    return _scale_about(_grey(x), x, signed)


def _sharpness(x: Tensor, signed: Tensor) -> Tensor:
    edges = functional.pad(x, (1, 1, 1, 1), mode="replicate")
    return _scale_about(functional.avg_pool2d(edges, 3, stride=1), x, signed)


def _solarize(x: Tensor, signed: Tensor) -> Tensor:
    return torch.where(x >= 1 - signed.abs(), 1 - x, x)


def _posterize(x: Tensor, signed: Tensor) -> Tensor:
    levels = 2 ** (8 - (signed.abs() * (8 - MIN_BITS)).round())
    return (x * levels).floor().minimum(levels - 1) / (levels - 1)


def _autocontrast(x: Tensor, _signed: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (x - low) / spread.clamp(min=1e-6), x)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return torch.einsum("bchw,c->bhw", x, x.new_tensor((0.299, 0.587, 0.114)))[:, None]


def _rotate(signed: Tensor) -> Tensor:
    angle = MAX_ANGLE * signed
    return _matrix(angle.cos(), -angle.sin(), angle.sin(), angle.cos())


def _shear(signed: Tensor) -> Tensor:
    one = torch.ones_like(signed)
    return _matrix(one, MAX_SHEAR * signed, 0 * one, one)


def _shift_across(signed: Tensor) -> Tensor:
    return _shift(MAX_SHIFT * signed, 0 * signed)


def _shift_down(signed: Tensor) -> Tensor:
    return _shift(0 * signed, MAX_SHIFT * signed)


def _shift(across: Tensor, down: Tensor) -> Tensor:
    one = torch.ones_like(across)
    matrix = _matrix(one, 0 * one, 0 * one, one)
    matrix[:, :, 2] = 2 * torch.stack([across, down], dim=1)  # the image spans from -1 to 1
    return matrix


def _matrix(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Affine maps (batch, 2, 3) without a shift, from where a pixel goes to where it comes from."""
    zero = torch.zeros_like(a)
    return torch.stack([torch.stack([a, b, zero], 1), torch.stack([c, d, zero], 1)], 1)


def _grid(matrix: Tensor, x: Tensor) -> Tensor:
    """Where pixels come from: angles are those of pixels, which coordinates in [-1, 1] distort."""
    height, width = x.shape[2:]
    matrix = matrix.clone()
    matrix[:, 0, 1] *= height / width
    matrix[:, 1, 0] *= width / height
    return functional.affine_grid(matrix, list(x.shape), align_corners=False)


def _sample(x: Tensor, grid: Tensor, mode: str) -> Tensor:
    return functional.grid_sample(x, grid, mode=mode, padding_mode="zeros", align_corners=False)


COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "sharpness": _sharpness,
    "solarize": _solarize,
    "posterize": _posterize,
    "autocontrast": _autocontrast,
}
"""Operations on images with values in [0, 1], by a signed strength for each."""

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "rotate": _rotate,
    "shear": _shear,
    "shift_across": _shift_across,
    "shift_down": _shift_down,
}
"""Affine maps by their signed strengths."""
