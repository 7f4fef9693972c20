"""Proven bounds of operator norms."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["convolution_bound"]


def convolution_bound(kernel: Tensor) -> Tensor:
    """Return an upper bound of the operator norm of a two-dimensional convolution of stride 1, zero or circular padding.

    A convolution is the sum over its taps of a matrix on channels times a shift, and a shift has norm at most one, so
    `|conv| <= sum_t |K_t|`. Also `|conv| <= sqrt(h w) |R|` for each of the four ways `R` of unfolding the kernel to a matrix
    (Singla & Feizi, 2021). The smallest of these five bounds, differentiable. The norm of the kernel reshaped to (out, in h w)
    alone bounds nothing.

    Args:
        kernel: Shape (out, in, h, w).
    """
    if kernel.dim() != 4:
        raise ValueError(f"convolution_bound.kernel must have shape (out, in, h, w); got {tuple(kernel.shape)}.")
    out, into, height, width = kernel.shape
    taps = torch.linalg.matrix_norm(kernel.permute(2, 3, 0, 1), 2).sum()
    unfolded = [
        kernel.reshape(out, into * height * width),
        kernel.transpose(0, 1).reshape(into, out * height * width),
        kernel.permute(0, 2, 1, 3).reshape(out * height, into * width),
        kernel.permute(0, 3, 1, 2).reshape(out * width, into * height),
    ]
    norms = [(height * width) ** 0.5 * torch.linalg.matrix_norm(matrix, 2) for matrix in unfolded]
    return torch.stack([taps, *norms]).min()
