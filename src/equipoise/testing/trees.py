"""Trees of tensors, taken apart by other means than the library's own: checks are witnesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.core.tree import Shared

__all__ = ["bare", "convert", "in_precision", "is_inexact", "leaves", "pick", "rows"]


def convert(tree: Any, change: Callable[[Tensor], Any], shared: Callable[[Shared], Any]) -> Any:
    """Return a tree with its tensors and its `Shared` leaves replaced."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Shared):
        return shared(tree)
    if isinstance(tree, dict):
        return {key: convert(value, change, shared) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [convert(value, change, shared) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor is of real or complex floating-point numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def in_precision(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the precision of a real dtype; complex numbers stay complex."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def leaves(tree: Any) -> list[Tensor]:
    """Return the tensors of a tree, those in `Shared` too."""
    found: list[Tensor] = []
    convert(tree, found.append, lambda leaf: found.append(leaf.tensor))
    return found


def rows(tree: Any) -> Tensor:
    """Return a state as a matrix with one row for each sample."""
    return torch.cat([leaf.reshape(leaf.shape[0], -1) for leaf in leaves(tree)], dim=1)


def pick(tree: Any, index: Any) -> Any:
    """Return some samples of a tree of tensors; `Shared` leaves stay."""
    return convert(tree, lambda leaf: leaf[index], lambda leaf: leaf)


def bare(tree: Any) -> Any:
    """Return a context as a step sees it, without `Shared`."""
    return convert(tree, lambda leaf: leaf, lambda leaf: leaf.tensor)
