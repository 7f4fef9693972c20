"""The feed-forward network that equilibrium networks are compared with (OptEq, eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.core.validate import require_count
from equipoise.models.extractor import convolutional_extractor
from equipoise.models.factory import register_model
from equipoise.models.head import PixelHead, PooledHead
from equipoise.models.image_network import ExplicitNetwork, require_image_shape
from equipoise.models.table_network import TableModel

__all__ = ["MLP", "InputSkip"]


class InputSkip(nn.Module):
    """`z_{k+1} = relu(W_k z_k + U_k x + b_k)`, `z_0 = x`, by 3 x 3 convolutions (OptEq, eq. 1).

    Args:
        channels: Channels of the input.
        widths: Channels of `z_1, z_2, ...`.

    Shape:
        (batch, channels, height, width) to (batch, widths[-1], height, width).
    """

    def __init__(self, channels: int, widths: Sequence[int]) -> None:
        super().__init__()
        before = [channels, *widths[:-1]]
        self.weights = nn.ModuleList(
            nn.Conv2d(into, width, 3, padding=1, bias=False)
            for into, width in zip(before, widths, strict=True)
        )
        # The first layer sees the input already.
        self.inputs = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for width in widths[1:]
        )
        self.bias = nn.Parameter(torch.zeros(widths[0], 1, 1))
        for part in [*self.weights, *self.inputs]:
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer."""
        z = torch.relu(self.weights[0](x) + self.bias)
        for weight, inject in zip(list(self.weights)[1:], self.inputs, strict=True):
            z = torch.relu(weight(z) + inject(x))
        return z


@register_model("dnn-cifar10-199k")
def dnn_cifar10(
    *, num_classes: int = 10, input_shape: Sequence[int] = (3, 32, 32)
) -> ExplicitNetwork:
    """CIFAR-10, five layers that see the input again: OptEq's own baseline (OptEq, eq. 1, Table 3).

    The paper gives it the size of the OptEq, 199 k parameters, and no widths; these have 199,068
    in all.

    Args:
        num_classes: Number of classes.
        input_shape: Channels, height and width of the images.
    """
    shape = require_image_shape("dnn-cifar10-199k", input_shape)
    widths = (16, 32, 64, 76, 72)
    body = nn.Sequential(convolutional_extractor(shape[0], [30]), InputSkip(30, widths))
    return ExplicitNetwork(body, PooledHead(widths[-1], 4, num_classes), shape)


@register_model("fcn-cityscapes")
def fcn(*, num_classes: int = 19) -> ExplicitNetwork:
    """Cityscapes, a class for each pixel: convolutions of the size of the OptEq (OptEq, Table 10).

    The extractor and head are those of `opteq-cityscapes`; in place of the equilibrium there are
    three layers of convolution, batch normalisation and ReLU (Long et al., 2015).

    Args:
        num_classes: Number of classes.
    """
    widths = [492, 512, 512]
    body = nn.Sequential(
        convolutional_extractor(3, [64, 128, 256]),
        convolutional_extractor(256, widths, stride=1),
        nn.Conv2d(512, 256, 1),
    )
    return ExplicitNetwork(
        body, PixelHead(256, num_classes, scale=8), (3, 512, 1024), size_multiple=8
    )


class MLP(TableModel):
    """Rows of numbers through layers of ReLU units, and a linear map.

    Args:
        input_shape: How many numbers a row has, as a shape.
        widths: Units of each layer.
        num_classes: Number of outputs.

    Shape:
        (batch, numbers) to (batch, num_classes).
    """

    def __init__(self, input_shape: Sequence[int], widths: Sequence[int], num_classes: int) -> None:
        super().__init__(input_shape)
        require_count("MLP.num_classes", num_classes)
        parts: list[nn.Module] = []
        (into,) = self.input_shape
        for width in widths:
            require_count("MLP.widths", width)
            parts += [nn.Linear(into, width), nn.ReLU()]
            into = width
        self.layers = nn.Sequential(*parts)
        self.classifier = nn.Linear(into, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions for a batch of rows."""
        y: Tensor = self.classifier(self.layers(x))
        return y


@register_model("mlp-table")
def mlp_table(
    *,
    input_shape: Sequence[int] = (16,),
    num_classes: int = 2,
    widths: Sequence[int] = (128, 128),
) -> MLP:
    """Tables: layers of ReLU units and a linear map, for classes or numbers.

    Args:
        input_shape: How many numbers a row has, as a shape.
        num_classes: Number of classes, or of numbers to predict.
        widths: Units of each layer.
    """
    return MLP(input_shape, widths, num_classes)
