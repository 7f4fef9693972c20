"""Group normalisation of any batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["GroupNorm"]


class GroupNorm(nn.GroupNorm):
    """`torch.nn.GroupNorm` that takes one image of one pixel, too.

    Torch refuses that, as batch normalisation must. Group normalisation treats each image by
    itself, and the last image of a batch may be alone when the others have converged.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the groups of channels of each image with mean 0 and variance 1, scaled."""
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
