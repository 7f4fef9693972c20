"""How kernels are compiled; importing it needs Numba."""

from __future__ import annotations

from contextlib import suppress

from numba import njit

__all__ = ["compiled"]

# Sums may be taken in any order, which vectorising needs; NaN and infinity are what they are.
FAST = {"reassoc", "contract", "nsz"}


def compiled(function):  # type: ignore[no-untyped-def]
    """Compile a function, keeping the result on disk where some place for that can be written."""
    made = njit(nogil=True, fastmath=FAST, error_model="numpy")(function)
    with suppress(RuntimeError, OSError):  # no such place: each process compiles it
        made.enable_caching()
    return made
