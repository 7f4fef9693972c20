"""What is wrong with a file, in one line."""

from __future__ import annotations

from pathlib import PurePath

__all__ = ["DataError"]

MAX_REASON_LENGTH = 400  # characters of a reason, which may quote a file


class DataError(ValueError):
    """A file or folder does not hold what its format says, is not there, or could not be fetched.

    Args:
        path: The file or folder.
        reason: What is wrong with it, and what to do where that is known.
    """

    def __init__(self, path: PurePath | str, reason: object) -> None:
        line = " ".join(str(reason)[:MAX_REASON_LENGTH].split())
        super().__init__(f"{path}: {line}")
        self._arguments = (str(path), line)

    def __reduce__(self) -> tuple[type[DataError], tuple[str, str]]:
        return type(self), self._arguments  # data-loading workers send their errors as pickles
