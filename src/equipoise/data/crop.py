"""Changes of where things are in pictures: sizes, parts and mirroring, of masks along with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import require_count, require_fraction, require_positive
from equipoise.data.transform import Transform, match_kind, require_generator

__all__ = ["PadCropFlip", "RandomResizedCrop", "Resize"]


@final
@dataclass(frozen=True)
class Resize(Transform):
    """Brings pictures to a size by bilinear interpolation, with a wider filter where they shrink; masks by the nearest pixel.

    Args:
        size: Height and width.
    """

    moves_pixels = True

    size: tuple[int, int]

    def __post_init__(self) -> None:
        _check_size("Resize", self.size)

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
    """Pads pictures, cuts out a part of the old size at random, and mirrors some from left to right (He et al., 2016).

    Args:
        padding: Pixels of `fill` on each side.
        flip: The probability of mirroring.
        fill: What to pad pictures with.
        ignore: What to pad masks with.
    """

    moves_pixels = True

    padding: int = 4
    flip: float = 0.5
    fill: float = 0
    ignore: int = 255

    def __post_init__(self) -> None:
        if isinstance(self.padding, bool) or not isinstance(self.padding, int) or self.padding < 0:
            raise ValueError(
                f"PadCropFlip.padding must be a whole number of at least 0; got {self.padding!r}."
            )
        _check_flip("PadCropFlip", self.flip)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        count, _, height, width = x.shape
        top, left = (
            _whole("PadCropFlip", 2 * self.padding + 1, count, generator) for _ in range(2)
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
    """Cuts out a box of random area and shape, brings it to a size, and mirrors some (Szegedy et al., 2015).

    A box has `u` times the area of the picture, `u` uniform in `scale`, and the logarithm of its
    width over its height is uniform in `ratio`. Of ten boxes the first that fits is taken; if none
    does, the largest box about the centre of a shape in `ratio`. Each picture is multiplied by its
    own two matrices of interpolation weights, so the batch needs no loop.

    Args:
        size: Height and width of the result.
        scale: Least and largest area, as parts of the picture's.
        ratio: Least and largest width over height.
        flip: The probability of mirroring.
    """

    moves_pixels = True

    size: tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    def __post_init__(self) -> None:
        _check_size("RandomResizedCrop", self.size)
        for name, (least, most) in (("scale", self.scale), ("ratio", self.ratio)):
            require_positive(f"RandomResizedCrop.{name}", least)
            if not least <= most < math.inf:
                raise ValueError(f"RandomResizedCrop.{name} must rise; got {(least, most)}.")
        require_fraction("RandomResizedCrop.scale", self.scale[1])
        _check_flip("RandomResizedCrop", self.flip)

    def boxes(
        self, count: int, height: int, width: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw boxes: top, left, height and width of each, shape (count, 4).

        Args:
            count: How many.
            height: Of the pictures.
            width: Of the pictures.
            generator: Where random numbers come from.
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
    """Return the matrices (batch, new, whole) that interpolate linearly within a segment, with a wider filter where it shrinks."""
    step = (length / new)[:, None, None]
    centre = (
        torch.arange(new)[:, None] + 0.5
    ) * step  # (batch, new, 1), from the start of the segment
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


def _whole(owner: str, below: int, count: int, generator: torch.Generator | None) -> Tensor:
    return (_uniform(owner, (count,), generator) * below).long().clamp(max=below - 1)


def _check_size(owner: str, size: object) -> None:
    if not isinstance(size, tuple) or len(size) != 2:
        raise ValueError(f"{owner}.size must be a pair (height, width); got {size!r}.")
    for length in size:
        require_count(f"{owner}.size", length)


def _check_flip(owner: str, flip: float) -> None:
    if not 0 <= flip <= 1:
        raise ValueError(f"{owner}.flip must be in [0, 1]; got {flip!r}.")
