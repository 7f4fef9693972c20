"""The explicit transformer that Transformer DEQs are compared with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.validate import SettingError, require_count
from equipoise.layers.dropout import VariationalDropout
from equipoise.models.attention import alibi, attend, merge_heads, split_heads
from equipoise.models.factory import register_model
from equipoise.models.text_network import TextModel

__all__ = ["ExplicitTransformer", "TransformerBlock"]


class TransformerBlock(nn.Module):
    """`norm(y + W_2 relu(W_1 y + b_1) + b_2)`, `y = norm(h + O attention(W h))`.

    Layer norms come after the sums, as in Transformer-XL (Dai et al., 2019).

    Args:
        features: Numbers for each token.
        heads: Heads of attention.
        inner: Units of the feed-forward part.
    """

    def __init__(self, features: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.inner = heads, inner
        self.attention = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.norm1 = nn.LayerNorm(features)
        self.expand = nn.Linear(features, inner)
        self.contract = nn.Linear(inner, features)
        self.norm2 = nn.LayerNorm(features)
        for part in (self.attention, self.output, self.expand, self.contract):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
            nn.init.zeros_(part.bias)

    def forward(
        self, h: Tensor, memory: Tensor | None, bias: Tensor, dropout: VariationalDropout
    ) -> Tensor:
        """Return the states after the block.

        Args:
            h: The states before it, (batch, length, features).
            memory: Those of the text before, (batch, remembered, features).
            bias: What is added to the scores of attention.
            dropout: Draws the masks and applies them.
        """
        q, k, v = self.attention(h).chunk(3, dim=-1)
        if memory is not None and memory.shape[1]:
            width = h.shape[-1]
            weight, shift = self.attention.weight[width:], self.attention.bias[width:]
            before = functional.linear(memory, weight, shift).chunk(2, dim=-1)
            k, v = torch.cat([before[0], k], dim=1), torch.cat([before[1], v], dim=1)
        q, k, v = (split_heads(part, self.heads) for part in (q, k, v))
        y = self.output(merge_heads(attend(q, k, v, bias)))
        y = self.norm1(h + dropout(y, dropout.draw(y, 1, y.shape[-1])))
        inner = dropout(torch.relu(self.expand(y)), dropout.draw(y, 1, self.inner))
        inner = dropout(self.contract(inner), dropout.draw(y, 1, y.shape[-1]))
        after: Tensor = self.norm2(y + inner)
        return after


class ExplicitTransformer(TextModel):
    """A language model of several transformer blocks, each with weights of its own.

    It remembers the states before each block (Transformer-XL; Dai et al., 2019), and knows
    positions by ALiBi, as the Transformer DEQ does.

    Args:
        num_classes: How many tokens the vocabulary has.
        features: Numbers for each token.
        heads: Heads of attention, which must divide `features`.
        inner: Units of the feed-forward parts.
        layers: Number of blocks.
        memory_length: How many tokens before a segment are remembered.
        dropout: Fraction of units that is dropped in training, as in the cell.

    Shape:
        As of `TextModel`.
    """

    def __init__(
        self,
        num_classes: int,
        features: int,
        heads: int,
        inner: int,
        layers: int,
        *,
        memory_length: int = 0,
        dropout: float = 0.0,
    ) -> None:
        for name, count in (("heads", heads), ("inner", inner), ("layers", layers)):
            require_count(f"ExplicitTransformer.{name}", count)
        super().__init__(
            num_classes,
            features,
            memory_length=memory_length,
            memory_width=layers * features,
            dropout=dropout,
        )
        if features % heads:
            rule = f"be a multiple of heads, {heads}"
            raise SettingError("ExplicitTransformer.features", rule, features)
        self.heads = heads
        self.blocks = nn.ModuleList(TransformerBlock(features, heads, inner) for _ in range(layers))

    def states(self, e: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states after the last block, and beside each other those before each."""
        remembered = 0 if memory is None else memory.shape[1]
        bias = alibi(self.heads, e.shape[1], remembered + e.shape[1], e)
        count = len(self.blocks)
        before = [None] * count if memory is None else memory.chunk(count, dim=-1)
        h, seen = e, []
        for block, own in zip(self.blocks, before, strict=True):
            seen.append(h)
            h = block(h, own, bias, self.dropout)
        return h, torch.cat(seen, dim=-1)


@register_model("transformer-explicit-tiny")
def transformer_explicit_tiny(
    *, num_classes: int = 256, dropout: float = 0.0, memory_length: int = 32
) -> ExplicitTransformer:
    """Two transformer blocks of the size of `transformer-tiny`.

    Args:
        num_classes: How many tokens the vocabulary has.
        dropout: Fraction of units that is dropped in training.
        memory_length: How many tokens before a segment are remembered.
    """
    return ExplicitTransformer(
        num_classes, 48, 4, 34, 2, memory_length=memory_length, dropout=dropout
    )


@register_model("transformer-explicit-ptb")
def transformer_explicit_ptb(
    *, num_classes: int = 10_000, dropout: float = 0.1, memory_length: int = 64
) -> ExplicitTransformer:
    """Two transformer blocks of the size of `transformer-ptb`.

    Args:
        num_classes: How many tokens the vocabulary has.
        dropout: Fraction of units that is dropped in training.
        memory_length: How many tokens before a segment are remembered.
    """
    return ExplicitTransformer(
        num_classes, 128, 4, 256, 2, memory_length=memory_length, dropout=dropout
    )
