"""Samples read by workers: the same as without them, whatever happens to these."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from equipoise.core import SettingError
from equipoise.data import (
    BadSamples,
    BadSampleWarning,
    DataError,
    Dataset,
    LoaderWarning,
    Loading,
    PadCropFlip,
    batches,
    loader,
)

COUNT = 53
fork_only = pytest.mark.skipif(
    multiprocessing.get_start_method() != "fork", reason="workers that are not worth a start"
)


@dataclass(frozen=True)
class Numbered:
    """Images full of their own number, of which some cannot be read, and who read them."""

    bad: tuple[int, ...] = ()
    folder: Path | None = None

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.folder is not None:
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(f"{index}\n")
        if index in self.bad:
            raise DataError(str(index), "is bad")
        return torch.full((1, 4, 4), index, dtype=torch.uint8), torch.tensor(index)


def numbered(bad: tuple[int, ...] = (), folder: Path | None = None) -> Dataset:
    classes = tuple(map(str, range(COUNT)))
    files = tuple((Path(name),) for name in classes)
    return Dataset(
        "numbers",
        "train",
        "classification",
        classes,
        (1, 4, 4),
        sample=Numbered(bad, folder),
        count=COUNT,
        files=files,
    )


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loader, "_cores", lambda: 2)
    yield
    assert not multiprocessing.active_children()


def load(dataset: Dataset, loading: Loading | None, **options: object) -> list[list[int]]:
    transform = PadCropFlip(1)
    found = batches(dataset, 8, 3, 1, transform=transform, loading=loading, **options)  # type: ignore[arg-type]
    return [torch.cat([x.flatten(), y]).tolist() for x, y in found]


@fork_only
@pytest.mark.parametrize("options", [{}, {"start": 2}, {"rank": 1, "world": 2}, {"shuffle": False}])
def test_batches_are_the_same_whatever_the_number_of_workers(tmp_path, options, monkeypatch):
    monkeypatch.setattr(loader, "MIN_FORKED", 1)
    expected = load(numbered(), None, **options)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for workers, memory in ((0, 0), (0, 2**20), (1, 0), (2, 0), (2, 2**20)):
        loading = Loading(workers, memory)
        dataset = numbered(folder=tmp_path)
        assert load(dataset, loading, **options) == expected
        assert load(dataset, loading, **options) == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert len(os.listdir(tmp_path)) == 1 + 2 * (1 + 2) + 2  # this one, and new workers each time


def test_loading_keeps_what_fits_and_reads_it_once(tmp_path):
    dataset = numbered(folder=tmp_path)
    size = COUNT * (16 + 8)

    def reads() -> int:
        return sum(len(file.read_text().split()) for file in tmp_path.iterdir())

    load(dataset, loading := Loading(memory=size))
    load(dataset, loading)
    assert reads() == COUNT
    other = numbered(folder=tmp_path)  # for which nothing is left
    load(other, loading)
    load(other, loading)
    assert reads() == 3 * COUNT
    load(dataset, loading := Loading(memory=size - 1))
    load(dataset, loading)
    assert reads() == 5 * COUNT


@fork_only
def test_workers_leave_bad_samples_to_the_main_process():
    bad = (4, 5, 40)
    with pytest.raises(DataError, match="4: is bad"):
        load(numbered(bad), Loading(2), shuffle=False)
    for options in ({}, {"shuffle": False}):
        found = []
        for loading in (None, Loading(2), Loading(2, 2**20)):
            notes = BadSamples()
            dataset = replace(numbered(bad), bad=notes)
            with pytest.warns(BadSampleWarning) as told:
                found.append(load(dataset, loading, **options))
            assert load(dataset, loading, **options) == found[-1]
            assert len(told) == len(notes) == 3
        assert found[0] == found[1] == found[2]


@fork_only
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_worker_has_its_work_done_again(number, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(torch.utils.data.dataloader._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(loader, "MAX_CHUNK", 1)
    expected = [y.tolist() for _, y in batches(numbered(), 8)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with closing(batches(numbered(), 8, loading=Loading(1))) as found:
            first = next(found)[1].tolist()
            (worker,) = multiprocessing.active_children()
            while signal.SIGTERM not in _ignored(worker.pid):  # until it is ready
                time.sleep(0.01)
            os.kill(worker.pid, number)
            assert [first, *(y.tolist() for _, y in found)] == expected
    killed = number == signal.SIGKILL  # others are for the main process
    assert [str(each.message) for each in told] == killed * [
        "a process that reads samples ahead was ended from outside; this process reads them"
    ]
    assert all(each.category is LoaderWarning for each in told)


def _ignored(process: int | None) -> set[int]:
    if sys.platform != "linux":
        return {signal.SIGTERM}
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigIgn")), 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


SCRIPT = """
import multiprocessing, os, sys, time
from pathlib import Path
import torch
from equipoise.data import Loading, batches, load_data, loader

loader.MIN_SPAWNED, loader._cores = 1, lambda: 1
if sys.argv[2] != "none":
    multiprocessing.set_start_method(sys.argv[2])
print("begins")
data = load_data("image-folder", "train", sys.argv[1], size=(4, 4))
found = batches(data, 8, shuffle=False, loading=Loading(1))
print(sum(int(x.sum()) for x, _ in found))
rest = batches(data, 8, shuffle=False, loading=Loading(1))
next(rest)
print(multiprocessing.active_children()[0].pid, flush=True)
if sys.argv[2] == "none":
    time.sleep(60)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    (tmp_path / "train" / "one").mkdir(parents=True)
    for i in range(40):
        Image.new("RGB", (4, 4), (i, 1, 0)).save(tmp_path / "train" / "one" / f"{i:02}.png")
    return tmp_path


def script(images: Path, method: str) -> subprocess.Popen[str]:
    path = images / "script.py"
    path.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, path, images, method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_spawned_workers_do_not_run_the_script_again(images):
    with script(images, "spawn") as process:
        out, err = process.communicate(timeout=100)
    total = sum(16 * (i + 1) for i in range(40))
    assert err == ""
    assert out.splitlines()[:2] == ["begins", str(total)]
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_a_killed_process(images):
    with script(images, "none") as process:
        assert process.stdout is not None
        *_, worker = (process.stdout.readline().strip() for _ in range(3))
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while Path("/proc", worker).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path("/proc", worker).exists()


def test_loading_refuses_settings_that_make_no_sense():
    for options in ({"workers": -1}, {"workers": 2000}, {"memory": -1}):
        with pytest.raises(SettingError, match=r"Loading\.\w+ must be"):
            Loading(**options)
