"""Causal self-attention in which the distance of two tokens lowers their score."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["alibi", "attend", "merge_heads", "split_heads"]


def alibi(heads: int, queries: int, keys: int, like: Tensor) -> Tensor:
    """Return what is added to the scores: `-s_h (i - j)` at a distance `i - j >= 0`, else `-inf`.

    The slopes are `s_h = 2^(-8 h / heads)`, h = 1, 2, ... (ALiBi; Press, Smith & Lewis, 2022). The
    last query belongs to the last key, so that keys before the first query are those of a memory.

    Args:
        heads: Number of heads.
        queries: Number of queries.
        keys: Number of keys, at least that of queries.
        like: A tensor of the dtype and device to use.

    Shape:
        (heads, queries, keys).
    """
    slopes = torch.exp2(-8 / heads * torch.arange(1, heads + 1, device=like.device).to(like.dtype))
    distance = (
        torch.arange(keys - queries, keys, device=like.device)[:, None]
        - torch.arange(keys, device=like.device)
    ).to(like.dtype)
    return (-slopes[:, None, None] * distance).masked_fill_(distance < 0, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return `softmax(q k^T / sqrt(width) + bias) v` (Vaswani et al., 2017).

    Plain products, because torch's fused kernels have no second derivatives.

    Args:
        q: Queries, (batch, heads, queries, width).
        k: Keys, (batch, heads, keys, width).
        v: Values, likewise.
        bias: As of `alibi`.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + bias
    y: Tensor = scores.softmax(-1) @ v
    return y


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, length, heads * width) as (batch, heads, length, width)."""
    batch, length, features = x.shape
    return x.reshape(batch, length, heads, features // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, length, width) as (batch, length, heads * width)."""
    return x.transpose(1, 2).flatten(2)
