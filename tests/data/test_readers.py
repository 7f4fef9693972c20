from __future__ import annotations

import gzip
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from published import (
    WRITERS,
    cifar_binary,
    cifar_content,
    cifar_pickle,
    joined,
    save_image,
    tar_bytes,
    write_camvid,
    write_folder,
    write_idx,
    write_svhn,
)
from torch.utils.data import DataLoader

from equipoise.core import SettingError
from equipoise.data import DATASETS, DataError, Dataset, list_data, load_data
from equipoise.data.errors import TableWarning
from equipoise.data.image import find_other_size, read_image
from equipoise.data.image_depth import ImageWarning
from equipoise.data.svhn import read_mat

CASES = [(name, split) for name in DATASETS for split in DATASETS[name].splits]


def test_registry_every_reader_has_a_writer_of_test_files() -> None:
    assert sorted(WRITERS) == sorted(DATASETS) == sorted(list_data())
    assert all(
        DATASETS[name].name == name and text.endswith(".") for name, text in list_data().items()
    )


@pytest.mark.parametrize(("name", "split"), CASES)
def test_reader_returns_what_was_written(name: str, split: str, tmp_path: Path) -> None:
    x, y = WRITERS[name](tmp_path, split)
    dataset = load_data(name, split, root=tmp_path)
    assert (dataset.name, dataset.split, len(dataset)) == (name, split, len(x))
    assert dataset.shape == x.shape[1:]
    whole = dataset.in_memory()
    assert whole.x is not None
    assert whole.y is not None
    numbers = dataset.task == "regression"
    assert whole.y.dtype == (torch.float32 if numbers else torch.int64)
    assert whole.x.dtype in (torch.uint8, torch.float32, torch.int64)
    np.testing.assert_array_equal(whole.x.numpy(), x.astype(whole.x.numpy().dtype))
    np.testing.assert_array_equal(whole.y.numpy(), y)
    counted = whole.y[whole.y != dataset.ignore] if dataset.ignore is not None else whole.y
    assert numbers or 0 <= int(counted.min()) <= int(counted.max()) < max(1, len(dataset.classes))
    one, target = dataset[-1]
    assert torch.equal(one, whole.x[-1])
    assert torch.equal(target, whole.y[-1])
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert f"{name} {split}: {len(x)} samples" in repr(dataset)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_reader_feeds_a_data_loader_and_survives_pickling(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path, "train")
    dataset = pickle.loads(pickle.dumps(load_data(name, root=tmp_path)))
    x, y = next(iter(DataLoader(dataset, batch_size=2)))
    for i in range(2):
        assert torch.equal(x[i], dataset[i][0])
        assert torch.equal(y[i], dataset[i][1])


@pytest.mark.parametrize("name", [name for name in sorted(DATASETS) if not DATASETS[name].bundled])
def test_reader_says_which_files_to_put_where(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"{tmp_path}.*: {name} needs .* in this folder.*; put it there"
    ) as caught:
        load_data(name, root=tmp_path / "absent")
    assert "\n" not in str(caught.value)
    assert ("download=True" in str(caught.value)) == bool(DATASETS[name].downloads)


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_reader_refuses_unknown_splits_and_options(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"load_data.split of .* must be one of .*; got 'tset'. Did you mean 'test'\?",
    ):
        load_data(name, "tset", root=tmp_path)
    with pytest.raises(ValueError, match="option"):
        load_data(name, root=tmp_path, colour="red")


def test_load_data_suggests_the_nearest_name() -> None:
    with pytest.raises(
        ValueError, match=r"dataset must be one of .*; got 'minst'. Did you mean 'mnist'\?"
    ):
        load_data("minst")


def test_load_data_uses_the_environment_for_its_default_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    write_idx(tmp_path / "mnist", "train")
    assert len(load_data("mnist")) == 5
    with pytest.raises(ValueError, match=r"load_data.root must be given for 'csv'"):
        load_data("csv")


