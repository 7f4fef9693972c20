from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from runs import assert_same_runs, at_moment, resume_or_begin, start, train, wait

from equipoise.cli import main
from equipoise.core import SourceError
from equipoise.engine import run_lock
from equipoise.engine.run_lock import LOCK_FILE, RunLock

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Deaf:
    """A file system without locks."""

    LOCK_EX = LOCK_NB = 0

    @staticmethod
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture(params=["locks", "no locks"])
def files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system, with or without locks of its own."""
    if request.param == "no locks":
        monkeypatch.setattr(run_lock, "fcntl", Deaf)
    return str(request.param)


def hold_and_wait(folder: Path, ready: Path) -> int:
    with RunLock(folder):
        ready.touch()
        time.sleep(60)
    return 0


def hold_elsewhere(folder: Path) -> int:
    """Hold a run by another process, and return its number."""
    ready = folder.parent / "ready"
    process = start(lambda: hold_and_wait(folder, ready), folder.parent / "output")
    while not ready.exists():
        time.sleep(0.01)
    ready.unlink()
    return process


@pytest.mark.usefixtures("files")
def test_run_is_held_by_one_process_which_is_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    process = hold_elsewhere(folder)
    with pytest.raises(
        SourceError, match=rf"process {process} on .+ since 20.+ has it\. Wait for it, or stop it"
    ):
        RunLock(folder).__enter__()
    os.kill(process, signal.SIGKILL)
    wait(process)
    assert (folder / LOCK_FILE).exists()
    with RunLock(folder) as lock:
        assert lock.left_by is not None
        assert lock.left_by.pid == process
    assert list(folder.iterdir()) == []
    with RunLock(folder) as lock:
        assert lock.left_by is None


def test_run_is_held_again_by_the_same_thread_only(tmp_path):
    failures = []

    def hold() -> None:
        try:
            with RunLock(tmp_path):
                pass
        except SourceError as error:
            failures.append(str(error))

    with RunLock(tmp_path):
        with RunLock(tmp_path):
            pass
        other = threading.Thread(target=hold)
        other.start()
        other.join()
        assert "another process has it" in failures[0]
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", [True, False])
def test_only_one_of_many_processes_that_start_at_once_gets_a_run(left, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    if left:
        process = hold_elsewhere(folder)
        os.kill(process, signal.SIGKILL)
        wait(process)
    counts = torch.zeros(3, dtype=torch.int64).share_memory_()  # inside, at most, refused
    begin = time.time() + 0.3

    def work() -> int:
        time.sleep(max(begin - time.time(), 0))
        for _ in range(20):
            try:
                with RunLock(folder):
                    counts[0] += 1
                    counts[1] = max(int(counts[1]), int(counts[0]))
                    time.sleep(0.001)
                    counts[0] -= 1
            except SourceError:
                counts[2] += 1
        return 0

    processes = [start(work, tmp_path / f"output-{number}") for number in range(8)]
    assert [wait(process) for process in processes] == [0] * 8
    assert counts[0] == 0
    assert counts[1] == 1
    assert counts[2] > 0
    assert list(folder.iterdir()) == []


def test_only_one_takes_over_where_there_are_no_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "fcntl", Deaf)
    holder = {"host": run_lock.socket.gethostname(), "pid": 2**22 + 1, "started": "1"}
    (tmp_path / LOCK_FILE).write_text(json.dumps({**holder, "since": "then", "token": "x"}))
    begin, got = time.time() + 0.3, torch.zeros(1, dtype=torch.int64).share_memory_()

    def work() -> int:
        time.sleep(max(begin - time.time(), 0))
        try:
            with RunLock(tmp_path):
                got.add_(1)
                time.sleep(1)
        except SourceError:
            return 2
        return 0

    codes = [start(work, tmp_path.parent / f"output-{number}") for number in range(6)]
    assert sorted(wait(process) for process in codes) == [0, 2, 2, 2, 2, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("files")
def test_holder_on_another_host_is_gone_when_it_was_silent_for_long(tmp_path):
    path = tmp_path / LOCK_FILE
    holder = {"host": "elsewhere", "pid": os.getpid(), "started": "1", "since": "then"}
    path.write_text(json.dumps({**holder, "token": "x"}))
    with pytest.raises(SourceError, match=rf"process {os.getpid()} on elsewhere .* remove {path}"):
        RunLock(tmp_path).__enter__()
    assert [each.name for each in tmp_path.iterdir()] == [LOCK_FILE]
    long_ago = time.time() - run_lock.SILENCE - 5
    os.utime(path, (long_ago, long_ago))
    with RunLock(tmp_path) as lock:
        assert lock.left_by is not None
        assert lock.left_by.host == "elsewhere"
        os.utime(path, (long_ago, long_ago))
        lock._refreshed -= run_lock.REFRESH + 1
        lock.refresh()
        assert path.stat().st_mtime > long_ago + 1


@pytest.mark.usefixtures("files")
def test_lock_with_nonsense_in_it_is_taken(tmp_path):
    for content in (b"", b"\xff{"):
        (tmp_path / LOCK_FILE).write_bytes(content)
        with RunLock(tmp_path) as lock:
            assert lock.left_by is None
        assert list(tmp_path.iterdir()) == []


def test_second_resume_says_who_trains_and_the_run_ends_as_if_it_had_not_been(tmp_path, capsys):
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert train(whole) == 0
    capsys.readouterr()

    def compete() -> None:
        other = start(lambda: main(["resume", str(folder), "--quiet"]), tmp_path / "output")
        assert wait(other) == 2
        told = (tmp_path / "output").read_text()
        assert told.startswith(
            f"equipoise: error: {folder}: must not be trained twice at a time; process "
            f"{os.getpid()} on "
        )
        assert told.count("\n") == 1
        for words in (["report"], ["evaluate"]):  # these only read
            other = start(lambda words=words: main([*words, str(folder)]), tmp_path / "output")
            assert wait(other) == 0, (tmp_path / "output").read_text()

    with at_moment("checkpoint half", 5, compete):
        assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)


def test_run_that_a_killed_process_left_is_taken_over_with_a_note(tmp_path, capsys):
    folder = tmp_path / "run"

    def die() -> int:
        with at_moment("checkpoint synced", 1, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            return train(folder)

    process = start(die, tmp_path / "output")
    assert wait(process) == -signal.SIGKILL
    assert main(["resume", str(folder)]) == 0
    printed = capsys.readouterr().err
    assert f"{folder} was left by process {process} on " in printed
    assert f"{folder} holds no checkpoint yet: training starts from the beginning" in printed
    assert not (folder / LOCK_FILE).exists()


def test_lock_that_a_full_disk_has_no_room_for_is_named_and_not_left(tmp_path, monkeypatch):
    def fill(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / LOCK_FILE}'"):
        RunLock(tmp_path).__enter__()
    assert list(tmp_path.iterdir()) == []
