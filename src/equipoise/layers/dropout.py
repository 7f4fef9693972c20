"""Dropout for equilibria: one mask for a whole solve."""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.core.validate import require_between

__all__ = ["VariationalDropout"]


class VariationalDropout(nn.Module):
    """`m * x` in training, with a mask `m` that stays the same in all steps of a solve.

    Variational dropout (Gal & Ghahramani, 2016): entries of `m` are 0 with the probability that is
    given and `1 / (1 - probability)` otherwise. A mask drawn anew in each step would leave nothing
    to converge to, so a cell draws it in `inject`, passes it on in its context, and applies it in
    `step`: the solve and its gradient then have the same. Each sample has a mask of its own. In
    evaluation mode there is none.

    Args:
        probability: With which an entry is dropped, in [0, 1).
        owner: What errors call the setting, such as `MyCell.dropout`.
    """

    def __init__(
        self, probability: float, *, owner: str = "VariationalDropout.probability"
    ) -> None:
        super().__init__()
        require_between(owner, probability, 0, 1, "[)")
        self.probability = probability

    def draw(self, x: Tensor, *shape: int) -> Tensor | None:
        """Return a mask of shape (batch, *shape); None where nothing is dropped.

        Args:
            x: A tensor with the batch, the dtype and the device of the mask.
            *shape: The mask's shape after the batch, such as `channels, 1, 1` to drop channels.
        """
        if not self.training or self.probability == 0:
            return None
        kept = 1 - self.probability
        return x.new_empty(len(x), *shape).bernoulli_(kept).div_(kept)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return `m * x`, or `x` itself without a mask.

        Args:
            x: What is to be masked.
            mask: What `draw` returned.
        """
        return x if mask is None else x * mask

    def extra_repr(self) -> str:
        return f"{self.probability:g}"
