"""Damaged images from clean ones, to train and to score what restores them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from equipoise.core import require_flag, require_positive, require_type
from equipoise.data.transform import Transform, require_floats, require_generator
from equipoise.operators import Degradation, Identity

__all__ = ["Degrade"]


@final
@dataclass(frozen=True)
class Degrade(Transform):
    """Damages images and makes the clean ones the targets, `y = A x + sigma n` with Gaussian `n`.

    Put it after all transforms that move pixels, which must move clean and damaged ones alike.

    Args:
        sigma: Standard deviation of the noise, in the units of the images.
        degradation: `A`; by default nothing but noise.
        per_image: Whether the random numbers of an image depend on the image alone, so that it is
            damaged alike in every batch, order and number of processes, as scores need. Otherwise
            they come from the generator of the call, and differ from epoch to epoch.
    """

    sigma: float
    degradation: Degradation = field(default_factory=Identity)
    per_image: bool = False

    def __post_init__(self) -> None:
        require_positive("Degrade.sigma", self.sigma, or_zero=True)
        require_type("Degrade.degradation", self.degradation, Degradation, "a Degradation")
        require_flag("Degrade.per_image", self.per_image)
        object.__setattr__(self, "random", not self.per_image)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats("Degrade", x)
        degradation = self.degradation.to(x.device, x.dtype)
        degradation.check(x)
        if self.per_image:
            images = (x[i : i + 1] for i in range(len(x)))
            parts = [
                degradation.degrade(image, self.sigma, _own_generator(image)) for image in images
            ]
            return (torch.cat(parts) if parts else x), x
        return degradation.degrade(x, self.sigma, require_generator("Degrade", generator)), x


def _own_generator(image: Tensor) -> torch.Generator:
    """A generator whose seed is a digest of the image, in bytes, which rounding does not change."""
    pixels = (image * 255).round().clamp(0, 255).to("cpu", torch.uint8).contiguous()
    digest = hashlib.blake2b(pixels.numpy().tobytes(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
