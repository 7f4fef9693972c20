from __future__ import annotations

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from malformed_data import ALL, CASES, GOOD, X, Y, replaced_test_batch
from published import (
    WRITERS,
    Trap,
    cifar_binary,
    save_image,
    tar_bytes,
    write_camvid,
    write_cityscapes,
    write_folder,
    write_idx,
    write_images,
    write_svhn,
)

from equipoise.data import DataError, load_data
from equipoise.data import image as image_module


@pytest.mark.parametrize(("name", "case"), CASES)
def test_malformed_file_gives_one_line_that_names_it(name: str, case: str, tmp_path: Path) -> None:
    split = "test" if name == "cifar10" else "train"
    WRITERS[name](tmp_path, split)
    load_data(name, split, root=tmp_path).in_memory()  # whole before it is damaged
    damage, reason = ALL[name][case]
    damage(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=reason) as caught:
        load_data(name, split, root=tmp_path).in_memory()
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize(
    "wrap",
    [lambda trap: trap, lambda trap: {"data": trap}, lambda trap: {trap: 1}, lambda trap: [[trap]]],
)
def test_pickle_with_code_is_refused_and_never_run(
    protocol: int, wrap: Callable[[Trap], object], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps(wrap(Trap(mark)), protocol=protocol)
    (tmp_path / "test_batch").write_bytes(data)
    with pytest.raises(DataError, match="could run code; it was not run"):
        load_data("cifar10", "test", root=tmp_path)
    assert not mark.exists()
    pickle.loads(data)  # our own bytes
    assert mark.exists(), "the trap must be one that a careless reader falls into"


def test_npz_with_pickled_objects_is_refused_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    np.savez(tmp_path / "train.npz", x=np.array([Trap(mark)] * 3, dtype=object), y=np.arange(3))
    with pytest.raises(DataError, match="could run code"):
        load_data("npz", root=tmp_path)
    assert not mark.exists()
    np.load(tmp_path / "train.npz", allow_pickle=True)["x"]
    assert mark.exists()


def test_unpacked_size_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path, "train")
    monkeypatch.setattr("equipoise.data.bounded_io.MAX_BYTES", 100)
    with pytest.raises(DataError, match="declares 210 bytes; the limit is 100"):
        load_data("mnist", root=tmp_path)


def test_members_of_archives_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(
        tar_bytes({"a/test_batch.bin": cifar_binary(X, Y)})
    )
    assert len(load_data("cifar10", "test", root=tmp_path)) == 2
    monkeypatch.setattr("equipoise.data.cifar._MAX_MEMBER_BYTES", 6000)
    with pytest.raises(DataError, match="of 6146 bytes; the limit is 6000"):
        load_data("cifar10", "test", root=tmp_path)


def test_images_have_a_limit_of_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "train")
    monkeypatch.setattr(image_module, "MAX_PIXELS", 29)
    with pytest.raises(DataError, match="an image of 6 x 5; the limit is 29 pixels"):
        load_data("image-folder", root=tmp_path)


def test_image_folder_refuses_classes_that_training_does_not_have(tmp_path: Path) -> None:
    write_folder(tmp_path, "train")
    save_image(tmp_path / "val" / "cat" / "0.png", np.zeros((4, 4, 3)))
    with pytest.raises(DataError, match=r"cat: is a class that .*train does not have"):
        load_data("image-folder", "val", root=tmp_path)


@pytest.mark.parametrize(
    "write", [write_camvid, write_cityscapes, write_svhn, write_folder, write_images]
)
def test_empty_folder_is_not_a_data_set(
    write: Callable[[Path, str], object], tmp_path: Path
) -> None:
    name = next(key for key, value in WRITERS.items() if value is write)
    for folder in ("train", "trainannot", "leftImg8bit/train", "gtFine/train"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no|needs train_32x32\.mat"):
        load_data(name, root=tmp_path)


@contextmanager
def only(reason: str) -> Iterator[None]:
    """Let other errors than a `ValueError` for this reason through."""
    try:
        yield
    except ValueError as error:
        if reason not in str(error):
            raise


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name",
    ["mnist", "svhn", "cifar10", "npz", "npy", "csv", "image-folder", "images", "camvid", "text"],
)
def test_random_damage_gives_data_errors_or_data(name: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    split = "test" if name == "cifar10" else "train"
    WRITERS[name](tmp_path, split)
    if name == "cifar10" and seed:
        replaced_test_batch(GOOD)(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    originals = {path: path.read_bytes() for path in files}
    for _ in range(60):
        path = files[random.integers(len(files))]
        data = bytearray(originals[path])
        for position in random.integers(0, len(data), random.integers(1, 4)):
            data[position] = random.integers(256)
        path.write_bytes(
            data[: random.integers(1, len(data) + 1)] if random.random() < 0.2 else data
        )
        # Damage may leave sound data, or a sound image of another size.
        with suppress(DataError), only("samples of one shape"):
            load_data(name, split, root=tmp_path).in_memory()
        path.write_bytes(originals[path])
