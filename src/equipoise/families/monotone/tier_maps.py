"""Convolutions between two resolutions, of images in frames and without them.

A frame is one pixel wide. Framed images are periodic; images without frames are zero outside, as
those inside of a frame of zeros are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.grad import conv2d_weight

from equipoise.families.monotone.convolution import frequency_matrices
from equipoise.families.monotone.resolvent import invert

__all__ = ["FRAME", "convolve", "follow", "grow", "kernel_gradient", "lead", "shrink", "woodbury"]

FRAME = (1, 1, 1, 1)
"""As torch's pad wants it."""


def convolve(z: Tensor, kernel: Tensor, *, framed: bool) -> Tensor:
    """A convolution that keeps the size."""
    half = kernel.shape[2] // 2
    if not framed:
        return F.conv2d(z, kernel, padding=half)
    return F.conv2d(F.pad(z, (half,) * 4, mode="circular"), kernel)


def shrink(z: Tensor, kernel: Tensor, *, framed: bool) -> Tensor:
    """`N z`: a convolution of stride 2, about even pixels of the frame."""
    padded = F.pad(z, FRAME, mode="circular") if framed else F.pad(z, (2, 2, 2, 2))
    return F.conv2d(padded, kernel, stride=2)


def grow(y: Tensor, kernel: Tensor, like: Tensor, *, framed: bool) -> Tensor:
    """`N^T y`, of the size of `like`."""
    height, width = like.shape[2:]
    found = F.conv_transpose2d(y, kernel, stride=2)
    if not framed:
        return found[:, :, 2 : height + 2, 2 : width + 2]
    # The first row and column are those before the frame, which are its last.
    found = found[:, :, 1:] + F.pad(found[:, :, :1], (0, 0, height - 1, 0))
    return found[..., 1:] + F.pad(found[..., :1], (width - 1, 0))


def follow(y: Tensor, kernel: Tensor, *, framed: bool) -> Tensor:
    """What follows `N` on the coarser tier, whose frame has one row and column more."""
    y = F.pad(y, (0, 1, 0, 1))
    return convolve(y, kernel, framed=True) if framed else F.conv2d(y, kernel)


def lead(z: Tensor, kernel: Tensor, *, framed: bool) -> Tensor:
    """The adjoint of `follow`, given the turned kernel."""
    found = convolve(z, kernel, framed=True) if framed else F.conv2d(z, kernel, padding=2)
    return found[:, :, :-1, :-1]


def kernel_gradient(z: Tensor, kernel: Tensor, v: Tensor, stride: int = 1) -> Tensor:
    """The gradient of `<v, K z>` in the kernel, on images that are periodic."""
    half = kernel.shape[2] // 2
    padded = F.pad(z, (half,) * 4, mode="circular")
    found: Tensor = conv2d_weight(padded, kernel.shape, v, stride=stride)  # type: ignore[no-untyped-call]
    return found


def woodbury(inverse: Tensor, kernel: Tensor, size: tuple[int, int], a: float) -> Tensor:
    """`(I/a + N P^-1 N^T)^-1` at the frequencies of the coarser tier, given `P^-1`.

    Taking every other pixel adds up four frequencies of the finer tier.
    """
    height, width = size
    columns = width // 2 + 1
    half = frequency_matrices(kernel, size)
    whole = half @ inverse @ half.mH
    y = torch.arange(height // 2, device=kernel.device)[:, None]
    x = torch.arange(width // 4 + 1, device=kernel.device)
    total = torch.zeros((), dtype=whole.dtype, device=whole.device)
    for p in (y, y + height // 2):
        for q in (x, x + width // 2):
            mirrored = q > width // 2  # beyond the half that a real transform keeps
            row = torch.where(mirrored, -p % height, p)
            column = torch.where(mirrored, width - q, q)
            found = whole[(row * columns + column).flatten()]
            flip = mirrored.expand(len(y), -1).flatten()[:, None, None]
            total = total + torch.where(flip, found.conj(), found)
    identity = torch.eye(len(kernel), dtype=whole.dtype, device=whole.device)
    return invert(identity / a + total / 4)
