"""Transformer DEQs for text."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from equipoise.core.validate import require_type
from equipoise.families.transformer.cell import TransformerCell
from equipoise.layers.equilibrium import Equilibrium
from equipoise.layers.options import SolveOptions
from equipoise.models.factory import register_model
from equipoise.models.text_network import TextModel

__all__ = ["TransformerDEQ", "TransformerOptions"]

ACCURACY: SolveOptions = {
    "solver": "anderson",
    "tolerance": 1e-2,
    "max_steps": 30,
    "eval_options": {"tolerance": 1e-3, "max_steps": 60},
}
"""Anderson mixes iterates of a whole text: up to its tolerance, a token sees later ones. So scores
are computed more precisely than gradients."""


class TransformerOptions(SolveOptions, total=False):
    """The options of the cell and of its solve.

    Attributes:
        dropout: Fraction of units that is dropped in training.
        gain: Of the cell's first weights.
        memory_length: How many tokens before a segment are remembered.
    """

    dropout: float
    gain: float
    memory_length: int


class TransformerDEQ(TextModel):
    """A language model whose body is the equilibrium of one transformer block.

    It remembers equilibria and embeddings of the text before. Since no token depends on later ones,
    the equilibria of a text in pieces are those of the text as a whole, as far as the memory goes.

    Args:
        equilibrium: The equilibrium of a `TransformerCell`.
        num_classes: How many tokens the vocabulary has.
        memory_length: How many tokens before a segment are remembered.
        dropout: As of `TextModel`.

    Shape:
        As of `TextModel`.
    """

    def __init__(
        self,
        equilibrium: Equilibrium,
        num_classes: int,
        *,
        memory_length: int = 0,
        dropout: float = 0.0,
    ) -> None:
        require_type("TransformerDEQ.equilibrium", equilibrium, Equilibrium, "an Equilibrium")
        cell = equilibrium.cell
        require_type("TransformerDEQ.equilibrium.cell", cell, TransformerCell, "a TransformerCell")
        assert isinstance(cell, TransformerCell)
        super().__init__(
            num_classes,
            cell.features,
            memory_length=memory_length,
            memory_width=2 * cell.features,
            dropout=dropout,
        )
        self.equilibrium = equilibrium

    def states(self, e: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the equilibria, and beside them the embeddings."""
        z: Tensor = self.equilibrium((e, memory))
        return z, torch.cat([z, e], dim=-1)


def _network(
    num_classes: int,
    features: int,
    heads: int,
    inner: int,
    options: TransformerOptions,
    *,
    dropout: float = 0.0,
    memory_length: int,
) -> TransformerDEQ:
    dropout = options.pop("dropout", dropout)
    memory_length = options.pop("memory_length", memory_length)
    gain = options.pop("gain", 0.3)
    cell = TransformerCell(features, heads, inner, dropout=dropout, gain=gain)
    solve = options if options.get("stop") is not None else ACCURACY | options
    return TransformerDEQ(
        Equilibrium(cell, **solve), num_classes, memory_length=memory_length, dropout=dropout
    )


@register_model("transformer-tiny")
def transformer_tiny(
    *, num_classes: int = 256, **options: Unpack[TransformerOptions]
) -> TransformerDEQ:
    """Transformer DEQ of 48 features for characters or bytes: seconds on a CPU.

    Args:
        num_classes: How many tokens the vocabulary has.
        **options: See `TransformerOptions`.
    """
    return _network(num_classes, 48, 4, 96, options, memory_length=32)


@register_model("transformer-ptb")
def transformer_ptb(
    *, num_classes: int = 10_000, **options: Unpack[TransformerOptions]
) -> TransformerDEQ:
    """Transformer DEQ of 128 features for Penn Treebank (Bai, Kolter & Koltun, 2019), for CPUs.

    Args:
        num_classes: How many tokens the vocabulary has.
        **options: See `TransformerOptions`.
    """
    return _network(num_classes, 128, 4, 576, options, dropout=0.1, memory_length=64)
