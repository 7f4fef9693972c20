"""Whether compiled kernels may be used, and where they are."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.transforms import is_wrapped

__all__ = ["DTYPES", "as_rows", "find_compiled", "suits_kernels", "without_kernels"]

SWITCH = "EQUIPOISE_KERNELS"
"""Set to 0 in the environment, this switches them off."""
MAX_SERIAL, MAX_THREADS = 2**18, 4
"""A tensor of more numbers is left to torch if torch has more threads.

Kernels run on one. Where the border lies exactly was not measured.
"""
LONG = 1.0
"""Compiling that takes so many seconds is worth a word."""
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_ready: dict[tuple[str, torch.dtype], ModuleType | None] = {}
_allowed: ContextVar[bool] = ContextVar("equipoise_kernels", default=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Do without compiled kernels within a `with` block, in the present thread."""
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


def find_compiled(tensor: Tensor, module: str) -> Any:
    """Return a module of compiled kernels for tensors such as this one.

    Args:
        tensor: The tensor.
        module: A module with `compile_for(dtype)`; it is imported when it is first needed.

    Returns:
        The module, whose functions are typed nowhere; None without Numba, if they are switched
        off, or if they cannot work on such tensors.
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
            "Compiled kernels are not used, because Numba failed: %s: %s. %s=0 does not try.",
            type(error).__name__,
            error,
            SWITCH,
        )
        return None
    seconds = time.perf_counter() - start
    if new and seconds > LONG:
        _log.warning(
            "Compiled %s for %s once: %.1f s. %s=0 does without.",
            name,
            dtype,
            seconds,
            SWITCH,
        )
    return module


def as_rows(tensor: Tensor) -> np.ndarray:
    """Return the memory of a matrix, contiguous; of a copy where it does not lie so."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    array: np.ndarray = (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()
    return array
