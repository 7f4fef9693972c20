"""Changes of pictures in batches (batch, channels, height, width), with masks (batch, height, width) where targets are masks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from equipoise.core import require_count, require_positive

__all__ = [
    "AddNoise",
    "Compose",
    "Greyscale",
    "Normalize",
    "ToFloat",
    "Transform",
    "match_kind",
    "require_floats",
    "require_generator",
]


class Transform(ABC):
    """Changes a batch and, if its targets are masks, the masks along with it.

    Other targets than masks stay as they are. Random transforms draw from the generator that the
    call is given and from nothing else, so that a run can be repeated.

    Attributes:
        moves_pixels: Whether it changes where things are, so that targets that are pictures would
            no longer belong to `x`.
    """

    moves_pixels: ClassVar[bool] = False

    def __call__(
        self, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the changed batch and its targets.

        Args:
            x: Pictures, shape (batch, channels, height, width), bytes from 0 to 255 or floats.
            y: Their targets; masks if of shape (batch, height, width).
            generator: Where random numbers come from; random transforms need one.
        """
        if x.dim() != 4:
            raise ValueError(
                f"{self._name}.x must have shape (batch, channels, height, width); got "
                f"{tuple(x.shape)}."
            )
        if len(y) != len(x) or (y.dim() == 3 and y.shape[1:] != x.shape[2:]):
            raise ValueError(
                f"{self._name}.y must have a target or a mask for each picture; got "
                f"{tuple(y.shape)}."
            )
        if self.moves_pixels and y.dim() == 4:
            raise ValueError(
                f"{self._name}.y must not be pictures, which it would not move; got them. "
                "Apply AddNoise after it."
            )
        return self.apply(x, y, generator)

    @abstractmethod
    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Change a batch whose shapes are right."""

    @property
    def _name(self) -> str:
        return type(self).__name__


@final
class Compose(Transform):
    """Applies transforms one after the other.

    Args:
        transforms: What to apply, the first one first.
    """

    def __init__(self, *transforms: Transform) -> None:
        for transform in transforms:
            if not isinstance(transform, Transform):
                raise ValueError(
                    f"Compose.transforms must be transforms; got {type(transform).__name__}."
                )
        self.transforms = transforms

    def __call__(
        self, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.apply(x, y, generator)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        for transform in self.transforms:
            x, y = transform(x, y, generator=generator)
        return x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compose) and self.transforms == other.transforms

    def __hash__(self) -> int:
        return hash(self.transforms)

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


@final
@dataclass(frozen=True)
class ToFloat(Transform):
    """Turns bytes into float32 in [0, 1]; floats stay as they are."""

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return (x if x.is_floating_point() else x.to(torch.float32) / 255), y


@final
@dataclass(frozen=True)
class Normalize(Transform):
    """Shifts and scales each channel: `(x - mean) / std`.

    Args:
        mean: One number for each channel, or one for all.
        std: Likewise; positive.
    """

    mean: tuple[float, ...] | float
    std: tuple[float, ...] | float

    def __post_init__(self) -> None:
        for value in self.std if isinstance(self.std, tuple) else (self.std,):
            require_positive("Normalize.std", value)
        for value in self.mean if isinstance(self.mean, tuple) else (self.mean,):
            if not math.isfinite(value):
                raise ValueError(f"Normalize.mean must be finite; got {value!r}.")

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats("Normalize", x)
        moved = [
            torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1, 1, 1)
            for value in (self.mean, self.std)
        ]
        for value in moved:
            if len(value) not in (1, x.shape[1]):
                raise ValueError(
                    f"Normalize must have one number for each of {x.shape[1]} channels; got "
                    f"{len(value)}."
                )
        return (x - moved[0]) / moved[1], y


@final
@dataclass(frozen=True)
class Greyscale(Transform):
    """Turns three channels into their luminance, `0.299 R + 0.587 G + 0.114 B` (ITU-R BT.601); one channel is that already.

    Args:
        channels: How often to repeat it.
    """

    channels: int = 1

    def __post_init__(self) -> None:
        require_count("Greyscale.channels", self.channels)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        if x.shape[1] == 1:
            return x.expand(-1, self.channels, -1, -1), y
        if x.shape[1] != 3:
            raise ValueError(f"Greyscale.x must have 3 channels, or 1; got {x.shape[1]}.")
        values = x if x.is_floating_point() else x.to(torch.float32)
        weights = values.new_tensor((0.299, 0.587, 0.114))
        grey = torch.einsum("bchw,c->bhw", values, weights)[:, None]
        return match_kind(grey, x).expand(-1, self.channels, -1, -1), y


@final
@dataclass(frozen=True)
class AddNoise(Transform):
    """Adds Gaussian noise and makes the clean pictures the targets, for a model that is to remove it.

    Put it after all that moves pixels, which must move clean and noisy ones alike.

    Args:
        sigma: Standard deviation of the noise, in the units of the pictures.
    """

    sigma: float

    def __post_init__(self) -> None:
        require_positive("AddNoise.sigma", self.sigma, or_zero=True)

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats("AddNoise", x)
        generator = require_generator("AddNoise", generator)
        noise = torch.randn(x.shape, generator=generator, device=generator.device)
        return x + self.sigma * noise.to(x), x


def require_floats(owner: str, x: Tensor) -> None:
    """Raise unless pictures hold floats."""
    if not x.is_floating_point():
        raise ValueError(f"{owner}.x must hold floats; got {x.dtype}. Apply ToFloat() first.")


def require_generator(owner: str, generator: torch.Generator | None) -> torch.Generator:
    """Return the generator of random numbers, or raise if there is none."""
    if generator is None:
        raise ValueError(
            f"{owner}.generator must be a torch.Generator, so that the run can be repeated; "
            "got None."
        )
    return generator


def match_kind(values: Tensor, x: Tensor) -> Tensor:
    """Return values computed from pictures as bytes if those are bytes."""
    return values if x.is_floating_point() else values.round().clamp(0, 255).to(x.dtype)
