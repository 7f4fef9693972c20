"""Networks for images: what they all take, and those around one equilibrium."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core.transforms import require_dtype
from equipoise.core.tree import Tree
from equipoise.core.validate import SettingError, require_count, require_type
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.lipschitz import Chain, Part
from equipoise.models.model import Model

__all__ = ["ExplicitNetwork", "ImageModel", "ImageNetwork", "require_image_shape"]


def require_image_shape(owner: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """Return channels, height and width, or refuse what is not the shape of an image.

    Args:
        owner: What takes the images, for the message.
        shape: The shape.
    """
    if len(shape) != 3:
        raise SettingError(f"{owner}.input_shape", "be channels, height and width", tuple(shape))
    for side in shape:
        require_count(f"{owner}.input_shape", side)
    channels, height, width = shape
    return channels, height, width


class ImageModel(Model):
    """A network that takes images of one shape, or of any size that suits it.

    Args:
        input_shape: Channels, height and width of the images for which the network was made.
        size_multiple: What height and width must be multiples of; by default they must be those of
            `input_shape`.

    Shape:
        (batch, channels, height, width), or flat (batch, channels * height * width) at the size of
        `input_shape`.
    """

    def __init__(self, input_shape: Sequence[int], *, size_multiple: int | None = None) -> None:
        super().__init__()
        owner = type(self).__name__
        if size_multiple is not None:
            require_count(f"{owner}.size_multiple", size_multiple)
        self.input_shape = require_image_shape(owner, input_shape)
        self.size_multiple = size_multiple

    def prepare(self, x: Tensor) -> Tensor:
        """Return images that the network can take, in the layout in which convolutions are fastest.

        Raises `ValueError` for anything else.
        """
        channels, height, width = self.input_shape
        if not x.is_floating_point():
            raise SettingError(
                f"The input of {self.name}",
                "be floating-point numbers",
                x,
                "Divide bytes by 255.",
                got=str(x.dtype),
            )
        require_dtype(x, next(self.parameters(), x), f"The input of {self.name}")
        if x.dim() == 2 and x.shape[1] == channels * height * width:
            x = x.reshape(-1, channels, height, width)
        multiple = self.size_multiple
        fits = x.dim() == 4 and x.shape[1] == channels
        if fits and multiple is None:
            fits = x.shape[2:] == (height, width)
        elif fits and multiple is not None:
            fits = all(side > 0 and side % multiple == 0 for side in x.shape[2:])
        if not fits:
            sides = f"{height}, {width}" if multiple is None else "height, width"
            also = (
                f" with sides that are multiples of {multiple}" if multiple not in (None, 1) else ""
            )
            raise SettingError(
                f"The input of {self.name}",
                f"have shape (batch, {channels}, {sides}){also}",
                tuple(x.shape),
            )
        return x.contiguous(memory_format=torch.channels_last)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.input_shape))
        parts = ", ".join(f"{part} {count:,}" for part, count in self.parameter_counts().items())
        return f"{type(self).__name__}({self.name}: images {shape}; parameters: {parts})"


class ImageNetwork(ImageModel):
    """An extractor, an equilibrium layer and a head: `y = head(z)`, `z = f(z, extractor(x))`.

    Args:
        extractor: Maps images to the input of the equilibrium.
        equilibrium: The equilibrium layer.
        head: Maps equilibria to predictions. Its attribute `classifier`, if it has one, is the last
            map to the classes.
        input_shape: Channels, height and width of the images for which the network was made.
        size_multiple: What height and width must be multiples of; by default they must be those of
            `input_shape`.

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
        size_multiple: int | None = None,
    ) -> None:
        super().__init__(input_shape, size_multiple=size_multiple)
        require_type("ImageNetwork.equilibrium", equilibrium, Equilibrium, "an Equilibrium")
        self.extractor = extractor
        self.equilibrium = equilibrium
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for a batch of images."""
        y: Tensor = self.head(self.equilibrium(self.extractor(x)))
        return y

    def output_lipschitz(self) -> Part:
        """Return how far predictions move with the images."""
        return Chain((self.extractor, self.equilibrium, self.head))

    def features(self, x: Tensor) -> Tree:
        """Return the equilibrium for a batch of images: a tensor, or several as a tree."""
        return self.equilibrium(self.extractor(self.prepare(x)))

    def parameter_counts(self) -> dict[str, int]:
        """Return the parameters of `extractor`, `equilibrium`, `head`, `classifier` and `total`.

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


class ExplicitNetwork(ImageModel):
    """A network without an equilibrium: `y = classifier(body(x))`.

    Args:
        body: Maps images to features.
        classifier: Maps features to predictions.
        input_shape: Channels, height and width of the images for which the network was made.
        size_multiple: What height and width must be multiples of; by default they must be those of
            `input_shape`.
    """

    def __init__(
        self,
        body: nn.Module,
        classifier: nn.Module,
        input_shape: Sequence[int],
        *,
        size_multiple: int | None = None,
    ) -> None:
        super().__init__(input_shape, size_multiple=size_multiple)
        self.body = body
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for a batch of images."""
        y: Tensor = self.classifier(self.body(x))
        return y

    def output_lipschitz(self) -> Part:
        """Return how far predictions move with the images."""
        return Chain((self.body, self.classifier))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
