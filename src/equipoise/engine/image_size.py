"""Small images first: the side of the training images as a function of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core import SettingError
from equipoise.core.module_mode import evaluation_mode

__all__ = ["ImageSizes"]

KEY = "train.image_sizes"


class ImageSizes:
    """Shrinks the images of a training step to the side that is its turn.

    The run is divided into as many equal parts as there are sides. Early steps on small images cost
    less, by the number of pixels, and teach what later ones refine (Howard's progressive resizing,
    2018). Images are shrunk after all other transforms, by averages (bilinear with antialiasing).

    Args:
        sides: The sides in pixels, in order; the last is that of the images themselves.
        model: What is trained; it must take images of other sizes.
        x: A batch of training images.
        y: Its targets.
    """

    def __init__(self, sides: Sequence[int], model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.sides = tuple(sides)
        if not sides:
            return
        multiple = getattr(model, "size_multiple", None)
        if multiple is None:
            name = getattr(model, "name", type(model).__name__)
            raise self._error(f"be left out for {name!r}, which takes images of one size")
        if x.dim() != 4 or x.shape[2] != x.shape[3]:
            shape = f"samples of shape {tuple(x.shape[1:])}"
            raise self._error("come with square images", f"{list(sides)} with {shape}")
        if y.dim() > 2:
            raise self._error("be left out where each pixel has a target")
        if any(side % multiple for side in sides):
            raise self._error(f"be multiples of {multiple}, which the network needs")
        if self.sides[-1] != x.shape[2]:
            raise self._error(f"end with {x.shape[2]}, the side of the images")
        if max(sides) > x.shape[2]:
            raise self._error(f"be at most {x.shape[2]}, the side of the images")
        with evaluation_mode(model), torch.no_grad():
            try:
                model(self._shrink(x[:1], min(sides)))
            except ValueError as error:
                raise self._error(f"be sides that the network takes ({error})") from error

    @property
    def pixels(self) -> float:
        """How many pixels images have, in the mean over the run, as a fraction of their own."""
        if not self.sides:
            return 1.0
        return sum(side**2 for side in self.sides) / (len(self.sides) * self.sides[-1] ** 2)

    def _error(self, rule: str, got: str | None = None) -> SettingError:
        remedy = f"Set {KEY}=[] for one size throughout."
        return SettingError(KEY, rule, list(self.sides), remedy, got=got)

    def __call__(self, x: Tensor, step: int, steps: int) -> Tensor:
        """Return the images of a step at their side.

        Args:
            x: The images.
            step: The number of the step, from 0.
            steps: Steps of the whole run.
        """
        if not self.sides:
            return x
        return self._shrink(
            x, self.sides[min(step * len(self.sides) // steps, len(self.sides) - 1)]
        )

    @staticmethod
    def _shrink(x: Tensor, side: int) -> Tensor:
        if x.shape[2] == side:
            return x
        return functional.interpolate(
            x, size=(side, side), mode="bilinear", antialias=True, align_corners=False
        )
