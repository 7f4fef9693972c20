"""Transforms of batches of images (batch, channels, height, width), and of their masks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from equipoise.core import (
    SettingError,
    require_between,
    require_count,
    require_positive,
    require_type,
)
from equipoise.layers.lipschitz import Bound, Chain, Part, round_up, unknown

__all__ = [
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

    Targets other than masks stay as they are. Random transforms draw from the generator that the
    call is given and from nothing else, so that a run can be repeated.

    Attributes:
        moves_pixels: Whether it changes where things are, so that targets that are images would
            no longer belong to `x`.
        takes_tables: Whether it also changes rows of features, (batch, features).
        random: Whether it changes the same sample otherwise each time.
    """

    moves_pixels: ClassVar[bool] = False
    takes_tables: ClassVar[bool] = False
    random: bool = False

    def __call__(
        self, x: Tensor, y: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the changed batch and its targets.

        Args:
            x: Images, shape (batch, channels, height, width), bytes from 0 to 255 or floats.
            y: Their targets; masks if of shape (batch, height, width).
            generator: The source of random numbers; random transforms need one.
        """
        if x.dim() != 4 and not (self.takes_tables and x.dim() == 2):
            rule = "have shape (batch, channels, height, width)"
            raise SettingError(f"{self._name}.x", rule, tuple(x.shape))
        if len(y) != len(x) or (y.dim() == 3 and y.shape[1:] != x.shape[2:]):
            rule = "have a target or a mask for each image"
            raise SettingError(f"{self._name}.y", rule, tuple(y.shape))
        if self.moves_pixels and y.dim() == 4:
            raise SettingError(
                f"{self._name}.y",
                "not be images, which it would not move",
                y,
                "Apply Degrade after it.",
                got=f"a tensor of shape {tuple(y.shape)}",
            )
        return self.apply(x, y, generator)

    @abstractmethod
    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Change a batch whose shapes are right."""

    def output_lipschitz(self) -> Part:
        """Return how far images in [0, 1] move each other's changed ones; by default unknown."""
        return unknown(self._name, "how far it moves images is not known")

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
            require_type("Compose.transforms", transform, Transform, "transforms")
        self.transforms = transforms
        self.random = any(each.random for each in transforms)

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

    def output_lipschitz(self) -> Part:
        return Chain(tuple(transform.output_lipschitz() for transform in self.transforms))

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

    def output_lipschitz(self) -> Part:
        return Chain(())  # distances are those of images in [0, 1]


@final
@dataclass(frozen=True)
class Normalize(Transform):
    """Shifts and scales each channel of images, or each feature of tables: `(x - mean) / std`.

    Args:
        mean: One number for each of them, or one for all.
        std: Likewise; positive.
    """

    takes_tables = True

    mean: tuple[float, ...] | float
    std: tuple[float, ...] | float

    def __post_init__(self) -> None:
        for value in self.std if isinstance(self.std, tuple) else (self.std,):
            require_positive("Normalize.std", value)
        for value in self.mean if isinstance(self.mean, tuple) else (self.mean,):
            require_between("Normalize.mean", value, -math.inf, math.inf, "()")

    def apply(
        self, x: Tensor, y: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        require_floats("Normalize", x)
        mean, std = (
            torch.as_tensor(value, dtype=x.dtype, device=x.device).reshape(-1, *[1] * (x.dim() - 2))
            for value in (self.mean, self.std)
        )
        for value in (mean, std):
            if len(value) not in (1, x.shape[1]):
                what = "channels" if x.dim() == 4 else "features"
                rule = f"have one number for each of {x.shape[1]} {what}"
                raise SettingError("Normalize", rule, len(value))
        return (x - mean) / std, y

    def output_lipschitz(self) -> Part:
        smallest = min(self.std) if isinstance(self.std, tuple) else self.std
        return Bound("Normalize", round_up(1 / smallest), f"1/std, std {smallest:g}")


@final
@dataclass(frozen=True)
class Greyscale(Transform):
    """Turns colours into luminance, `0.299 R + 0.587 G + 0.114 B` (ITU-R BT.601).

    Args:
        channels: How often to repeat it. Images of one channel are grey already.
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
            raise SettingError("Greyscale.x", "have 3 channels, or 1", x.shape[1])
        values = x if x.is_floating_point() else x.to(torch.float32)
        weights = values.new_tensor((0.299, 0.587, 0.114))
        grey = torch.einsum("bchw,c->bhw", values, weights)[:, None]
        return match_kind(grey, x).expand(-1, self.channels, -1, -1), y

    def output_lipschitz(self) -> Part:
        # A grey image is only repeated, and colours are weighted by less than that.
        return Bound("Greyscale", round_up(math.sqrt(self.channels)), "sqrt(channels)")


def require_floats(owner: str, x: Tensor) -> None:
    """Raise unless images hold floats."""
    if not x.is_floating_point():
        raise SettingError(f"{owner}.x", "hold floats", x.dtype, "Apply ToFloat() first.")


def require_generator(owner: str, generator: torch.Generator | None) -> torch.Generator:
    """Return the generator of random numbers, or raise if there is none."""
    if generator is None:
        rule = "be a torch.Generator, so that the run can be repeated"
        raise SettingError(f"{owner}.generator", rule, generator)
    return generator


def match_kind(values: Tensor, x: Tensor) -> Tensor:
    """Return values computed from images as bytes if those are bytes."""
    return values if x.is_floating_point() else values.round().clamp(0, 255).to(x.dtype)
