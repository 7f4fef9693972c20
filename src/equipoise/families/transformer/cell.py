"""The transformer block whose equilibrium is the network."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.core.transforms import require_dtype
from equipoise.core.tree import Shared
from equipoise.core.validate import SettingError, require_count, require_positive
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Link, Statement
from equipoise.layers.dropout import VariationalDropout
from equipoise.models.attention import alibi, attend, merge_heads, split_heads

__all__ = ["TransformerCell"]

VALUE_GAIN = 4.0
"""How much larger the values of the embeddings begin than their queries and keys."""


class _Context(NamedTuple):
    """What a solve needs that does not depend on the state.

    Attributes:
        injection: `U e + b`, (batch, length, 3 features).
        keys: Those of the memory, (batch, heads, remembered, width), if there is one.
        values: Likewise.
        bias: What is added to the scores of attention.
        attention_mask: Of dropout, (batch, 1, features), in training.
        inner_mask: Likewise, (batch, 1, inner).
        output_mask: Likewise, (batch, 1, features).
    """

    injection: Tensor
    keys: Tensor | None
    values: Tensor | None
    bias: Any  # Shared from inject, a tensor in step
    attention_mask: Tensor | None = None
    inner_mask: Tensor | None = None
    output_mask: Tensor | None = None


class TransformerCell(Cell):
    """`z = norm(y + W_2 relu(W_1 y + b_1) + b_2)`, `y = norm(z + O attention(W z + U e + b))`.

    The weight-tied transformer (Bai, Kolter & Koltun, 2019, section 3.2): the embeddings `e` are
    added to queries, keys and values, and layer norms come after the sums. Keys and values of a
    memory, equilibria of the text before beside its embeddings, are computed once for each solve,
    and so are the masks of dropout.

    Positions are distances, by ALiBi in place of Transformer-XL's learnt ones: they are a constant
    of the context, so that a step pays nothing for them, and no length is too long.

    Args:
        features: Numbers for each token, in the state and in the input.
        heads: Heads of attention, which must divide `features`.
        inner: Units of the feed-forward part.
        dropout: Fraction of units that is dropped in training: after attention, within and after
            the feed-forward part; the same ones for all tokens and all steps.
        gain: First weights of the matrices that meet the state have a standard deviation of
            `gain / sqrt(columns)`. Those of `U` have four times `1 / sqrt(columns)` for values:
            what does not depend on the state must outweigh it in the sum `z + O attention`, or the
            step is nearly the identity up to scale, and solves are slow. For queries and keys they
            have `1 / sqrt(columns)`: the larger these are, the more the scores of attention change
            with the state, which is what makes solves slow later on.

    Shape:
        The input is `e` of shape (batch, length, features), or a pair of it and a memory of shape
        (batch, remembered, 2 features), equilibria before embeddings. The state is as `e`.
    """

    def __init__(
        self,
        features: int,
        heads: int,
        inner: int,
        *,
        dropout: float = 0.0,
        gain: float = 0.3,
    ) -> None:
        super().__init__()
        for name, count in (("features", features), ("heads", heads), ("inner", inner)):
            require_count(f"TransformerCell.{name}", count)
        if features % heads:
            rule = f"be a multiple of heads, {heads}"
            raise SettingError("TransformerCell.features", rule, features)
        require_positive("TransformerCell.gain", gain)
        self.features, self.heads, self.inner = features, heads, inner
        self.dropout = VariationalDropout(dropout, owner="TransformerCell.dropout")
        self.attention = nn.Linear(features, 3 * features, bias=False)
        self.injection = nn.Linear(features, 3 * features)
        self.output = nn.Linear(features, features)
        self.norm1 = nn.LayerNorm(features)
        self.expand = nn.Linear(features, inner)
        self.contract = nn.Linear(inner, features)
        self.norm2 = nn.LayerNorm(features)
        gains = {self.attention: gain, self.injection: 1.0, self.output: 1.0}
        for part, own in (gains | {self.expand: gain, self.contract: gain}).items():
            nn.init.normal_(part.weight, std=own * part.in_features**-0.5)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        with torch.no_grad():
            self.injection.weight[2 * features :].mul_(VALUE_GAIN)

    def inject(self, x: Tensor | tuple[Tensor, Tensor | None]) -> _Context:
        e, memory = x if isinstance(x, tuple) else (x, None)
        for given, name in ((e, "input"), (memory, "memory")):
            if given is not None:
                require_dtype(given, self.attention.weight, f"The {name} of TransformerCell")
        keys, values, remembered = None, None, 0
        if memory is not None and memory.shape[1]:
            remembered = memory.shape[1]
            z, before = memory.chunk(2, dim=-1)
            width = self.features
            pairs = functional.linear(z, self.attention.weight[width:]) + functional.linear(
                before, self.injection.weight[width:], self.injection.bias[width:]
            )
            keys, values = (split_heads(part, self.heads) for part in pairs.chunk(2, dim=-1))
        bias = Shared(alibi(self.heads, e.shape[1], remembered + e.shape[1], e))
        widths = (self.features, self.inner, self.features)
        masks = (self.dropout.draw(e, 1, width) for width in widths)
        return _Context(self.injection(e), keys, values, bias, *masks)

    def initial(self, x: Tensor | tuple[Tensor, Tensor | None], context: _Context) -> Tensor:
        """Return zeros like the embeddings."""
        return torch.zeros_like(x[0] if isinstance(x, tuple) else x)

    def step(self, z: Tensor, context: _Context) -> Tensor:
        joined = self.attention(z) + context.injection
        q, k, v = (split_heads(part, self.heads) for part in joined.chunk(3, dim=-1))
        if context.keys is not None and context.values is not None:
            k, v = torch.cat([context.keys, k], dim=2), torch.cat([context.values, v], dim=2)
        y = self.output(merge_heads(attend(q, k, v, context.bias)))
        y = self.norm1(z + self.dropout(y, context.attention_mask))
        inner = self.dropout(torch.relu(self.expand(y)), context.inner_mask)
        after: Tensor = self.norm2(y + self.dropout(self.contract(inner), context.output_mask))
        return after

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """Return that there is an equilibrium, by Brouwer's theorem; not that there is only one.

        The last layer norm maps every state into a ball: each token has a norm of at most
        `sqrt(features) max |g| + |b|` for its gain `g` and its bias `b`. A continuous map of a ball
        into itself has a fixed point.
        """
        gain, bias = self.norm2.weight.double(), self.norm2.bias.double()
        radius = float(math.sqrt(self.features) * gain.abs().max() + bias.norm())
        return Certificate(
            (Link(type(self).__name__, math.inf),),
            further=(
                Statement(
                    "there is an equilibrium, each token of which has a norm of at most this "
                    "number, since the last layer norm maps all states into that ball",
                    holds=math.isfinite(radius),
                    number=radius,
                    theorem="Brouwer, 1911",
                ),
            ),
            remedy="Take an OptEq or a monotone network where a unique equilibrium is needed.",
        )
