"""Steps that return the same memory at each call, as with `out=` and replayed CUDA graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from equipoise.core.transforms import is_wrapped

__all__ = ["ReuseGuard", "ReusedMemory"]


class ReusedMemory(Exception):  # noqa: N818 - a signal within a solve, which starts again
    """A value of the map lies in memory that the solve still reads."""


class ReuseGuard:
    """Notices a step that writes its value into memory that a solve still reads.

    Such a value has overwritten an iterate: if it is the present one, the residual `f - z` is zero
    and means nothing. Rings of several buffers come back to the best iterate or to what a rule
    remembers.

    Args:
        start: Where the solve starts. Empty tensors, and tensors under the transforms of
            `torch.func`, have no address, and nothing is checked.
    """

    def __init__(self, start: Tensor) -> None:
        self._active = not is_wrapped(start) and start.numel() > 0
        self._last: Callable[[], Tensor | None] = lambda: None
        self._address = 0

    def check(self, f: Tensor, *read: Tensor) -> None:
        """Raise `ReusedMemory` if a new value lies where older ones are.

        Args:
            f: The value.
            read: What is still read; besides that, the last value, if anybody has kept it.
        """
        if not self._active:
            return
        address, last = f.data_ptr(), self._last()
        if address == self._address and last is not None:
            raise ReusedMemory
        for tensor in read:
            # Plain iteration reads the last value, of which the address is known.
            if tensor is not last and tensor.data_ptr() == address:
                raise ReusedMemory
        self._last, self._address = weakref.ref(f), address
