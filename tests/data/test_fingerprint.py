from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise.data import Dataset, fingerprint, load_data


def arrays(count: int = 50, width: int = 4) -> Dataset:
    x = torch.arange(count * width, dtype=torch.float32).reshape(count, width)
    y = torch.arange(count) % 3
    return Dataset("made", "train", "arrays", ("a", "b", "c"), (width,), x, y)


@pytest.mark.parametrize("width", [4, 100_000])  # read whole, and in pieces
def test_fingerprint_of_arrays_tells_changed_ones(width):
    data = arrays(width=width)
    assert data.x is not None
    assert data.y is not None
    first = fingerprint(data)
    assert fingerprint(arrays(width=width)) == first
    changed = [
        replace(data, y=data.y.roll(1)),
        replace(data, x=data.x + 1),
        replace(data, x=data.x.double()),
        replace(data, classes=("a", "b", "d")),
        data.select_rows(range(49)),
        data.select_rows([1, 0, *range(2, 50)]),
        replace(data, x=data.x.reshape(50, 2, -1)),
    ]
    assert len({first, *(fingerprint(each) for each in changed)}) == 8


def save(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(4):
            save(tmp_path / "data" / "train" / name / f"{number}.png", 20 * number)
    return tmp_path / "data"


def read(folder: Path) -> Dataset:
    return load_data("image-folder", root=folder)


def test_fingerprint_of_image_folders_tells_changed_ones(folder):
    first = fingerprint(read(folder))
    moved = shutil.copytree(folder, folder.with_name("moved"))
    assert fingerprint(read(moved)) == first  # where they are does not matter
    found = {first, fingerprint(read(folder).select_rows(range(7)))}
    dog = moved / "train" / "dog"
    save(dog / "2.png", 41)  # as long as before
    found.add(fingerprint(read(moved)))
    (dog / "3.png").rename(dog / "4.png")
    found.add(fingerprint(read(moved)))
    (dog / "4.png").rename(moved / "train" / "cat" / "4.png")
    found.add(fingerprint(read(moved)))
    (dog / "0.png").unlink()
    found.add(fingerprint(read(moved)))
    assert len(found) == 6


def test_fingerprint_of_image_folders_opens_few_files(folder, monkeypatch):
    count, opened = 2000, []
    data = replace(read(folder), count=count)
    data = replace(data, files=tuple(data.files[number % 8] for number in range(count)))
    open_file = Path.open

    def listed(path: Path, *rest: str):
        opened.append(path)
        return open_file(path, *rest)

    monkeypatch.setattr(Path, "open", listed)
    fingerprint(data)
    assert 32 <= len(opened) <= 64
