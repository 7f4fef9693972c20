"""One process trains a run at a time: a file in its folder says which.

Where the file system has locks, the file is locked as well, so that it is known for certain, and
without races, whether its holder is gone. Where it has none, the holder is known by its host, its
number and when it started, and one on another host by how long ago it refreshed the file.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.core import SourceError, uninterrupted

__all__ = ["LOCK_FILE", "RunLock"]

LOCK_FILE = "run.lock"
REFRESH = 30.0  # seconds between two signs of life
SILENCE = 600.0  # seconds without one after which a holder on another host counts as gone
PAUSE = 0.5  # seconds in which two takeovers without locks of the file system become visible
PATIENCE = 5.0  # seconds in which a file that is locked must say by whom
MAX_BYTES = 4096

fcntl: Any = import_module("fcntl") if find_spec("fcntl") else None  # Windows has none

_held: dict[
    str, tuple[int, int]
] = {}  # folders, each with the process and the thread that holds it


@dataclass(frozen=True)
class Holder:
    """Who trains a run.

    Attributes:
        host: The name of its machine.
        pid: The number of its process there.
        started: When that process started, in the clock of its kernel: numbers are used again.
        since: When it took the run.
        token: Tells two holders apart that are alike in everything else.
    """

    host: str
    pid: int
    started: str
    since: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class RunLock:
    """Holds a run while its context lasts, or raises `SourceError` if another process holds it.

    The thread that holds a run may hold it again, within.

    Args:
        folder: The folder of the run, which must be there.

    Attributes:
        left_by: Who held the run and is gone, if somebody left it without letting go.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self.left_by: Holder | None = None
        self._key = os.path.realpath(folder)
        self._own = Holder(
            socket.gethostname(),
            os.getpid(),
            _start_time(os.getpid()),
            datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
            secrets.token_hex(8),
        )
        self._file: int | None = None
        self._refreshed = time.monotonic()

    def __enter__(self) -> RunLock:
        me = os.getpid(), threading.get_ident()
        with uninterrupted():
            holder = _held.get(self._key)
            if holder == me:
                return self
            if holder is not None and holder[0] == me[0]:
                raise self._refusal(None)
            self._acquire()
            _held[self._key] = me
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        with uninterrupted():
            _held.pop(self._key, None)
            # While it is still locked, so that nobody can lock a file that is about to go.
            found = _read(self._file)
            if found is not None and found.token == self._own.token:
                self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def refresh(self) -> None:
        """Give a sign of life, from time to time."""
        if self._file is not None and time.monotonic() - self._refreshed > REFRESH:
            self._refreshed = time.monotonic()
            with suppress(OSError):
                os.utime(self.path)

    def _acquire(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if self._take(file, last=time.monotonic() > deadline):
                    self._file = file
                    return
            finally:
                if self._file is None:
                    os.close(file)
            time.sleep(0.01)

    def _take(self, file: int, *, last: bool) -> bool:
        """Take the open file and return whether that went, or raise if somebody else has it.

        False is for a file that is just being written or removed; not if this is the last attempt.
        """
        locked, found = _lock(file), _read(file)
        if locked is False:
            if found is None and not last:
                return False
            raise self._refusal(found)
        if not self._is_current(file):
            return False
        if found is not None and not self._is_gone(found, certain=bool(locked)):
            raise self._refusal(found, uncertain=True)
        try:
            _write(file, self._own)
        except OSError as error:  # a full disk: no empty file is left on it
            self.path.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if locked is None:
            time.sleep(PAUSE)
            winner = _read(file)
            if winner != self._own:
                raise self._refusal(winner, uncertain=True)
        self.left_by = found
        return True

    def _is_current(self, file: int) -> bool:
        """Whether an open file is still the one at the path."""
        own = os.fstat(file)
        with suppress(FileNotFoundError):
            there = os.stat(self.path)
            return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
        return False

    def _is_gone(self, holder: Holder, *, certain: bool) -> bool:
        """Whether a holder is no more; `certain` if it would have the file locked on this host."""
        if holder.host == self._own.host and (certain or self._own.started):
            return certain or _start_time(holder.pid) != holder.started
        # Locks of some network folders are known to one host only. The folder's own clock decides.
        probe = self.path.with_name(f".{LOCK_FILE}.{secrets.token_hex(8)}.partial")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - self.path.stat().st_mtime > SILENCE

    def _refusal(self, holder: Holder | None, *, uncertain: bool = False) -> SourceError:
        who = holder or "another process"
        rest = f"; if it is no more, remove {self.path}" if uncertain else ""
        return SourceError(
            self.path.parent,
            f"must not be trained twice at a time; {who} has it. Wait for it, or stop it{rest}.",
        )


def _lock(file: int) -> bool | None:
    """Lock a file; returns whether that went, None if this file system has no locks.

    Such locks belong to a process and are not passed on to workers that it forks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return True


def _read(file: int) -> Holder | None:
    """Who is written in a file; None if that is nobody, or cannot be read."""
    os.lseek(file, 0, os.SEEK_SET)
    try:
        return Holder(**json.loads(os.read(file, MAX_BYTES)))
    except (ValueError, TypeError):
        return None


def _write(file: int, holder: Holder) -> None:
    content = json.dumps(asdict(holder)).encode() + b"\n"
    os.lseek(file, 0, os.SEEK_SET)
    os.write(file, content)
    os.ftruncate(file, len(content))
    with suppress(OSError):
        os.fsync(file)


def _start_time(pid: int) -> str:
    """When a process of this host started; empty if there is none, or nobody can know."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]  # the 22nd field, after a name that may hold spaces
