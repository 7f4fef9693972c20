"""What can go wrong: a solve, or something that was read."""

from __future__ import annotations

from pathlib import PurePath

__all__ = ["ConvergenceError", "ConvergenceWarning", "SourceError"]


class ConvergenceError(ArithmeticError):
    """A solve ended without reaching its tolerance and the caller asked for that to be an error."""


class ConvergenceWarning(UserWarning):
    """A solve ended without reaching its tolerance; the best finite iterate was used."""


class SourceError(ValueError):
    """Something that was read cannot be used: "SOURCE: REASON".

    Args:
        source: The file or folder, or the name of whatever else was read.
        reason: What is wrong with it, and what to do where that is known.
    """

    def __init__(self, source: PurePath | str, reason: object) -> None:
        self.source = str(source)
        self.reason = " ".join(str(reason).split())
        super().__init__(f"{self.source}: {self.reason}")

    def __reduce__(self) -> tuple[type[SourceError], tuple[str, str]]:
        return type(self), (self.source, self.reason)  # worker processes send errors as pickles
