"""Group normalisation of any batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core.transforms import is_wrapped

__all__ = ["GroupNorm", "mark_overflow"]


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` that takes one image of one pixel, too.

    Torch refuses that, as batch normalisation must. Group normalisation treats each image by
    itself, and the last image of a batch may be alone when the others have converged.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the groups of channels of each image with mean 0 and variance 1, scaled."""
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def mark_overflow(x: Tensor) -> Tensor:
    """Return images with NaN in place of those too large to normalise.

    Their variance overflows, and then normalised values are zero: finite, and wrong. NaN lets the
    solve say so, for these samples alone.

    Args:
        x: Images, shape (batch, channels, height, width).
    """
    if not x.numel():
        return x
    most = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    # Of all entries, which differ from their mean by at most twice the largest, the squares add up.
    limit = math.sqrt(most / x[0].numel()) / 2
    large = x.detach().abs().amax(dim=(1, 2, 3), keepdim=True) > limit
    if not is_wrapped(x) and not bool(large.any()):
        return x
    return torch.where(large, math.nan, x)
