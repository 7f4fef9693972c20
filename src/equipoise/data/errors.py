"""What is wrong with a file, or may be, in one line."""

from __future__ import annotations

from pathlib import PurePath

from equipoise.core import SourceError

__all__ = ["DataError", "TableWarning"]

MAX_REASON_LENGTH = 400  # characters of a reason, which may quote a file


class DataError(SourceError):
    """A file or folder does not hold what its format says, is missing, or could not be fetched.

    Args:
        path: The file or folder.
        reason: What is wrong with it, and what to do where that is known.
    """

    def __init__(self, path: PurePath | str, reason: object) -> None:
        super().__init__(path, str(reason)[:MAX_REASON_LENGTH])


class TableWarning(UserWarning):
    """A table is read in a way that may not be meant."""
