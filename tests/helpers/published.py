"""Tiny files in every published format, each with the content that its reader must find."""

from __future__ import annotations

import csv
import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Content = tuple[np.ndarray, np.ndarray]
IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def random_of(split: str) -> np.random.Generator:
    return np.random.default_rng(len(split))


def idx_bytes(array: np.ndarray) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim))
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def write_idx(folder: Path, split: str, packed: bool = True) -> Content:
    random = random_of(split)
    x, y = random.integers(0, 256, (5, 6, 7)), random.integers(0, 10, 5)
    for name, array in zip(IDX[split], (x, y), strict=True):
        data = idx_bytes(array)
        (folder / (f"{name}.gz" if packed else name)).write_bytes(
            gzip.compress(data) if packed else data
        )
    return x[:, None], y


def cifar_names(split: str) -> list[str]:
    return [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]


def cifar_content(split: str, rows: int = 2) -> dict[str, Content]:
    random = random_of(split)
    return {
        name: (
            random.integers(0, 256, (rows, 3, 32, 32)).astype(np.uint8),
            random.integers(0, 10, rows),
        )
        for name in cifar_names(split)
    }


def cifar_binary(x: np.ndarray, y: np.ndarray) -> bytes:
    return np.concatenate([y[:, None].astype(np.uint8), x.reshape(len(x), -1)], axis=1).tobytes()


def cifar_pickle(x: np.ndarray, y: np.ndarray, protocol: int = 2) -> bytes:
    batch = {
        b"data": x.reshape(len(x), -1),
        b"labels": y.tolist(),
        b"batch_label": b"a batch",
        b"filenames": [b"a.png"] * len(x),
    }
    return pickle.dumps(batch, protocol=protocol)


def joined(content: dict[str, Content]) -> Content:
    return np.concatenate([x for x, _ in content.values()]), np.concatenate(
        [y for _, y in content.values()]
    )


def write_cifar(folder: Path, split: str, rows: int = 2) -> Content:
    content = cifar_content(split, rows)
    for name, pair in content.items():
        (folder / f"{name}.bin").write_bytes(cifar_binary(*pair))
    return joined(content)