def test_data_package_imports_nothing_optional() -> None:
    code = (
        "import sys, equipoise.data; print(sorted({'PIL', 'sklearn', 'scipy'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_idx_reader_reads_plain_files(tmp_path: Path) -> None:
    x, _ = write_idx(tmp_path, "test", packed=False)
    np.testing.assert_array_equal(load_data("mnist", "test", root=tmp_path).x, x)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("split", ["train", "test"])
def test_cifar_reader_reads_pickles_of_every_protocol(
    protocol: int, split: str, tmp_path: Path
) -> None:
    content = cifar_content(split)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name, pair in content.items():
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(
            cifar_pickle(*pair, protocol=protocol)
        )
    dataset = load_data("cifar10", split, root=tmp_path)
    for found, expected in zip((dataset.x, dataset.y), joined(content), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_cifar_reader_reads_a_pickle_of_python_2(tmp_path: Path) -> None:
    # Laid out by hand as Python 2 wrote it: byte strings throughout, and numpy's old module names.
    rows = bytes(range(256)) * 12
    stream = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T\x00\x0c\x00\x00" + rows + b"tbU\x06labelsq\x08]q\x09K\x07au."
    )
    assert pickle.loads(stream, encoding="latin1")["labels"] == [7]  # our own bytes
    (tmp_path / "test_batch").write_bytes(stream)
    dataset = load_data("cifar10", "test", root=tmp_path)
    assert dataset.x is not None
    assert dataset.x.flatten().tolist() == list(rows)
    assert dataset.y.tolist() == [7]


@pytest.mark.parametrize(
    ("folder", "suffix", "archive"),
    [("cifar-10-batches-bin", ".bin", "binary"), ("cifar-10-batches-py", "", "python")],
)
def test_cifar_reader_reads_archives_without_unpacking_them(
    folder: str, suffix: str, archive: str, tmp_path: Path
) -> None:
    content = cifar_content("train")
    write = cifar_binary if suffix else cifar_pickle
    members = {f"{folder}/{name}{suffix}": write(*content[name]) for name in reversed(content)}
    path = tmp_path / f"cifar-10-{archive}.tar.gz"
    path.write_bytes(tar_bytes({"cifar-10-batches-bin/readme.html": b"<html>", **members}))
    dataset = load_data("cifar10", root=tmp_path)
    np.testing.assert_array_equal(dataset.x, joined(content)[0])
    np.testing.assert_array_equal(dataset.y, joined(content)[1])
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "f4", "f8"])
def test_read_mat_agrees_with_scipy(packed: bool, dtype: str, tmp_path: Path) -> None:
    from scipy.io import loadmat, savemat

    values = np.random.default_rng(0).integers(0, 100, (2, 3, 4)).astype(dtype)
    savemat(
        tmp_path / "a.mat",
        {"first": "text", "a": values, "long_name_of_one": np.float64(3)},
        do_compression=packed,
    )
    found, expected = (
        read_mat(tmp_path / "a.mat", "a", "long_name_of_one"),
        loadmat(tmp_path / "a.mat"),
    )
    np.testing.assert_array_equal(found["a"], expected["a"])
    np.testing.assert_array_equal(found["long_name_of_one"], expected["long_name_of_one"])


def test_svhn_reader_reads_unpacked_files_with_labels_in_floats(tmp_path: Path) -> None:
    x, y = write_svhn(tmp_path, "test", packed=False)
    dataset = load_data("svhn", "test", root=tmp_path)
    np.testing.assert_array_equal(dataset.x, x)
    np.testing.assert_array_equal(dataset.y, y)


def test_image_folder_numbers_classes_as_in_training(tmp_path: Path) -> None:
    write_folder(tmp_path, "train")
    save_image(tmp_path / "val" / "bee" / "0.jpg", np.zeros((4, 4, 3)))
    dataset = load_data("image-folder", "val", root=tmp_path)
    assert dataset.classes == ("ape", "bee")
    assert dataset[0][1] == 1


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "CMYK"])
def test_image_folder_makes_three_channels_of_every_mode(mode: str, tmp_path: Path) -> None:
    (tmp_path / "train" / "a").mkdir(parents=True)
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (4, 3), (255, 255, 255)).convert(mode).save(
        tmp_path / "train" / "a" / f"0.{suffix}"
    )
    x, _ = load_data("image-folder", root=tmp_path)[0]
    assert x.shape == (3, 3, 4)
    assert x.min() >= 254


