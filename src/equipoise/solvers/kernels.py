"""Compiled kernels of solvers, and memory for them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from equipoise.core.kernels import (
    DTYPES,
    as_rows,
    find_compiled,
    suits_kernels,
    without_kernels,
)
from equipoise.solvers.problem import Problem

__all__ = [
    "Lengths",
    "Workspace",
    "as_rows",
    "find_kernels",
    "find_lengths",
    "suits_kernels",
    "without_kernels",
]

MAX_KEPT = 2**25
"""Bytes of working memory that a thread keeps for its next solve at most."""

Lengths = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the norms of `f - z` and of `f`, given `z` and `f`."""

_kept = threading.local()


def find_kernels(tensor: Tensor) -> Any:
    """Return the compiled kernels for states such as `tensor`, if there are any."""
    return find_compiled(tensor, "equipoise.solvers.row_kernels")


def find_lengths(problem: Problem, z: Tensor) -> Lengths | None:
    """Return what finds the norms of `f - z` and of `f` in one pass, if kernels can.

    Args:
        problem: The problem.
        z: A state of it.
    """
    kernels = find_kernels(z)
    if kernels is None:
        return None
    measure, halves = kernels.measure, problem.halves
    factor = DTYPES[z.dtype].type(problem.factor)

    def lengths(z: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        size, length = z.new_empty(len(z)), z.new_empty(len(z))
        measure(as_rows(z), as_rows(f), halves, factor, size.numpy(), length.numpy())
        return size, length

    return lengths


class Workspace:
    """Memory for what a rule remembers, which the next solve of the thread takes over.

    Memory that is new for each solve comes from the system page by page, which took a sixth of a
    solve of 128 samples and 512 units.

    Args:
        like: A tensor of the wanted dtype.
        count: How many numbers.
    """

    def __init__(self, like: Tensor, count: int) -> None:
        size = count * like.element_size()
        memory: np.ndarray | None = getattr(_kept, "memory", None)
        if memory is not None and size <= memory.nbytes:
            _kept.memory = None
        else:
            memory = np.empty(size, dtype=np.uint8)
        self._memory = memory
        self._numbers: np.ndarray = memory[:size].view(DTYPES[like.dtype])

    def split(self, shape: tuple[int, ...], widths: tuple[int, ...]) -> list[np.ndarray]:
        """Return arrays of this shape and these widths that lie one after the other."""
        ends = np.cumsum([math.prod(shape) * width for width in widths])
        parts = np.split(self._numbers, ends[:-1])
        return [part.reshape(*shape, width) for part, width in zip(parts, widths, strict=True)]

    def __del__(self) -> None:
        if self._memory.nbytes <= MAX_KEPT:
            _kept.memory = self._memory
