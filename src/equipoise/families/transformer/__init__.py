"""Transformer DEQs: one transformer block as the cell, for language models with a memory."""

from equipoise.families.transformer.cell import TransformerCell
from equipoise.families.transformer.models import TransformerDEQ, TransformerOptions

__all__ = ["TransformerCell", "TransformerDEQ", "TransformerOptions"]
