"""Being told to stop: by Ctrl-C or by a scheduler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Interrupted", "interruptible"]


class Interrupted(KeyboardInterrupt):
    """The run was told to stop, and wrote a checkpoint if it has a folder."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yield an event that SIGINT or SIGTERM sets; a second signal interrupts at once.

    Signals are for the main thread: in any other the event is never set.
    """
    told = threading.Event()

    def tell(*_: object) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # none, if it was not set from Python
