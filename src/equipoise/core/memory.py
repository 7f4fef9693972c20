"""How much memory there is, asked before much of it is taken."""

from __future__ import annotations

import os
from pathlib import Path

from equipoise.core.validate import SettingError

__all__ = ["available_memory", "require_memory"]


def available_memory() -> int | None:
    """Return how many bytes a program could take now; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def require_memory(key: str, size: int, what: str, remedy: str = "") -> None:
    """Raise if something would not fit into memory, with its size.

    Args:
        key: The setting that makes it large.
        size: Bytes.
        what: What would take them.
        remedy: What to do about it, as a sentence.
    """
    free = available_memory()
    if free is not None and size > free:
        rule = f"leave {what} of at most {_gigabytes(free)}, the memory that is free"
        raise SettingError(key, rule, size, remedy, got=_gigabytes(size))


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3g} GB"
