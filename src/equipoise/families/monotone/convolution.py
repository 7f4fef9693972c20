"""Convolutions `W` with `I - W` strongly monotone, and their resolvents by Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.validate import SettingError, require_count
from equipoise.families.monotone.operator import MonotoneOperator
from equipoise.families.monotone.resolvent import invert
from equipoise.operators import Padding, convolution_bound
from equipoise.operators.operator import OperatorWeights

__all__ = [
    "MonotoneConvolution",
    "autocorrelation",
    "centred",
    "filter_image",
    "frequency_matrices",
    "normalized",
    "require_odd",
    "turned",
]


def require_odd(owner: str, kernel_size: object) -> None:
    """Raise unless a kernel has a centre."""
    require_count(f"{owner}.kernel_size", kernel_size)
    assert isinstance(kernel_size, int)
    if kernel_size % 2 == 0:
        raise SettingError(f"{owner}.kernel_size", "be odd", kernel_size)


def normalized(kernel: Tensor, size: Tensor) -> Tensor:
    """Return `size * kernel / |kernel|`, with the root of the sum of squares."""
    norm: Tensor = torch.linalg.vector_norm(kernel)
    return kernel * (size / norm.clamp_min(torch.finfo(kernel.dtype).tiny))


def turned(kernel: Tensor) -> Tensor:
    """Return the kernel of the adjoint convolution."""
    return kernel.transpose(0, 1).flip(2, 3)


def autocorrelation(kernel: Tensor) -> Tensor:
    """Return the kernel `R_s = sum_t A_t^T A_(t+s)` of `A^T A`, of side `2 k - 1`.

    On images with zero padding `A z` is larger than `z` by half a kernel on every side.
    """
    taps = kernel.transpose(0, 1)
    side = kernel.shape[2] - 1
    return F.conv2d(taps, taps, padding=side).transpose(0, 1)


def centred(kernel: Tensor, p: float) -> Tensor:
    """Return a kernel of the caller's own plus that of `p I`."""
    if p != 0:
        middle = kernel.shape[2] // 2
        kernel[:, :, middle, middle].diagonal().add_(p)
    return kernel


