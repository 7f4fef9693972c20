"""Being told to stop: by Ctrl-C, or by a scheduler's SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = [
    "Interrupted",
    "follow_parent",
    "interruptible",
    "interruption",
    "stop_if_requested",
    "stop_requested",
    "uninterrupted",
]

# Seconds in which a process of torchrun hears the same Ctrl-C twice: from the terminal, which tells
# all processes, and from torchrun, which passes it on.
ECHO = 1.0
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class Interrupted(KeyboardInterrupt):
    """The work was told to stop.

    Args:
        reason: What became of the work.
        number: The signal that said so.
    """

    def __init__(self, reason: str = "interrupted", number: int = signal.SIGINT) -> None:
        super().__init__(reason, number)
        self.reason, self.number = reason, int(number)

    def __str__(self) -> str:
        return self.reason

    @classmethod
    def after(cls, error: KeyboardInterrupt, reason: str) -> Interrupted:
        """Return the same interruption with another reason.

        Args:
            error: What was raised, perhaps by Python itself.
            reason: What became of the work.
        """
        return cls(reason, error.number if isinstance(error, Interrupted) else signal.SIGINT)

    @property
    def exit_code(self) -> int:
        """The code with which a process ends: 130 after SIGINT, 143 after SIGTERM."""
        return 128 + self.number


class _Request:
    """What the signal handler has heard, and whether it may raise."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.number = 0  # of the signal, once one came
        self.heard = 0.0
        self.deferred = 0  # sections that are not to be interrupted
        self.raised = False  # whether an exception is on its way already


_request: _Request | None = None


@contextmanager
def interruptible(
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """Let signals raise `Interrupted` while the context lasts.

    They do so at once, except in `uninterrupted` sections, and a second signal does there too.
    Within another such context nothing changes. Signals are for the main thread: elsewhere
    nothing is listened to.

    Args:
        numbers: The signals.
    """
    global _request
    if threading.current_thread() is not threading.main_thread() or _own() is not None:
        yield
        return
    outer, _request = _request, _Request()
    before = {number: signal.signal(number, _hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # none, if it was not set from Python
        _request = outer


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off a first signal until the outermost such section is over.

    A long section asks `stop_requested` and ends early in its own way.
    """
    request = _own()
    if request is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    request.deferred += 1
    try:
        yield
    finally:
        request.deferred -= 1
    # One that is on its way says more than another would.
    if not request.deferred and not request.raised:
        stop_if_requested()


def stop_requested() -> bool:
    """Return whether a signal came that has not ended the work yet."""
    request = _own()
    return request is not None and bool(request.number)


def stop_if_requested() -> None:
    """Raise `Interrupted` if a signal came."""
    if stop_requested():
        raise interruption()


def interruption(reason: str = "interrupted") -> Interrupted:
    """Return the exception to raise for the signal that came; to this process or to its group.

    Args:
        reason: What became of the work.
    """
    request = _own()
    heard = request is not None and request.number
    if request is not None:
        request.raised = True
    return Interrupted(reason, heard or signal.SIGTERM)


def follow_parent(numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)) -> None:
    """Leave signals to the process that started this one, and end with it, even if it is killed.

    Args:
        numbers: The signals.
    """
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)


def _own() -> _Request | None:
    """The request of this process: a forked one has a copy of another's, which is not its own."""
    return _request if _request is not None and _request.process == os.getpid() else None


def _hear(number: int, _frame: object) -> None:
    request = _own()
    if request is None:  # a forked worker, which has nothing to save
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    now = time.monotonic()
    if request.number:
        if "RANK" in os.environ and now - request.heard < ECHO:
            return
        raise Interrupted(number=request.number)
    request.number, request.heard = number, now
    if not request.deferred:
        raise Interrupted(number=number)
    _announce()


def _announce() -> None:
    """Say that the signal was heard; print could be in the middle of a line of its own."""
    if os.environ.get("RANK", "0") != "0":
        return
    with suppress(OSError, ValueError, AttributeError):
        # On a terminal, in place of the bar, which is drawn anew below.
        start = "\r\x1b[K" if sys.stderr.isatty() else ""
        text = f"{start}equipoise: stopping ... (a second signal stops at once)\n"
        os.write(sys.stderr.fileno(), text.encode())
