"""What the C library does with memory that a program has given back."""

from __future__ import annotations

import os

__all__ = ["keep_freed_memory"]

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2  # names of mallopt in malloc.h
LARGEST_BLOCK = 32 * 2**20  # glibc takes no larger one
SETTINGS = {
    MMAP_THRESHOLD: LARGEST_BLOCK,
    TRIM_THRESHOLD: 2**31 - 1,
    TOP_PAD: 64 * 2**20,
}
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Let glibc hand freed blocks of up to 32 MB out again, and not return them to the system.

    Each training step frees its states and asks for as many again. Returned to the system, their
    pages come back one by one and zeroed, which takes up to a tenth of a step of images. The
    process stays as large as it has once been. Returns whether it is so now: without glibc, and
    where the environment says what `malloc` has to do, nothing is changed.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or any(name in os.environ for name in VARIABLES):
        return False
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return False
    except (AttributeError, OSError, ValueError):  # other systems do not know the name
        return False
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in SETTINGS.items())
