"""Transforms that move pixels, and the masks along with them: resizing, cropping, flipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import (
    SettingError,
    require_between,
    require_fraction,
    require_positive,
    require_whole,
)
from equipoise.data.image import require_size
from equipoise.data.transform import Transform, match_kind, require_generator

__all__ = ["PadCropFlip", "RandomResizedCrop", "Resize"]


@final
@dataclass(frozen=True)
class Resize(Transform):
    """Resizes images bilinearly, with an antialiasing filter, and masks by the nearest pixel.

    Args:
        size: Height and width.
    """

    moves_pixels = True

    size: tuple[int, int]

    def __post_init__(self) -> None:
        require_size("Resize.size", self.size)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        values = x if x.is_floating_point() else x.to(torch.float32)
        scaled = functional.interpolate(values, self.size, mode="bilinear", antialias=True)
        if y.dim() == 3:
            rows, columns = (
                ((torch.arange(new, device=y.device) + 0.5) * old / new).long()
                for new, old in zip(self.size, y.shape[1:], strict=True)
            )
            y = y[:, rows[:, None], columns]
        return match_kind(scaled, x), y


@final
@dataclass(frozen=True)
class PadCropFlip(Transform):
    """Pads images, crops them at random to their old size, and mirrors some (He et al., 2016).

    Args:
        padding: Pixels of `fill` on each side.
        flip: The probability of mirroring.
        fill: The value to pad images with.
        ignore: The label to pad masks with.
    """

    moves_pixels = True
    random = True

    padding: int = 4
    flip: float = 0.5
    fill: float = 0
    ignore: int = 255

    def __post_init__(self) -> None:
        require_whole("PadCropFlip.padding", self.padding)
        require_between("PadCropFlip.flip", self.flip, 0, 1)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        count, _, height, width = x.shape
        top, left = (
            _random_integers("PadCropFlip", 2 * self.padding + 1, count, generator)
            for _ in range(2)
        )
        mirrored = _uniform("PadCropFlip", (count,), generator) < self.flip
        rows = top[:, None] + torch.arange(height)
        columns = left[:, None] + torch.arange(width)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        x = _pick(functional.pad(x, (self.padding,) * 4, value=self.fill), rows, columns)
        if y.dim() == 3:
            y = _pick(
                functional.pad(y, (self.padding,) * 4, value=self.ignore)[:, None], rows, columns
            )[:, 0]
        return x, y


@final
@dataclass(frozen=True)
class RandomResizedCrop(Transform):
    """Crops a random box, resizes it, and mirrors some of the images (Szegedy et al., 2015).

    A box has `u` times the area of the image, `u` uniform in `scale`, and the logarithm of its
    width over its height is uniform in `ratio`. The first of ten boxes that fits is used; if none
    does, the largest box around the centre with a shape in `ratio`. Each image is multiplied by its
    own two matrices of interpolation weights, so the batch needs no loop.

    Args:
        size: Height and width of the result.
        scale: Smallest and largest area, as fractions of the image's.
        ratio: Smallest and largest width over height.
        flip: The probability of mirroring.
    """

    moves_pixels = True
    random = True

    size: tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        require_size("RandomResizedCrop.size", self.size)
        for name, (least, most) in (("scale", self.scale), ("ratio", self.ratio)):
            require_positive(f"RandomResizedCrop.{name}", least)
            require_positive(f"RandomResizedCrop.{name}", most)
            if least > most:
                raise SettingError(f"RandomResizedCrop.{name}", "rise", (least, most))
        require_fraction("RandomResizedCrop.scale", self.scale[1])
        require_between("RandomResizedCrop.flip", self.flip, 0, 1)

    def boxes(
        self, count: int, height: int, width: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw boxes: top, left, height and width of each, shape (count, 4).

        Args:
            count: How many.
            height: The height of the images.
            width: The width of the images.
            generator: The source of random numbers.
        """
        draws = _uniform("RandomResizedCrop", (4, count, 10), generator)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * draws[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        shape = torch.exp(low + (high - low) * draws[1])
        h, w = (
            torch.round(torch.sqrt(area / shape)).long(),
            torch.round(torch.sqrt(area * shape)).long(),
        )
        fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
        chosen = fits.to(torch.uint8).argmax(1, keepdim=True)  # the first of the largest
        h, w = h.gather(1, chosen)[:, 0], w.gather(1, chosen)[:, 0]
        centre = min(max(width / height, self.ratio[0]), self.ratio[1])
        whole = (
            max(1, min(height, round(width / centre))),
            max(1, min(width, round(height * centre))),
        )
        any_fits = fits.any(1)
        h, w = torch.where(any_fits, h, whole[0]), torch.where(any_fits, w, whole[1])
        top = (draws[2].gather(1, chosen)[:, 0] * (height - h + 1)).long()
        left = (draws[3].gather(1, chosen)[:, 0] * (width - w + 1)).long()
        top, left = (
            torch.where(any_fits, top, (height - h) // 2),
            torch.where(any_fits, left, (width - w) // 2),
        )
        return torch.stack([top, left, h, w], dim=1)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        count, _, height, width = x.shape
        top, left, h, w = self.boxes(count, height, width, generator).unbind(1)
        mirrored = _uniform("RandomResizedCrop", (count,), generator) < self.flip
        values = x if x.is_floating_point() else x.to(torch.float32)
        down = _weights(top, h, height, self.size[0])
        across = _weights(left, w, width, self.size[1])
        across = torch.where(mirrored[:, None, None], across.flip(1), across)
        scaled = down.to(values)[:, None] @ (values @ across.to(values)[:, None].mT)
        if y.dim() == 3:
            rows, columns = _nearest(top, h, self.size[0]), _nearest(left, w, self.size[1])
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
            y = _pick(y[:, None], rows, columns)[:, 0]
        return match_kind(scaled, x), y


def _weights(start: Tensor, length: Tensor, whole: int, new: int) -> Tensor:
    """Return the matrices (batch, new, whole) that resize a segment linearly, with antialiasing."""
    step = (length / new)[:, None, None]
    # (batch, new, 1), from the start of the segment
    centre = (torch.arange(new)[:, None] + 0.5) * step
    pixel = torch.arange(whole) - start[:, None, None] + 0.5
    weight = (1 - (pixel - centre).abs() / step.clamp(min=1)).clamp(min=0)
    weight = weight * ((pixel > 0) & (pixel < length[:, None, None]))
    return weight / weight.sum(2, keepdim=True)


def _nearest(start: Tensor, length: Tensor, new: int) -> Tensor:
    return start[:, None] + ((torch.arange(new) + 0.5) * length[:, None] / new).long()


def _pick(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return `x[b, c, rows[b, i], columns[b, j]]`."""
    count, channels = x.shape[:2]
    rows, columns = rows.to(x.device), columns.to(x.device)
    x = x.gather(2, rows[:, None, :, None].expand(count, channels, -1, x.shape[3]))
    return x.gather(3, columns[:, None, None, :].expand(count, channels, x.shape[2], -1))


def _uniform(owner: str, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    generator = require_generator(owner, generator)
    return torch.rand(shape, generator=generator, device=generator.device).cpu()


def _random_integers(
    owner: str, below: int, count: int, generator: torch.Generator | None
) -> Tensor:
    return (_uniform(owner, (count,), generator) * below).long().clamp(max=below - 1)
