"""What happens to an image before anybody sees it: nothing, blur, missing pixels."""

from __future__ import annotations

from abc import abstractmethod
from typing import get_args

import torch
from torch import Tensor

from equipoise.core.registry import Registry, choose
from equipoise.core.validate import SettingError, require_between, require_count, require_positive
from equipoise.operators.convolution import Padding, convolve
from equipoise.operators.operator import Operator, OperatorWeights
from equipoise.operators.orthogonal import symbol_floor

__all__ = ["DEGRADATIONS", "Blur", "Degradation", "Identity", "Mask"]


class Degradation(Operator):
    """A linear map `A` of images that nobody trains: an observation is `y = A x` and noise.

    Its weights are tensors that a run does not save, since the options of the map give them. It
    acts on each channel alone.

    Shape:
        (batch, channels, height, width) to the same.
    """

    def weights_for(self, y: Tensor) -> OperatorWeights:
        """Return the weights of each sample that its observation tells; by default there are none.

        Args:
            y: The observations.
        """
        return ()

    def degrade(self, x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        """Return observations of images, `A x + sigma n` with Gaussian `n`.

        Args:
            x: The images.
            sigma: The standard deviation of the noise.
            generator: Where random numbers come from.
        """
        y: Tensor = self(x)
        return y if sigma == 0 else y + sigma * _draw(torch.randn, y.shape, generator, y)

    @abstractmethod
    def gram_bounds(self) -> tuple[float, float]:
        """Return a lower and an upper bound of the eigenvalues of `A^T A`.

        They hold at any image size, and for the weights of any observation (`weights_for`).
        """

    def zeros(self, c: Tensor) -> Tensor:
        return torch.zeros_like(c)

    def check(self, x: Tensor) -> None:
        super().check(x)
        if x.dim() != 4:
            raise SettingError(
                "The input", "have shape (batch, channels, height, width)", tuple(x.shape)
            )


DEGRADATIONS: Registry[Degradation] = Registry("degradation", Degradation)  # type: ignore[type-abstract]
"""All degradations by name."""


@DEGRADATIONS.register("identity")
class Identity(Degradation):
    """`A = I`: images to which only noise was added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()), persistent=False)

    factor: Tensor

    def weights(self) -> OperatorWeights:
        return (self.factor,)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return weights

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return weights[0] * z

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return transposed[0] * y

    def bound(self, weights: OperatorWeights) -> Tensor:
        return weights[0].abs()

    def gram_bounds(self) -> tuple[float, float]:
        square = float(self.factor) ** 2
        return square, square


@DEGRADATIONS.register("blur")
class Blur(Degradation):
    """A convolution with a Gaussian of sum 1, `k(t) ~ exp(-|t|^2 / (2 deviation^2))`.

    The adjoint is the convolution with the kernel turned by half a turn. `|A| <= sum |k| = 1`,
    which constant images attain if padding is circular.

    Args:
        deviation: Standard deviation of the Gaussian in pixels.
        size: Side of the kernel, odd.
        padding: `circular`, where images go on at their other side, or `zeros`.
    """

    def __init__(
        self, deviation: float = 1.6, size: int = 9, padding: Padding = "circular"
    ) -> None:
        super().__init__()
        require_positive("Blur.deviation", deviation)
        require_count("Blur.size", size)
        if size % 2 == 0:
            raise SettingError("Blur.size", "be odd", size)
        choose("Blur.padding", padding, get_args(Padding))
        self.padding = padding
        distance = torch.arange(size, dtype=torch.float64) - size // 2
        line = torch.exp(-distance.square() / (2 * deviation**2))
        kernel = torch.outer(line, line)
        kernel = (kernel / kernel.sum()).to(torch.get_default_dtype())
        self.register_buffer("kernel", kernel[None, None], persistent=False)

    kernel: Tensor

    def weights(self) -> OperatorWeights:
        return (self.kernel,)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return (weights[0].flip(2, 3),)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        kernel = weights[0]
        margin = (kernel.shape[-1] // 2,) * 4
        planes = z.reshape(-1, 1, *z.shape[2:])  # one channel each
        return convolve(kernel, planes, margin, self.padding).reshape(z.shape)

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return self.apply_with(transposed, y)

    def bound(self, weights: OperatorWeights) -> Tensor:
        kernel = weights[0]
        total = kernel.double().abs().sum() * (1 + kernel.numel() * torch.finfo(torch.double).eps)
        return (total * (1 + torch.finfo(kernel.dtype).eps)).to(kernel.dtype)

    def gram_bounds(self) -> tuple[float, float]:
        # Zero padding may make singular values smaller than those without borders.
        low = symbol_floor(self.kernel) if self.padding == "circular" else 0.0
        return low**2, float(self.bound(self.weights())) ** 2

    def check(self, x: Tensor) -> None:
        super().check(x)
        side = self.kernel.shape[-1]
        if min(x.shape[2:]) < side:
            raise SettingError(
                "Blur.size",
                "not exceed the image",
                side,
                got=f"a kernel of {side} x {side} for an image of {x.shape[2]} x {x.shape[3]}",
            )

    def extra_repr(self) -> str:
        return f"size={self.kernel.shape[-1]}, padding={self.padding}"


@DEGRADATIONS.register("mask")
class Mask(Degradation):
    """Pixels that are missing: `A x = m x`, where `m` is 1 at pixels that are known, else 0.

    Every image has missing pixels of its own, all channels at once. An observation tells them: they
    are exactly black, and what is exactly black counts as missing.

    Args:
        missing: Fraction of pixels that `degrade` takes away.

    Attributes:
        mask: `m` of images that come with no observation; by default all pixels are known.
    """

    def __init__(self, missing: float = 0.5) -> None:
        super().__init__()
        require_between("Mask.missing", missing, 0, 1, "()")
        self.missing = missing
        self.register_buffer("mask", torch.ones(()), persistent=False)

    mask: Tensor

    def weights(self) -> OperatorWeights:
        return (self.mask,)

    def weights_for(self, y: Tensor) -> OperatorWeights:
        return ((y != 0).any(dim=1, keepdim=True).to(y),)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return weights

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        return weights[0] * z

    def adjoint_with(self, transposed: OperatorWeights, y: Tensor) -> Tensor:
        return transposed[0] * y

    def bound(self, weights: OperatorWeights) -> Tensor:
        return weights[0].abs().amax()

    def gram_bounds(self) -> tuple[float, float]:
        return 0.0, 1.0  # whatever `mask` is: every observation brings one of its own

    def degrade(self, x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
        shape = torch.Size((len(x), 1, *x.shape[2:]))
        known = _draw(torch.rand, shape, generator, x) >= self.missing
        return super().degrade(x, sigma, generator) * known

    def extra_repr(self) -> str:
        return f"missing={self.missing}"


def _draw(kind: object, shape: torch.Size, generator: torch.Generator, like: Tensor) -> Tensor:
    drawn: Tensor = kind(shape, generator=generator, device=generator.device)  # type: ignore[operator]
    return drawn.to(like)
