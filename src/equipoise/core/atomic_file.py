"""Files that are there whole or not at all, whenever the machine stops."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from equipoise.core.interrupt import uninterrupted

__all__ = ["remove_partials", "write_atomically"]

PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial", re.DOTALL)


def write_atomically(path: Path | str, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write a file so that its path always holds either all of the old content or all of the new.

    The content goes to a file beside it, `.NAME.XXXX.partial`, is flushed to the disk, and is
    renamed in one step.

    Args:
        path: The file; its folder must be there.
        content: Bytes, text (written as UTF-8), or pieces to write one after the other.
    """
    # A signal raises when the file is whole and the partial one is gone.
    with uninterrupted():
        _write(Path(path), content)


def _write(path: Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    pieces = (
        [content.encode()]
        if isinstance(content, str)
        else [content]
        if isinstance(content, bytes)
        else content
    )
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        failure = OSError(
            f"{path}: could not be written ({error.strerror or error}); what was there before "
            "is intact."
        )
        failure.errno = error.errno
        raise failure from error
    finally:
        with suppress(OSError):
            partial.unlink()
    _sync_folder(path.parent)


def remove_partials(folder: Path | str) -> None:
    """Remove what writers that were killed left in a folder; nobody may be writing there.

    Args:
        folder: Where to look; not in its subfolders. It need not be there.
    """
    with suppress(FileNotFoundError):
        for path in Path(folder).iterdir():
            if PARTIAL.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, on systems that can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
