"""Samples that cannot be read: which they are, and a list of them in a file."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

from equipoise.core import write_atomically
from equipoise.data.errors import DataError

__all__ = [
    "BadSampleError",
    "BadSampleWarning",
    "BadSamples",
    "is_bad_sample",
    "read_bad_samples",
]


class BadSampleError(DataError):
    """A sample that is read when it is needed cannot be."""


class BadSampleWarning(UserWarning):
    """A sample could not be read, and the run goes on without it."""


def is_bad_sample(error: DataError) -> bool:
    """Return whether a file itself is bad, and would be each time that it is read.

    A file that is gone, a disk that fails and a lack of memory are no fault of the sample: going on
    without it would make two runs of one config differ.

    Args:
        error: What was raised when the sample was read.
    """
    cause = error.__cause__
    if isinstance(cause, OSError):  # Pillow says "truncated" by one without a number
        return cause.errno is None
    return not isinstance(cause, MemoryError)


class BadSamples:
    """The samples that could not be read, by their files; all data sets of a run share one list."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._skipped: set[str] = set()
        self._path: Path | None = None

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def reasons(self) -> dict[str, str]:
        """What is wrong with each file."""
        return dict(self._reasons)

    def knows(self, file: Path) -> bool:
        """Return whether the sample that begins with a file was found to be bad."""
        return str(file) in self._skipped

    def add(self, file: Path | None, error: DataError) -> None:
        """Take note of a bad sample, with a warning, and write it down if there is a list.

        Args:
            file: The first of its files, by which the sample is known.
            error: What was raised when it was read.
        """
        if file is not None:
            self._skipped.add(str(file))
        if error.source in self._reasons:
            return
        self._reasons[error.source] = error.reason
        if self._path is not None:
            self._append(self._path, error.source)
        warnings.warn(f"{error}; it is skipped", BadSampleWarning, stacklevel=4)

    def keep_in(self, path: Path, *, is_main: bool = True) -> None:
        """List the samples in a file from now on, with those that are listed there already.

        Each line is an object with `file` and `reason`. Several processes may add lines at once.

        Args:
            path: The file; it is not made before there is a bad sample.
            is_main: Whether this process clears the file of what a killed run left half written.
        """
        for file, reason in read_bad_samples(path).items():
            if Path(file).exists():  # else the data were moved, and it will be met again
                self._reasons.setdefault(file, reason)
        self._path = path
        if is_main and (self._reasons or path.exists()):
            write_atomically(path, "".join(self._line(file) for file in self._reasons))

    def _append(self, path: Path, file: str) -> None:
        # One call, so that lines of several processes are not mixed.
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(target, self._line(file).encode())
        finally:
            os.close(target)

    def _line(self, file: str) -> str:
        return json.dumps({"file": file, "reason": self._reasons[file]}) + "\n"


def read_bad_samples(path: Path) -> dict[str, str]:
    """Return the files in a list of bad samples, each with what is wrong with it.

    Args:
        path: The list; there are no bad samples if it is not there.
    """
    found: dict[str, str] = {}
    if path.exists():
        for text in path.read_text("utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
                found.setdefault(str(line["file"]), str(line["reason"]))
            except (ValueError, KeyError, TypeError, RecursionError):  # cut off by a kill
                continue
    return found
