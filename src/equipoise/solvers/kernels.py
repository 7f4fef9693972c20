"""Whether a solve may use compiled kernels, and where they are."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.transforms import is_wrapped
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

SWITCH = "EQUIPOISE_KERNELS"
"""Set to 0 in the environment, this switches them off."""
MAX_KEPT = 2**25
"""Bytes of working memory that a thread keeps for its next solve at most."""
MAX_SERIAL, MAX_THREADS = 2**18, 4
"""A state of more numbers is left to torch if torch has more threads.

Kernels run on one. Where the border lies exactly was not measured.
"""
LONG = 1.0
"""Compiling that takes so many seconds is worth a word."""
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

Lengths = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns the norms of `f - z` and of `f`, given `z` and `f`."""

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_ready: dict[tuple[str, torch.dtype], ModuleType | None] = {}
_kept = threading.local()
_allowed: ContextVar[bool] = ContextVar("equipoise_kernels", default=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Solve without compiled kernels within a `with` block, in the present thread."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)


def suits_kernels(*tensors: Tensor) -> bool:
    """Return whether kernels can work on tensors, which must not be recorded."""
    return not torch.is_grad_enabled() and all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.dtype in DTYPES
        and not is_wrapped(tensor)
        for tensor in tensors
    )


def find_kernels(tensor: Tensor, module: str = "equipoise.solvers.row_kernels") -> Any:
    """Return a module of compiled kernels for states such as `tensor`.

    Args:
        tensor: The state.
        module: A module with `compile_for(dtype)`; it is imported when it is first needed.

    Returns:
        The module, whose functions are typed nowhere; None without Numba, if they are switched
        off, or if they cannot work on such states.
    """
    if not _allowed.get() or not suits_kernels(tensor):
        return None
    if tensor.numel() > MAX_SERIAL and torch.get_num_threads() > MAX_THREADS:
        return None
    key = (module, tensor.dtype)
    return _ready[key] if key in _ready else _load(module, tensor.dtype)


def _load(name: str, dtype: torch.dtype) -> ModuleType | None:
    with _lock:
        if (name, dtype) not in _ready:
            _ready[name, dtype] = _compile(name, dtype)
        return _ready[name, dtype]


def _compile(name: str, dtype: torch.dtype) -> ModuleType | None:
    if os.environ.get(SWITCH, "1") == "0" or find_spec("numba") is None:
        return None
    from importlib import import_module

    start = time.perf_counter()
    try:
        module = import_module(name)
        new = module.compile_for(DTYPES[dtype])
    except Exception as error:  # such as a Numba that does not know this NumPy
        _log.warning(
            "Solves run without compiled kernels, because Numba failed: %s: %s. %s=0 does not try.",
            type(error).__name__,
            error,
            SWITCH,
        )
        return None
    seconds = time.perf_counter() - start
    if new and seconds > LONG:
        _log.warning(
            "Compiled fused solver kernels for %s once: %.1f s. %s=0 does without.",
            dtype,
            seconds,
            SWITCH,
        )
    return module


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


def as_rows(tensor: Tensor) -> np.ndarray:
    """Return the memory of a matrix, contiguous; of a copy where it does not lie so."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: np.ndarray = (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()
    return array