def frequency_matrices(kernel: Tensor, size: tuple[int, int]) -> Tensor:
    """Return `K(w) = sum_s K_s exp(i w s)` at the frequencies of a real Fourier transform.

    Args:
        kernel: Shape (out, in, h, w).
        size: Height and width of the images, which are periodic.

    Returns:
        Shape (height * (width // 2 + 1), out, in), complex.
    """
    height, width = size
    axes = ((height, height, kernel.shape[2]), (width, width // 2 + 1, kernel.shape[3]))
    first, second = (
        torch.outer(
            torch.arange(count, dtype=torch.float64, device=kernel.device) * (2 * math.pi / period),
            torch.arange(side, dtype=torch.float64, device=kernel.device) - side // 2,
        )
        for period, count, side in axes
    )
    phases = (first[:, None, :, None] + second[None, :, None, :]).flatten(2).flatten(0, 1)
    waves = [wave.to(kernel.dtype) for wave in (phases.cos(), phases.sin())]
    taps = kernel.flatten(2).flatten(0, 1).T  # (h w, out in)
    parts = [(wave @ taps).view(-1, *kernel.shape[:2]) for wave in waves]
    return torch.complex(*parts)


def filter_image(matrices: Tensor, b: Tensor, *, transpose: bool) -> Tensor:
    """Return images, which are periodic, times a matrix at each frequency, or its adjoint.

    Args:
        matrices: As `frequency_matrices` returns them.
        b: The images.
        transpose: Whether to take the adjoint.
    """
    if not len(b):  # of which there is no Fourier transform
        return b.clone()
    height, width = b.shape[2:]
    spectrum = torch.fft.rfft2(b).flatten(2).permute(2, 0, 1)  # (frequency, batch, channel)
    found = spectrum @ (matrices.conj() if transpose else matrices.mT)
    images: Tensor = torch.fft.irfft2(
        found.permute(1, 2, 0).unflatten(2, (height, -1)), s=(height, width)
    )
    return images


class MonotoneConvolution(MonotoneOperator):
    """`W = (1 - m) I - A^T A + B - B^T` with convolutions (Winston & Kolter, 2020, section 4.1).

    `W` is one convolution of side `2 k - 1` for kernels of side `k`. As in the authors' code, the
    kernels of `A` and `B` are divided by their norm, and have learnt sizes instead. The resolvent
    is diagonal in Fourier space but for channels, on images that are periodic. Images with zero
    padding are put into a frame that is half a kernel wide for it, in which the activation is zero.

    Args:
        channels: Channels of the state.
        kernel_size: Side of the kernels of `A` and `B`, odd.
        margin: `m`.
        padding: `zeros` or `circular`.

    Shape:
        (batch, channels, height, width), twice.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int = 3,
        margin: float = 1.0,
        *,
        padding: Padding = "zeros",
    ) -> None:
        super().__init__(margin)
        require_count("MonotoneConvolution.channels", channels)
        require_odd("MonotoneConvolution", kernel_size)
        choose("MonotoneConvolution.padding", padding, get_args(Padding))
        self.padding = padding
        self.frame = kernel_size // 2 if padding == "zeros" else 0
        self.A = nn.Parameter(torch.empty(channels, channels, kernel_size, kernel_size))
        self.B = nn.Parameter(torch.empty(channels, channels, kernel_size, kernel_size))
        self.size_A = nn.Parameter(torch.ones(()))
        self.size_B = nn.Parameter(torch.ones(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniform kernels, whose scale does not matter."""
        for kernel in (self.A, self.B):
            nn.init.kaiming_uniform_(kernel, a=math.sqrt(5))

    def weights(self) -> OperatorWeights:
        A = normalized(self.A, self.size_A)
        B = normalized(self.B, self.size_B)
        half = B.shape[2] // 2
        skew = F.pad(B - turned(B), (half, half, half, half))
        return (centred(skew - autocorrelation(A), 1 - self.margin),)

    def combined(self, weights: OperatorWeights, p: float, q: float) -> OperatorWeights:
        return (centred(q * weights[0], p),)

    def transposed(self, weights: OperatorWeights) -> OperatorWeights:
        return (turned(weights[0]),)

    def apply_with(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        if self.padding == "circular":
            return self.apply_enlarged(weights, z)
        return F.conv2d(z, weights[0], padding=weights[0].shape[2] // 2)

    def apply_enlarged(self, weights: OperatorWeights, z: Tensor) -> Tensor:
        half = weights[0].shape[2] // 2
        return F.conv2d(F.pad(z, (half, half, half, half), mode="circular"), weights[0])

    def pull(self, weights: OperatorWeights, z: Tensor, v: Tensor) -> OperatorWeights:
        """Return `sum_p v(p) z(p + s)^T` for each `s`, by Fourier transforms."""
        if not len(z):
            return (torch.zeros_like(weights[0]),)
        height, width = z.shape[2:]
        spectra = [torch.fft.rfft2(t).flatten(2).permute(2, 1, 0) for t in (v, z)]
        product = spectra[0].conj() @ spectra[1].mT  # (frequency, out, in)
        found = torch.fft.irfft2(
            product.permute(1, 2, 0).unflatten(2, (height, -1)), s=(height, width)
        )
        half = weights[0].shape[2] // 2
        lags = torch.arange(-half, half + 1, device=z.device)
        return (found[:, :, lags[:, None] % height, lags % width],)

    def bound(self, weights: OperatorWeights) -> Tensor:
        return convolution_bound(weights[0])

    def blocks(self, weights: OperatorWeights) -> Sequence[Tensor]:
        return weights

    def factor(self, weights: OperatorWeights, a: float, c: Tensor) -> OperatorWeights:
        (kernel,) = self.combined(weights, 1 + a, -a)
        return (invert(frequency_matrices(kernel, (c.shape[2], c.shape[3]))),)

    def resolve_with(self, factors: OperatorWeights, b: Tensor, *, transpose: bool) -> Tensor:
        return filter_image(factors[0], b, transpose=transpose)

    @property
    def enlarges(self) -> bool:
        return self.frame > 0

    def state_shape(self, x: Tensor, *, enlarged: bool) -> tuple[int, ...]:
        more = 2 * self.frame * enlarged
        return (len(self.A), x.shape[2] + more, x.shape[3] + more)

    def enlarge(self, c: Tensor) -> Tensor:
        return F.pad(c, (self.frame,) * 4) if self.frame else c.contiguous()

    def crop(self, z: Tensor) -> Tensor:
        frame = self.frame
        return z[:, :, frame:-frame, frame:-frame] if frame else z

    def confine(self, z: Tensor) -> Tensor:
        return F.pad(self.crop(z), (self.frame,) * 4) if self.frame else z

    def check(self, x: Tensor) -> None:
        super().check(x)
        side = self.A.shape[2]
        if x.dim() != 4 or min(x.shape[2:]) < side:
            raise SettingError(
                "The input",
                f"have shape (batch, channels, height, width) with sides of at least {side}",
                tuple(x.shape),
            )

    def extra_repr(self) -> str:
        out, _, side, _ = self.A.shape
        return f"{out}, kernel_size={side}, margin={self.margin:g}, padding={self.padding}"
