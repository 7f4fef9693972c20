"""Transforms that mix pairs of images, and their classes by the same weights."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError, require_count, require_positive
from equipoise.data.transform import Transform, require_floats, require_generator

__all__ = ["CutMix", "Mixup"]


@dataclass(frozen=True)
class _Mix(Transform):
    """Mixes each image of a batch with another one of it, by a weight `lambda ~ Beta(a, a)`.

    Targets become weights of all classes: `lambda` of the image's own, `1 - lambda` of the other's.

    Args:
        classes: How many classes there are.
        alpha: The `a` of the distribution: weights near 0 and 1 for small ones, near 1/2 for large.
    """

    classes: int
    alpha: float = 1.0

    random = True

    def __post_init__(self) -> None:
        require_count(f"{self._name}.classes", self.classes)
        require_positive(f"{self._name}.alpha", self.alpha)

    @abstractmethod
    def mix(
        self, x: Tensor, other: Tensor, weight: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images, and the weights of the first ones in them.

        Args:
            x: Images.
            other: As many others.
            weight: The weights that were drawn, float64 of shape (batch,).
            generator: The source of random numbers.
        """

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats(self._name, x)
        generator = require_generator(self._name, generator)
        if y.dim() != 1 or y.is_floating_point():
            raise SettingError(
                f"{self._name}.y",
                "be one class for each image",
                y,
                got=f"{y.dtype} of shape {tuple(y.shape)}",
            )
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < self.classes:
            rule = f"be classes from 0 to {self.classes - 1}"
            raise SettingError(f"{self._name}.y", rule, y, got=f"{int(y.min())} to {int(y.max())}")
        partner = torch.randperm(len(x), generator=generator, device=generator.device).to(y.device)
        # Torch draws no beta variables from a generator that it is given.
        seed = torch.randint(2**62, (1,), generator=generator, device=generator.device)
        drawn = np.random.default_rng(int(seed)).beta(self.alpha, self.alpha, len(x))
        mixed, weight = self.mix(x, x[partner], torch.from_numpy(drawn).to(x.device), generator)
        own, theirs = (functional.one_hot(each, self.classes) for each in (y, y[partner]))
        weight = weight.to(x.dtype)[:, None]
        return mixed, weight * own + (1 - weight) * theirs


@final
@dataclass(frozen=True)
class Mixup(_Mix):
    """Adds pairs of images: `lambda x_i + (1 - lambda) x_j` (Zhang et al., 2018).

    Each image has a `lambda ~ Beta(a, a)` of its own, and its target is `lambda` of its own class
    and `1 - lambda` of the other's.

    Args:
        classes: How many classes there are.
        alpha: The `a` of the distribution: weights near 0 and 1 for small ones, near 1/2 for large.
    """

    def mix(
        self, x: Tensor, other: Tensor, weight: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        share = weight.to(x.dtype).reshape(-1, 1, 1, 1)
        return share * x + (1 - share) * other, weight


@final
@dataclass(frozen=True)
class CutMix(_Mix):
    """Replaces a box of each image by that of another one (Yun et al., 2019).

    The box has sides `sqrt(1 - lambda)` times those of the image, rounded down, and a centre drawn
    from all of its pixels; what reaches beyond the edges is cut off, and `lambda` becomes
    the fraction of the image that is its own.

    Args:
        classes: How many classes there are.
        alpha: The `a` of the distribution `lambda ~ Beta(a, a)`; 1 draws it uniformly.
    """

    def mix(
        self, x: Tensor, other: Tensor, weight: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        inside = []
        for size in x.shape[2:]:
            length = (size * (1 - weight).sqrt()).long()
            centre = torch.randint(size, (len(x),), generator=generator, device=generator.device)
            start = centre.to(x.device) - length // 2
            place = torch.arange(size, device=x.device)
            inside.append((place >= start[:, None]) & (place < (start + length)[:, None]))
        box = inside[0][:, :, None] & inside[1][:, None, :]  # (batch, height, width)
        return torch.where(box[:, None], other, x), 1 - box.double().mean((1, 2))
