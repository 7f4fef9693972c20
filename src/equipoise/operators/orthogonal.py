"""Weights all of whose singular values are equal: matrices exactly, convolutions nearly."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equipoise.operators.convolution_norm import convolution_bound

__all__ = ["descend_to_frame", "nearest_frame", "swap_channels", "symbol_floor"]

NEAR = 0.5  # deviation from a frame below which Newton's steps converge fast and for certain
ROUNDING = 1e-13  # deviation that float64 cannot improve
TOLERANCE = 1e-2  # root mean square of a kernel's deviation; its singular values are about as close
MAX_DESCENT = 50  # steps of descent; one that follows an optimiser takes a few
DENSITY = 6  # grid frequencies for each step of a kernel's length
MAX_ENTRIES = 2**22  # of the matrices whose eigenvalues are computed together
MARGIN = 1e-9  # relative, far above the rounding errors of eigenvalues in float64


def nearest_frame(W: Tensor) -> Tensor:
    """Return the matrix with orthonormal rows or columns that is nearest to `W`.

    It is the polar factor `U V^T` of `W = U S V^T` (Fan & Hoffman, 1955). Close to it, the steps
    `W <- W (3 I - W^T W)/2` converge quadratically (Bjorck & Bowie, 1971), and cost less than a
    singular value decomposition. All work is done in float64.

    Args:
        W: Shape (n, m), finite. Orthonormal are the columns if `n >= m`, else the rows.
    """
    tall = W.double() if W.shape[0] >= W.shape[1] else W.double().mT
    identity = torch.eye(tall.shape[1], dtype=tall.dtype, device=tall.device)
    deviation = tall.mT @ tall - identity
    size = float(torch.linalg.matrix_norm(deviation))
    if not size < NEAR:
        left, _, right = torch.linalg.svd(tall, full_matrices=False)
        tall = left @ right
        size = 0.0
    while size > ROUNDING * math.sqrt(len(identity)):
        tall = tall - tall @ deviation / 2
        deviation = tall.mT @ tall - identity
        last, size = size, float(torch.linalg.matrix_norm(deviation))
        if not size < last / 2:  # rounding is all that is left
            break
    return (tall if W.shape[0] >= W.shape[1] else tall.mT).to(W.dtype)


def descend_to_frame(kernel: Tensor, groups: int = 1) -> Tensor:
    """Return a kernel of the same support whose singular values are close to 1.

    On images without borders a convolution acts on each frequency `w` by the matrix
    `K(w) = sum_t K_t exp(-i w t)` on channels. The step

        K <- K - P(K * (K^T * K - I))/2

    is that of Bjorck & Bowie at all frequencies, cut to the kernel's support by `P`. It is also a
    step of gradient descent on the mean over all frequencies of `|K(w)^H K(w) - I|_F^2 / 4`. Where
    `|K(w)| <= 1` the curvature is at most 2, hence the mean never grows; a kernel for which it
    does is first divided by its norm. Kernels with `K(w)^H K(w) = I` everywhere exist for all
    numbers of channels but one to one, a frame at the centre among them (Xiao et al., 2018).

    Args:
        kernel: Shape (out, in / groups, h, w), finite.
        groups: As of `torch.nn.Conv2d`.
    """
    wide = len(kernel) // groups < kernel.shape[1]
    start = swap_channels(kernel, groups) if wide else kernel
    found = _descend(start, groups)
    if found is None:
        found = _descend(start / convolution_bound(start, groups=groups), groups)
    if found is None:  # rounding is all that is left
        found = start
    return swap_channels(found, groups) if wide else found


def _descend(kernel: Tensor, groups: int) -> Tensor | None:
    """The kernel after descent, or nothing if the deviation from a frame grew in the first step."""
    last = math.inf
    for count in range(MAX_DESCENT):
        direction, deviation = _deviation(kernel, groups)
        if deviation <= TOLERANCE:
            break
        if not deviation < last:
            return None if count == 1 else kernel
        last = deviation
        kernel = kernel - direction / 2
    return kernel


def _deviation(kernel: Tensor, groups: int) -> tuple[Tensor, float]:
    """`P(K * (K^T * K - I))`, and the root mean square of the singular values of `K^T * K - I`."""
    into, height, width = kernel.shape[1:]
    turned = swap_channels(kernel, groups)  # (groups into, out / groups, h, w)
    rows = _split(turned, groups).transpose(0, 1).flatten(1, 2)
    # gram[i, (g, j), s] holds (K^T * K)_s of group g, at row j and column i, for all lags s.
    gram = F.conv2d(rows, turned, padding=(height - 1, width - 1), groups=groups)
    middle = gram[:, :, height - 1, width - 1].view(into, groups, into)
    middle.diagonal(dim1=0, dim2=2).sub_(1)
    direction = F.conv2d(gram, kernel.flip(2, 3), groups=groups).transpose(0, 1)
    return direction, float(torch.linalg.vector_norm(gram)) / math.sqrt(groups * into)


def swap_channels(kernel: Tensor, groups: int) -> Tensor:
    """Return a kernel with the channels of input and output exchanged in each group.

    Args:
        kernel: Shape (out, in / groups, h, w).
        groups: As of `torch.nn.Conv2d`.
    """
    return _split(kernel, groups).transpose(1, 2).flatten(0, 1)


def _split(kernel: Tensor, groups: int) -> Tensor:
    """A kernel's groups, by a new first axis."""
    return kernel.reshape(groups, -1, *kernel.shape[1:])


def symbol_floor(kernel: Tensor, groups: int = 1) -> float:
    """Return a proven lower bound of the singular values of all `K(w)`, or 0.

    That is a bound for the convolution on images without borders, and with circular padding. Of
    `K(w)` as many singular values count as its smaller side has.

    With `G(w) = K(w)^H K(w)` and any number `c`, `u^H (G(w) - c) u` is a trigonometric polynomial
    of degree `h - 1` and `w - 1`. On a grid of `N x M` frequencies (Riesz, 1914; Ehlich & Zeller,
    1964)

        |G(w) - c| <= max_grid |G - c| / (cos(pi (h - 1)/N) cos(pi (w - 1)/M)),

    so that `G(w) >= c - ` the right side; `c` is the middle of the eigenvalues on the grid.

    Args:
        kernel: Shape (out, in / groups, h, w).
        groups: As of `torch.nn.Conv2d`.
    """
    height, width = kernel.shape[2:]
    grid = [DENSITY * (side - 1) or 1 for side in (height, width)]
    slack = math.cos(math.pi / DENSITY) ** ((height > 1) + (width > 1))
    taps = _split(kernel.detach().double(), groups)
    symbols = torch.fft.fft2(taps, grid)[..., : grid[1] // 2 + 1].movedim((1, 2), (-2, -1))
    symbols = symbols.flatten(0, -3)  # those of the other half are conjugates
    low, high = math.inf, 0.0
    for some in symbols.split(max(1, MAX_ENTRIES // symbols[0].numel())):
        tall = some if some.shape[-2] >= some.shape[-1] else some.mT
        values = torch.linalg.eigvalsh(tall.mH @ tall)
        low, high = min(low, float(values[:, 0].min())), max(high, float(values[:, -1].max()))
    if not high < math.inf:
        return 0.0
    floor = (high + low) / 2 - (high - low) / 2 / slack - MARGIN * high
    return math.sqrt(max(floor, 0.0))
