"""Flush-to-zero of denormal floats, which slow long contractive back-propagation on CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["flush_denormals"]


@contextmanager
def flush_denormals() -> Iterator[bool]:
    """Treat denormal floats as zero on this CPU within a `with` block.

    The mode before it is restored afterwards. Gradients pushed back through many contractive steps
    shrink geometrically until they are denormal, and most CPUs handle denormals in microcode, five
    to fourteen times slower. The mode belongs to a thread, so set it where the work is done. Yields
    whether the processor supports it.
    """
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    before = bool((tiny / 2 == 0).item())
    supported = torch.set_flush_denormal(True)
    try:
        yield supported
    finally:
        torch.set_flush_denormal(before)
