"""How the command tells what went wrong: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import TextIO

from equipoise.cli.command import BAD_INPUT, DIVERGED
from equipoise.core import ConvergenceError, Interrupted, RepeatedNotes
from equipoise.core.printable import printable

__all__ = ["say_error", "say_warning", "show_warnings_by", "tell"]

BUG, INTERRUPTED = 1, 130  # exit codes


def tell(error: BaseException) -> int:
    """Say in one line on stderr what went wrong, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        _say("", str(error) or "interrupted")
        return error.exit_code if isinstance(error, Interrupted) else INTERRUPTED
    if isinstance(error, OSError) and error.strerror and error.filename:
        _say("error: ", f"{error.filename}: {error.strerror}")
        return BAD_INPUT
    if isinstance(error, ValueError | OSError | ImportError):  # an extra that is not installed
        _say("error: ", str(error))
        return BAD_INPUT
    if isinstance(error, ConvergenceError):
        _say("error: ", str(error))
        return DIVERGED
    reason = str(error).partition("\n")[0]
    # On a CPU, torch has no type of its own for this error.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in reason):
        _say(
            "error: ",
            "not enough memory: raise train.accumulate, or lower train.batch or "
            f"train.evaluate_batch ({reason})",
        )
        return BAD_INPUT
    if isinstance(error, RuntimeError) and os.environ.get("WORLD_SIZE", "1") != "1":
        _say(
            "error: ",
            "another process was lost or cannot be reached: torchrun --max-restarts 3 would have "
            f"resumed the run ({reason})",
        )
        return BUG
    _say(
        "error: ",
        f"{type(error).__name__}: {error}. This is a bug; run again with --debug to see where.",
    )
    return BUG


def say_error(text: str) -> None:
    """Say in one line on stderr what went wrong with one thing of several."""
    _say("error: ", text)


def say_warning(text: str) -> None:
    """Say a warning in one line on stderr."""
    _say("warning: ", text)


def show_warnings_by(notes: RepeatedNotes) -> Callable[..., None]:
    """Return what shows warnings of ours as lines, others as Python does.

    Args:
        notes: Shows the lines.
    """

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("equipoise."):
            notes.note(str(message))
        else:
            text = warnings.formatwarning(message, category, filename, lineno, line)
            (file or sys.stderr).write(printable(text))

    return show


def _say(kind: str, text: str) -> None:
    print(f"equipoise: {kind}{printable(' '.join(text.split()))}", file=sys.stderr)