def tar_bytes(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def write_svhn(folder: Path, split: str, packed: bool = True) -> Content:
    from scipy.io import savemat

    random = random_of(split)
    x = random.integers(0, 256, (12, 3, 32, 32)).astype(np.uint8)
    y = np.arange(12) % 10
    raw = np.where(y == 0, 10, y).astype(np.uint8 if packed else np.float64)[:, None]
    savemat(
        folder / f"{split}_32x32.mat",
        {"other": np.eye(3), "X": x.transpose(2, 3, 1, 0), "y": raw},
        do_compression=packed,
    )
    return x, y


def save_image(path: Path, pixels: np.ndarray, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels.astype(np.uint8))
    if mode == "P":
        palette = Image.new("P", image.size)
        palette.putdata(pixels.flatten().tolist())
        palette.putpalette([value for i in range(256) for value in (i, 0, 255 - i)])
        image = palette
    image.save(path)


def write_folder(folder: Path, split: str) -> Content:
    random = random_of(split)
    x, y = random.integers(0, 256, (4, 3, 5, 6)).astype(np.uint8), np.array([0, 0, 1, 1])
    for i, pixels in enumerate(x):
        save_image(folder / split / ("ape", "bee")[y[i]] / f"{i}.png", pixels.transpose(1, 2, 0))
    (folder / split / "bee" / "notes.txt").write_text("not an image")
    return x, y


def write_camvid(folder: Path, split: str) -> Content:
    random = random_of(split)
    x, mask = (
        random.integers(0, 256, (2, 3, 5, 6)).astype(np.uint8),
        random.integers(0, 12, (2, 5, 6)),
    )
    mask[:, 0, 0] = 11
    for i in range(2):
        save_image(folder / split / f"{i}.png", x[i].transpose(1, 2, 0))
        save_image(folder / f"{split}annot" / f"{i}.png", mask[i], "P" if i else None)
    return x, np.where(mask == 11, 255, mask)


CITY = {
    7: 0,
    8: 1,
    11: 2,
    12: 3,
    13: 4,
    17: 5,
    19: 6,
    20: 7,
    21: 8,
    22: 9,
    23: 10,
    24: 11,
    25: 12,
    26: 13,
    27: 14,
    28: 15,
    31: 16,
    32: 17,
    33: 18,
}


def write_cityscapes(folder: Path, split: str) -> Content:
    random = random_of(split)
    x = random.integers(0, 256, (2, 3, 5, 7)).astype(np.uint8)
    mask = np.stack([np.arange(35), np.arange(35)[::-1]]).reshape(2, 5, 7) % 34
    for i, city in enumerate(("aachen", "bonn")):
        save_image(
            folder / "leftImg8bit" / split / city / f"{city}_0_leftImg8bit.png",
            x[i].transpose(1, 2, 0),
        )
        save_image(folder / "gtFine" / split / city / f"{city}_0_gtFine_labelIds.png", mask[i])
    return x, np.vectorize(lambda value: CITY.get(value, 255))(mask)


def write_images(folder: Path, split: str) -> Content:
    x = random_of(split).integers(0, 256, (3, 3, 5, 7)).astype(np.uint8)
    for i, image in enumerate(x):
        save_image(folder / split / f"{i}.png", image.transpose(1, 2, 0))
    return x, np.zeros(3, dtype=np.int64)


TEXT = {
    "train": "a b a\n c <unk>\n",
    "val": " b zebra \n",
    "test": "c\u2028c\n\na\n",
}  # a blank that is not the end of a line


REPEATED, LENGTH = 50, 64  # by default a sample has 64 words


def write_text(folder: Path, split: str) -> Content:
    for name, file in (
        ("train", "ptb.train.txt"),
        ("val", "ptb.valid.txt"),
        ("test", "ptb.test.txt"),
    ):
        (folder / file).write_text(TEXT[name] * REPEATED, encoding="utf-8")
    # a 0, b 1, <eos> 2, c 3, <unk> 4
    once = {"train": [0, 1, 0, 2, 3, 4, 2], "val": [1, 4, 2], "test": [3, 3, 2, 2, 0, 2]}[split]
    numbers = np.array(once * REPEATED)
    if split == "train":
        rows = (len(numbers) - 1) // LENGTH
        x, y = numbers[: rows * LENGTH], numbers[1 : rows * LENGTH + 1]
    else:  # scored to the end
        rows = -(-(len(numbers) - 1) // LENGTH)
        rest = rows * LENGTH - len(numbers) + 1
        x = np.concatenate([numbers[:-1], np.full(rest, numbers[-1])])
        y = np.concatenate([numbers[1:], np.full(rest, -100)])
    return x.reshape(rows, LENGTH), y.reshape(rows, LENGTH)


def table(split: str) -> Content:
    random = random_of(split)
    return random.normal(size=(6, 3)).astype(np.float32), np.array([0, 2, 1, 1, 0, 2])


def write_csv(folder: Path, split: str) -> Content:
    x, y = table(split)
    with (folder / f"{split}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "kind"])
        writer.writerows(
            [*map(repr, map(float, row)), int(label)] for row, label in zip(x, y, strict=True)
        )
    return x, y


def write_npz(folder: Path, split: str) -> Content:
    x, y = table(split)
    np.savez_compressed(folder / f"{split}.npz", x=np.asfortranarray(x), y=y.astype(np.int32))
    return x, y


def write_npy(folder: Path, split: str) -> Content:
    x, y = table(split)
    np.save(folder / f"{split}_x.npy", x.astype(np.float64))
    np.save(folder / f"{split}_y.npy", y.astype(np.float64)[:, None])
    return x, y


def bundled_rows(labels: np.ndarray, split: str) -> np.ndarray:
    random = np.random.RandomState(0)
    test = np.concatenate(
        [
            (kind := random.permutation(np.where(labels == k)[0]))[: round(len(kind) * 0.2)]
            for k in np.unique(labels)
        ]
    )
    return np.sort(test) if split == "test" else np.setdiff1d(np.arange(len(labels)), test)


def write_digits(_: Path, split: str) -> Content:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = bundled_rows(labels, split)
    return pixels[rows].reshape(-1, 1, 8, 8) / 16, labels[rows]


def bundled(name: str) -> Callable[[Path, str], Content]:
    def write(_: Path, split: str) -> Content:
        from sklearn import datasets

        if name == "load_diabetes":
            x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
            rows = bundled_rows(0 * y, split)
            return x[rows].astype(np.float32), y[rows, None]
        x, y = getattr(datasets, name)(return_X_y=True)
        rows = bundled_rows(y, split)
        return x[rows].astype(np.float32), y[rows]

    return write


def write_sample_text(_: Path, split: str) -> Content:
    import sklearn.datasets

    files = sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst"))
    text = "".join(file.read_text("utf-8") for file in files)
    cut = round(0.9 * len(text))
    known = [*dict.fromkeys(text[:cut]), "<unk>"]
    part = text[:cut] if split == "train" else text[cut:]
    numbers = [known.index(each) if each in known else len(known) - 1 for each in part]
    rows, rest = divmod(len(numbers) - 1, 32)
    if rest and split == "test":
        rows, rest = rows + 1, 32 - rest
        numbers, after = [*numbers[:-1], *[numbers[-1]] * rest], [*numbers[1:], *[-100] * rest]
    else:
        numbers, after = numbers[:-1][: 32 * rows], numbers[1:][: 32 * rows]
    return np.array(numbers).reshape(rows, 32), np.array(after).reshape(rows, 32)


WRITERS: dict[str, Callable[[Path, str], Content]] = {
    "breast-cancer": bundled("load_breast_cancer"),
    "camvid": write_camvid,
    "cifar10": write_cifar,
    "cityscapes": write_cityscapes,
    "csv": write_csv,
    "diabetes": bundled("load_diabetes"),
    "digits": write_digits,
    "fashion-mnist": write_idx,
    "image-folder": write_folder,
    "images": write_images,
    "iris": bundled("load_iris"),
    "mnist": write_idx,
    "npy": write_npy,
    "npz": write_npz,
    "sample-text": write_sample_text,
    "svhn": write_svhn,
    "text": write_text,
    "wine": bundled("load_wine"),
}


class Trap:
    """Writes a file when a careless reader unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)