def test_images_are_read_as_a_viewer_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "a.png"

    def red(image: Image.Image, **options: object) -> list[list[int]]:
        image.save(path, **options)
        return read_image(path)[0].tolist()

    grey = np.array([[0, 257, 40000, 65535]], np.uint16)
    assert red(Image.fromarray(grey)) == [[0, 1, 156, 255]]
    Image.fromarray(grey.astype(np.int32)).save(tmp_path / "a.pgm")
    assert read_image(tmp_path / "a.pgm")[0].tolist() == [[0, 1, 156, 255]]
    # Transparent, half transparent and opaque pixels of 100 on white.
    for mode, colour in (("RGBA", [100, 100, 100]), ("LA", [100])):
        pixels = np.array([[[*colour, alpha] for alpha in (0, 51, 255)]], np.uint8)
        assert red(Image.fromarray(pixels, mode)) == [[255, 224, 100]]
    byte = Image.fromarray(np.array([[7, 9, 11]], np.uint8))
    assert red(byte, transparency=9) == [[7, 255, 11]]
    palette = byte.convert("P")
    assert red(palette, transparency=11) == [[7, 9, 255]]
    for turn, expected in ((3, [[11, 9, 7]]), (6, [[7], [9], [11]]), (8, [[11], [9], [7]])):
        exif = Image.Exif()
        exif[274] = turn
        assert red(byte, exif=exif) == expected
    exif[274] = 8
    upright = tmp_path / "b.png"
    Image.new("L", (1, 3)).save(upright)
    assert find_other_size([path, upright]) is None
    path.write_bytes(b"Pf\n1 1\n-1.0\n" + np.float32(0.5).tobytes())
    with pytest.raises(DataError, match="floating-point numbers, whose range is not known"):
        read_image(path)


def test_image_folder_brings_images_to_one_size(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3))
    pixels[:, 8:22] = 200  # what a central crop keeps, and what the filter reaches beyond it
    save_image(tmp_path / "train" / "a" / "0.png", pixels)
    save_image(tmp_path / "train" / "a" / "1.png", pixels.transpose(1, 0, 2))
    dataset = load_data("image-folder", root=tmp_path, size=(5, 5))
    assert dataset.shape == (3, 5, 5)
    assert (dataset.in_memory().x == 200).all()
    with pytest.raises(ValueError, match=r"must have samples of one shape; .* Load it with size="):
        load_data("image-folder", root=tmp_path).in_memory()
    with pytest.raises(ValueError, match=r"ImageFolder.size must be a pair"):
        load_data("image-folder", root=tmp_path, size=5)


def test_camvid_reader_resizes_masks_without_mixing_classes(tmp_path: Path) -> None:
    write_camvid(tmp_path, "train")
    whole = load_data("camvid", root=tmp_path, size=(9, 11)).in_memory()
    assert whole.x.shape == (2, 3, 9, 11)
    assert whole.y.shape == (2, 9, 11)
    assert set(whole.y.flatten().tolist()) <= {*range(11), 255}


def test_csv_reader_finds_the_label_by_name_and_takes_files_without_titles(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("\ufeffkind,a,b\r\n1,2.5,-3e2\r\n\r\n0, 4,5\r\n", encoding="utf-8")
    table = load_data("csv", root=tmp_path, label="kind")
    assert (table.x.tolist(), table.y.tolist()) == ([[2.5, -300], [4, 5]], [1, 0])
    assert table.columns == ("a", "b")
    path.write_text("1,2,3\n4,5,6\n")
    table = load_data("csv", root=path)  # a single file
    assert (table.y.tolist(), table.classes) == ([0, 1], ("3", "6"))
    assert table.columns == ()


@pytest.mark.parametrize("titles", ["size,kind\n", ""])
def test_csv_reader_numbers_texts_as_in_training(titles: str, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(titles + "1,cow\n2,ape\n3, bee\n")
    (tmp_path / "test.csv").write_text(titles + "4,cow\n5,bee\n")
    train, test = (load_data("csv", split, tmp_path) for split in ("train", "test"))
    assert train.classes == test.classes == ("ape", "bee", "cow")
    assert (train.y.tolist(), test.y.tolist()) == ([2, 0, 1], [2, 1])
    assert train.columns == (("size",) if titles else ())
    (tmp_path / "test.csv").write_text(titles + "4,emu\n")
    with pytest.raises(DataError, match=r"'emu', a label that the training file does not have"):
        load_data("csv", "test", tmp_path)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ("90210 10001 90210", ("10001", "90210")),
        ("3 7.0 7", ("3", "7")),
        ("-1 1 1", ("-1", "1")),
        ("1 01 1", ("01", "1")),
        ("1 10 9", ("1", "9", "10")),
        ("1 other 2", ("1", "2", "other")),
        ("a nan b", ("a", "b", "nan")),
        ("1.0 0 2", ("0", "1", "2")),
    ],
)
def test_csv_classes_are_the_labels_of_the_training_file(
    labels: str, classes: tuple[str, ...], tmp_path: Path
) -> None:
    rows = labels.split()
    (tmp_path / "train.csv").write_text("a,y\n" + "".join(f"1,{label}\n" for label in rows))
    (tmp_path / "test.csv").write_text(f"a,y\n1,{rows[1]}\n")
    train, test = (load_data("csv", split, tmp_path) for split in ("train", "test"))
    assert train.classes == test.classes == classes
    expected = [classes.index(label.removesuffix(".0")) for label in rows]
    assert (train.y.tolist(), test.y.tolist()) == (expected, expected[1:2])
    (tmp_path / "test.csv").write_text("a,y\n1,5\n")
    with pytest.raises(DataError, match=r"row 2.* is '5', a label that the training file does not"):
        load_data("csv", "test", tmp_path)
    (tmp_path / "train.csv").unlink()  # what a trained model knows stands in for it
    (tmp_path / "test.csv").write_text(f"a,y\n1,{rows[1]}\n")
    assert load_data("csv", "test", tmp_path, labels=classes).y.tolist() == expected[1:2]


