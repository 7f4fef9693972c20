from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.core import remove_partials, write_atomically

KILLED = """
import os, sys
from equipoise.core import write_atomically
os.fsync = lambda handle: os.kill(os.getpid(), 9)
write_atomically(sys.argv[1], b"after")
"""


def stops_half_way() -> Iterator[bytes]:
    yield b"half"
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "content",
    [b"\0\xff", "text \u00e9", [b"a", memoryview(b"b"), b""], iter([b"x", b"y"])],
    ids=["bytes", "text", "list", "iterator"],
)
def test_atomic_write_holds_the_content(tmp_path: Path, content: object) -> None:
    path = tmp_path / "a file"
    path.write_bytes(b"something longer that was there before")
    write_atomically(str(path), content)  # type: ignore[arg-type]
    expected = {bytes: b"\0\xff", str: "text \u00e9".encode(), list: b"ab"}.get(
        type(content), b"xy"
    )
    assert path.read_bytes() == expected
    assert os.listdir(tmp_path) == ["a file"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_atomic_write_keeps_to_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("place", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
    ids=["full", "interrupt"],
)
def test_atomic_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(os, place, fail)
    with pytest.raises(type(error)) as caught:
        write_atomically(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]
    if isinstance(error, OSError):
        assert str(caught.value) == (
            f"{path}: could not be written (No space left on device); what was there "
            "before is intact."
        )
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.ENOSPC


def test_atomic_write_removes_its_file_when_the_content_stops(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", stops_half_way())
    assert os.listdir(tmp_path) == []


def test_atomic_write_brings_content_and_name_to_the_disk_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(handle: int) -> None:
        where = (
            os.readlink(f"/proc/self/fd/{handle}")
            if os.path.exists("/proc/self/fd")
            else "?.partial"
        )
        calls.append("folder" if where == str(tmp_path) else Path(where).suffix)
        fsync(handle)

    def noting_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write_atomically(tmp_path / "file", b"1")
    assert calls == [".partial", "replace", "folder"]


def test_atomic_write_to_a_folder_that_is_missing_or_in_the_way_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^\S+: could not be written \(No such file or directory\)"):
        write_atomically(tmp_path / "no" / "file", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"^\S+folder: could not be written"):
        write_atomically(tmp_path / "folder", b"")
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.skipif(sys.platform != "linux", reason="kills a process at a chosen moment")
def test_atomic_write_that_is_killed_leaves_only_a_partial_that_can_be_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_bytes(b"before")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file")], check=False)
    assert ended.returncode == -9
    assert (tmp_path / "file").read_bytes() == b"before"
    assert len(os.listdir(tmp_path)) == 2
    remove_partials(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_remove_partials_leaves_all_other_files(tmp_path: Path) -> None:
    others = {
        "a.partial",
        ".a.partial",
        ".a.12345678.partial",
        ".a.0123456789abcdef.partial.x",
        "x.a.0123456789abcdef.partial",
    }
    for name in others:
        (tmp_path / name).touch()
    (tmp_path / ".d.0123456789abcdef.partial").mkdir()
    (tmp_path / ".a.b.0123456789abcdef.partial").touch()
    remove_partials(tmp_path)
    assert set(os.listdir(tmp_path)) == others | {".d.0123456789abcdef.partial"}
    remove_partials(tmp_path / "missing")
