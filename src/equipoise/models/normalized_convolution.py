"""Convolutions whose kernels are normalised, once for each solve."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.validate import require_positive
from equipoise.operators.convolution_norm import convolution_bound

__all__ = ["Normalization", "NormalizedConvolution"]

Normalization = Literal["none", "weight", "spectral"]


class NormalizedConvolution(nn.Module):
    """A convolution `W * x` without bias, of stride 1, that keeps the image size.

    - `none`: `W = V`.
    - `weight`: `W_c = g_c V_c/|V_c|` for each output channel `c`, so that the length `g` of a
      kernel is learnt apart from its direction (weight normalisation; Salimans & Kingma, 2016).
    - `spectral`: `W = norm V/b(V)`, where `b(V)` is a proven bound of the norm of the convolution
      with `V`, at most 1.8 % above it: that of the operator on images of any size, not of the
      kernel reshaped to a matrix as in spectral normalisation by Miyato et al. (2018), which bounds
      nothing. So `|W * x| <= norm |x|`.

    A cell asks for `kernel` in `inject` and passes it on in `Shared`, since it is the same in all
    steps.

    Args:
        into: Channels of the input.
        out: Channels of the output.
        side: Side of the kernels, odd.
        normalization: How kernels are normalised.
        norm: The bound of the operator's norm under `spectral`.
    """

    def __init__(
        self,
        into: int,
        out: int,
        side: int,
        *,
        normalization: Normalization = "none",
        norm: float = 1.0,
    ) -> None:
        super().__init__()
        choose("NormalizedConvolution.normalization", normalization, get_args(Normalization))
        require_positive("NormalizedConvolution.norm", norm)
        self.normalization, self.norm, self.padding = normalization, norm, side // 2
        self.weight = nn.Parameter(torch.empty(out, into, side, side))
        learnt = normalization == "weight"
        self.length = nn.Parameter(torch.empty(out, 1, 1, 1)) if learnt else None

    def draw_(self, deviation: float) -> None:
        """Draw `V` from a normal distribution; `W` is the same unless its norm is given."""
        nn.init.normal_(self.weight, std=deviation)
        if self.length is not None:
            with torch.no_grad():
                self.length.copy_(_lengths(self.weight))

    def kernel(self) -> Tensor:
        """Return `W`."""
        if self.length is not None:
            return self.weight * (self.length / _lengths(self.weight))
        if self.normalization == "spectral":
            bound = convolution_bound(self.weight)
            # Where all weights vanish, so does the operator.
            return self.weight * (self.norm / bound.clamp_min(torch.finfo(bound.dtype).tiny))
        return self.weight

    def forward(self, x: Tensor, kernel: Tensor | None = None) -> Tensor:
        """Return `W * x`.

        Args:
            x: The images.
            kernel: `W`, if it is known already.
        """
        return F.conv2d(x, self.kernel() if kernel is None else kernel, padding=self.padding)

    def extra_repr(self) -> str:
        out, into, side, _ = self.weight.shape
        return f"{into}, {out}, {side}, normalization={self.normalization}"


def _lengths(kernels: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(kernels, dim=(1, 2, 3), keepdim=True)
    return lengths
