"""A network around one equilibrium."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core.validate import require_count
from equipoise.layers.equilibrium import Equilibrium

__all__ = ["Network"]


class Network(nn.Module):
    """An extractor, an equilibrium layer and a head: `y = head(z)`, `z = f(z, extractor(x))` (OptEq, eq. 5).

    Args:
        extractor: Maps images to the input of the equilibrium.
        equilibrium: The equilibrium layer.
        head: Maps equilibria to predictions. Its attribute `classifier`, if it has one, is the last
            map to the classes.
        input_shape: Channels, height and width of the images for which the network was made.
        multiple: The number that height and width must be multiples of; by default they must be
            those of `input_shape`.

    Attributes:
        name: The name under which `create_model` made it.

    Shape:
        (batch, channels, height, width), or flat (batch, channels * height * width) at the size of
        `input_shape`.
    """

    def __init__(
        self,
        extractor: nn.Module,
        equilibrium: Equilibrium,
        head: nn.Module,
        input_shape: Sequence[int],
        *,
        multiple: int | None = None,
    ) -> None:
        super().__init__()
        given: object = equilibrium
        if not isinstance(given, Equilibrium):
            raise ValueError(
                f"Network.equilibrium must be an Equilibrium; got {type(given).__name__}."
            )
        if len(input_shape) != 3:
            raise ValueError(
                f"Network.input_shape must be channels, height and width; got {tuple(input_shape)}."
            )
        if multiple is not None:
            require_count("Network.multiple", multiple)
        self.name = "network"
        self.extractor = extractor
        self.equilibrium = equilibrium
        self.head = head
        channels, height, width = input_shape
        self.input_shape = (channels, height, width)
        self.multiple = multiple

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for a batch of images."""
        y: Tensor = self.head(self.features(x))
        return y

    def features(self, x: Tensor) -> Tensor:
        """Return the equilibrium for a batch of images."""
        z = self.equilibrium(self.extractor(self.images(x)))
        assert isinstance(z, Tensor)
        return z

    def parameter_counts(self) -> dict[str, int]:
        """Return how many parameters there are in the `extractor`, `equilibrium`, `head` and `classifier`, and in `total`.

        The head is counted without its classifier, whose size depends on the number of classes.
        """
        classifier = getattr(self.head, "classifier", None)
        last = 0 if classifier is None else _count(classifier)
        counts = {
            "extractor": _count(self.extractor),
            "equilibrium": _count(self.equilibrium),
            "head": _count(self.head) - last,
            "classifier": last,
        }
        return {**counts, "total": sum(counts.values())}

    def images(self, x: Tensor) -> Tensor:
        """Return the input as images that the network can take, laid out as convolutions run fastest, or raise."""
        channels, height, width = self.input_shape
        if not x.is_floating_point():
            raise ValueError(
                f"The input of {self.name} must be floating-point numbers; got {x.dtype}. "
                "Divide bytes by 255."
            )
        if x.dim() == 2 and x.shape[1] == channels * height * width:
            x = x.reshape(-1, channels, height, width)
        fits = x.dim() == 4 and x.shape[1] == channels
        if fits and self.multiple is None:
            fits = x.shape[2:] == (height, width)
        elif fits:
            fits = all(side > 0 and side % self.multiple == 0 for side in x.shape[2:])  # type: ignore[operator]
        if not fits:
            free = self.multiple is not None
            sides = "height, width" if free else f"{height}, {width}"
            also = (
                f" with sides that are multiples of {self.multiple}"
                if free and self.multiple != 1
                else ""
            )
            raise ValueError(
                f"The input of {self.name} must have shape (batch, {channels}, "
                f"{sides}){also}; got {tuple(x.shape)}."
            )
        return x.contiguous(memory_format=torch.channels_last)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.input_shape))
        parts = ", ".join(f"{part} {count:,}" for part, count in self.parameter_counts().items())
        return f"{type(self).__name__}({self.name}: images {shape}; parameters: {parts})"


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
