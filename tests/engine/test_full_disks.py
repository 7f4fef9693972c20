from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import assert_same_runs, at_moment, latest_step, resume, resume_or_begin, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the disk was too full for after its first epoch."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with at_moment("checkpoint half", 4, fill):
        assert train(folder) == 2
    assert latest_step(folder) == 6
    return folder


def fill() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def told(capture: pytest.CaptureFixture[str], path: Path | str, reason: str) -> None:
    """See that one line on stderr, and nothing else, names a file and says what was wrong."""
    output = capture.readouterr()
    assert output.out == ""
    assert re.fullmatch(r"equipoise: error: .*\n", output.err), output.err
    assert str(path) in output.err
    assert reason in output.err


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.partial")]


def test_full_disk_is_told_in_a_line_and_loses_nothing(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    # One run lives through all of these: the file, how many of its name are written before, and the
    # last checkpoint afterwards.
    for name, stage, number, step in (
        ("config.toml", "open", 1, None),
        ("config.toml", "half", 1, None),
        ("config.toml", "synced", 1, None),
        ("environment.json", "half", 1, None),
        ("checkpoint", "open", 1, None),
        ("checkpoint", "half", 2, 4),
        ("model.safetensors", "open", 1, 6),
        ("model.safetensors", "written", 1, 6),
        ("checkpoint", "written", 3, 8),
        ("checkpoint", "synced", 3, 12),
        ("model.safetensors", "half", 1, 18),
        ("checkpoint", "half", 1, 18),
        ("summary.json", "half", 1, 18),
        ("report.html", "synced", 1, 18),
    ):
        with at_moment(f"{name} {stage}", number, fill):
            assert resume_or_begin(folder) == 2
        told(capsys, folder if name == "checkpoint" else folder / name, "No space left on device")
        assert latest_step(folder) == step
        assert left_over(folder) == []
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_checkpoint_that_outgrows_the_limit_leaves_the_last_one(
    whole: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    files = {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()}
    with largest_file(100_000):
        assert resume(folder) == 2
    told(capsys, folder / "checkpoints" / "step-000000008.safetensors", "File too large")
    assert {path: path.read_bytes() for path in (folder / "checkpoints").iterdir()} == files
    assert resume(folder) == 0
    assert_same_runs(folder, whole)


def test_log_that_outgrows_the_limit_is_named_and_cut_back(
    whole: Path, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    log = folder / "metrics.jsonl"
    lines = log.read_bytes().split(b"\n")
    kept = next(
        number for number, line in enumerate(lines, 1) if json.loads(line)["kind"] == "epoch"
    )
    size = sum(len(line) + 1 for line in lines[:kept])
    with largest_file(size + 100):
        assert resume(folder) == 2
    told(capsys, log, "File too large")
    assert log.stat().st_size == size + 100  # a part of the line was written
    assert latest_step(folder) == 6
    assert resume(folder) == 0
    assert_same_runs(folder, whole)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk, or mounts it again with other options."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no command mount")
        if done.returncode:
            pytest.skip(f"disks may not be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
def test_small_disk_is_told_and_the_run_goes_on_when_it_is_larger(
    whole: Path, disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # Three files of 4096 bytes, weights of 48 kB and two checkpoints of 176 kB are there when a
    # third is written.
    folder = disk("size=500k") / "run"
    assert train(folder) == 2
    told(capsys, folder / "checkpoints" / "step-000000006.safetensors", "No space left on device")
    assert latest_step(folder) == 6
    assert left_over(folder) == []
    assert resume(folder) == 2
    told(capsys, folder / "checkpoints" / "step-000000006.safetensors", "No space left on device")
    assert latest_step(folder) == 6
    disk("remount,size=2m")
    assert resume(folder) == 0
    assert_same_runs(folder, whole)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk")
def test_disk_that_is_read_only_is_told_and_left_alone(
    whole: Path, stopped: Path, disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = disk("size=2m") / "run"
    shutil.copytree(stopped, folder)
    disk("remount,ro")
    assert train(folder.with_name("new")) == 2
    told(capsys, folder.with_name("new"), "Read-only file system")
    assert resume(folder) == 2
    told(capsys, folder / "run.lock", "Read-only file system")
    disk("remount,rw")
    assert resume(folder) == 0
    assert_same_runs(folder, whole)


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind the superuser"
)
def test_folder_without_permission_to_write_is_told(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(stopped, tmp_path / "run")
    for path in (folder, folder / "checkpoints"):
        path.chmod(0o555)
    try:
        assert train(folder / "new") == 2
        told(capsys, folder / "new", "Permission denied")
        assert resume(folder) == 2
        told(capsys, folder, "Permission denied")
        assert latest_step(folder) == 6
    finally:
        for path in (folder, folder / "checkpoints"):
            path.chmod(0o755)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "must be a folder; it is a file"),
        ("file/run", "Not a directory"),
        ("file/deep/run", "Not a directory"),
        ("full/run", "must be new or empty; it holds other files"),
        ("/proc/run", "No such file or directory"),
        ("x" * 300, "File name too long"),
    ],
    ids=["file", "parent", "ancestor", "other files", "proc", "long"],
)
def test_place_that_cannot_hold_a_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full" / "run").mkdir(parents=True)
    (tmp_path / "full" / "run" / "notes.txt").write_text("kept")
    folder = tmp_path / place
    assert train(folder) == 2
    told(capsys, folder, reason)
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "full" / "run" / "notes.txt").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "notes.txt", "run"]