def test_csv_reader_orders_columns_as_in_training_and_knows_numeric_titles(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("2019,2020,y\n1,2,no\n3,4,yes\n5,6,no\n7,8,yes\n")
    (tmp_path / "test.csv").write_text("y,2020,2019\nyes,20,10\n")
    with pytest.warns(TableWarning, match="since 'y' is the only label that occurs once"):
        train, test = (load_data("csv", split, tmp_path) for split in ("train", "test"))
    assert train.classes == test.classes == ("no", "yes")
    assert train.columns == test.columns == ("2019", "2020")
    assert train.x[0].tolist() == [1, 2]
    assert (test.x.tolist(), test.y.tolist()) == ([[10, 20]], [1])
    (tmp_path / "test.csv").write_text("2019,2020,y\n10,20,yes\n")
    assert load_data("csv", "test", tmp_path, header=True).x.tolist() == [[10, 20]]
    rows = load_data("csv", root=tmp_path, header=False)
    assert rows.classes == ("no", "y", "yes")
    with pytest.raises(DataError, match="'y' both as a feature and as the label"):
        load_data("csv", root=tmp_path, columns=("2019", "y"), header=True)


def test_csv_reader_warns_of_digits_that_float32_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    rows = [f"{1_700_000_000 + i},0.1,{1e30 * i},{i % 2}" for i in range(4)]
    path.write_text("\n".join(["time,constant,large,y", *rows]))
    with pytest.warns(TableWarning, match=r"column 'time' varies by 1\.12 and is rounded by up to"):
        load_data("csv", root=path)
    load_data("csv", root=path, columns=("constant", "large"))  # warnings are errors
    with pytest.warns(TableWarning, match="'time'"):
        load_data("csv", root=path, targets=("time",), columns=("large",))


def test_csv_reader_takes_targets_and_columns_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("id,a,price,b,age\nx,1,2.5,3,40\ny,4,5.5,6,50\n")
    table = load_data("csv", root=tmp_path, targets=("age", "price"), columns=("b", "a"))
    assert table.task == "regression"
    assert table.classes == ("age", "price")
    assert table.columns == ("b", "a")
    assert table.x.tolist() == [[3, 1], [6, 4]]
    assert table.y.tolist() == [[40, 2.5], [50, 5.5]]
    for options, reason in (
        ({"targets": ("age", "size")}, "has no column 'size'; its columns are id, a, price"),
        ({"targets": ("age",)}, "column 'id' has 2 different texts in 2 rows, which are hardly"),
        ({"targets": "age"}, "CSV.targets must be a list of names of columns"),
        ({"targets": ("age",), "label": "a"}, "CSV.targets must be left out where"),
        ({"targets": ("age",), "columns": ("age",)}, "CSV.columns must not name what"),
        ({"label": "price", "columns": ("a",)}, "to predict numbers, name the column in targets"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            load_data("csv", root=tmp_path, **options)


def test_table_readers_take_the_number_of_classes(tmp_path: Path) -> None:
    WRITERS["npz"](tmp_path, "train")
    assert load_data("npz", root=tmp_path).classes == ("0", "1", "2")
    assert len(load_data("npz", root=tmp_path, classes=7).classes) == 7
    np.savez(tmp_path / "train.npz", x=np.ones((3, 2)), y=[1, 1, 1])
    with pytest.raises(DataError, match="labels up to 1, but none is 0; number the classes from 0"):
        load_data("npz", root=tmp_path)
    assert load_data("npz", root=tmp_path, classes=2).classes == ("0", "1")


def test_digits_split_is_stratified_and_covers_all() -> None:
    train, test = load_data("digits"), load_data("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    for label in range(10):
        count = int((test.y == label).sum())
        assert abs(count / (count + int((train.y == label).sum())) - 0.2) < 0.01
    assert train.x.min() == 0
    assert train.x.max() == 1


def test_gzip_of_several_members_is_read_whole(tmp_path: Path) -> None:
    x, _ = write_idx(tmp_path, "train", packed=False)
    for path in list(tmp_path.iterdir()):
        data = path.read_bytes()
        path.with_name(f"{path.name}.gz").write_bytes(
            gzip.compress(data[:9]) + gzip.compress(data[9:])
        )
        path.unlink()
    np.testing.assert_array_equal(load_data("mnist", root=tmp_path).x, x)


def test_data_set_gives_some_of_its_samples_and_classes():
    data = load_data("digits", "test")
    subset = data.select_rows([5, 2])
    assert torch.equal(subset.x, data.x[[5, 2]])
    assert subset.y.tolist() == [int(data.y[5]), int(data.y[2])]
    single = replace(
        data, x=None, y=None, sample=lambda i: (data.x[i], data.y[i]), count=len(data)
    ).select_rows([7])
    assert len(single) == 1
    assert torch.equal(single[0][0], data.x[7])
    two = data.select_classes([8, 3])
    assert two.classes == ("8", "3")
    assert torch.equal(two.x[two.y == 0], data.x[data.y == 8])
    assert torch.equal(two.x[two.y == 1], data.x[data.y == 3])
    assert data.about() == {
        "name": "digits",
        "task": "classification",
        "classes": tuple("0123456789"),
        "shape": (1, 8, 8),
        "ignore": None,
        "columns": (),
        "tokens": None,
        "value_range": (0.0, 1.0),
    }
    assert replace(data, x=255 * data.x - 9).about()["value_range"] == (-9.0, 246.0)
    assert replace(data, x=data.x.byte()).about()["value_range"] == (0.0, 1.0)


def test_numpy_targets_are_numbers_to_predict(tmp_path: Path) -> None:
    x, y = np.ones((4, 3)), np.linspace(0, 1, 8).reshape(4, 2)
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.save(tmp_path / "train_x.npy", x)
    np.save(tmp_path / "train_y.npy", y[:, 0])
    both = load_data("npz", root=tmp_path, targets=True)
    assert (both.task, both.classes, both.shape) == ("regression", ("y0", "y1"), (3,))
    assert torch.equal(both.y, torch.from_numpy(y).float())
    one = load_data("npy", root=tmp_path, targets=True)
    assert one.classes == ("y",)
    assert torch.equal(one.y, both.y[:, :1])
    with pytest.raises(DataError, match=r"label 0\.28.*targets=true"):
        load_data("npy", root=tmp_path)
    np.save(tmp_path / "train_y.npy", y[:3])
    with pytest.raises(DataError, match=r"for each of 4 rows; got shape \(3, 2\)"):
        load_data("npy", root=tmp_path, targets=True)
    np.save(tmp_path / "train_y.npy", np.full(4, np.nan))
    with pytest.raises(DataError, match="row 1, column 1 is not a finite number"):
        load_data("npy", root=tmp_path, targets=True)


@pytest.mark.parametrize(
    ("found", "got"),
    [((torch.zeros(2), 1), r"\(Tensor, int\)"), (torch.zeros(2), "Tensor"), (None, "NoneType")],
)
def test_sample_that_is_no_pair_of_tensors_is_told_by_its_number(found: Any, got: str) -> None:
    dataset = Dataset("own", "test", "arrays", ("a", "b"), (2,), sample=lambda _: found, count=3)
    reason = rf"Sample 1 of 'own' test must be a pair of tensors, .*; got {got}\. Let `sample`"
    with pytest.raises(SettingError, match=reason):
        dataset.gather([1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(3, 2), (3, 1, 2, 2)])
def test_half_precision_is_read_without_a_warning_and_its_infinity_is_refused(tmp_path, shape):
    x = np.full(shape, 60000, np.float16)
    np.savez(tmp_path / "train.npz", x=x, y=[0, 1, 0])
    assert float(load_data("npz", root=tmp_path).x.max()) == 60000
    x[1] = np.inf
    np.savez(tmp_path / "train.npz", x=x, y=[0, 1, 0])
    with pytest.raises(DataError, match=r"row 2, .* is not a finite number"):
        load_data("npz", root=tmp_path)


def test_images_of_whole_numbers_that_are_no_bytes_are_told(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.full((2, 1, 3, 3), 200), y=[0, 1])
    with pytest.warns(ImageWarning, match="holds images of int64, which are taken as they are"):
        assert float(load_data("npz", root=tmp_path).x.max()) == 200
