"""MNIST and Fashion-MNIST: IDX files, compressed or not."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.data.bounded_io import (
    check_labels,
    count_entries,
    find_file,
    open_file,
    read_exactly,
    require_room,
)
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.fetch import Download
from equipoise.data.reader import DATASETS, Reader

__all__ = ["MNIST", "FashionMNIST", "read_idx"]

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the array of bytes in an IDX file (LeCun, Cortes & Burges, 1998).

    Args:
        path: The file; decompressed if its name ends in `.gz`.
        dimensions: How many the array must have.
    """
    with open_file(path) as stream:
        start = 4 + 4 * dimensions
        header = stream.read(start)
        if header[:4] != bytes((0, 0, 8, dimensions))[: len(header)]:
            raise DataError(
                path,
                f"is not an IDX file of bytes with {dimensions} dimensions (it starts with "
                f"{header[:4].hex()})",
            )
        if len(header) < start:
            raise DataError(path, "is truncated in its header")
        shape = struct.unpack(f">{dimensions}I", header[4:])
        need = count_entries(shape)
        require_room(path, need, path.stat().st_size, packed=path.suffix == ".gz")
        values = read_exactly(path, stream, need)
        if stream.read(1):
            raise DataError(path, f"holds more than the {need} bytes that its header declares")
    if not need:
        raise DataError(path, f"holds no samples: its shape is {'x'.join(map(str, shape))}")
    return values.reshape(shape)


@dataclass(frozen=True)
class _IDX(Reader):
    labels: ClassVar[tuple[str, ...]]

    def read(self, folder: Path, split: str) -> Dataset:
        paths = [find_file(folder, name, f"{name}.gz") for name in _FILES[split]]
        images, labels = paths
        if images is None or labels is None:
            absent = [
                f"{name}.gz"
                for name, path in zip(_FILES[split], paths, strict=True)
                if path is None
            ]
            raise self.missing(folder, *absent)
        x = torch.from_numpy(read_idx(images, 3))[:, None]
        y = check_labels(labels, read_idx(labels, 1), len(self.labels), rows=len(x))
        return Dataset(self.name, split, "classification", self.labels, tuple(x.shape[1:]), x, y)


def _downloads(url: str, files: dict[str, tuple[str, int]]) -> dict[str, tuple[Download, ...]]:
    return {
        split: tuple(
            Download(f"{name}.gz", f"{url}/{name}.gz", f"sha256:{files[name][0]}", files[name][1])
            for name in names
        )
        for split, names in _FILES.items()
    }


@final
@DATASETS.register("mnist")
@dataclass(frozen=True)
class MNIST(_IDX):
    """Handwritten digits (LeCun et al., 1998): 60,000 and 10,000 grey images of 28 x 28."""

    name = "mnist"
    summary = "Handwritten digits, 60,000 + 10,000 grey images of 28 x 28 (IDX files)."
    labels = tuple("0123456789")
    downloads = _downloads(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte": (
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                9912422,
            ),
            "train-labels-idx1-ubyte": (
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                28881,
            ),
            "t10k-images-idx3-ubyte": (
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                1648877,
            ),
            "t10k-labels-idx1-ubyte": (
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                4542,
            ),
        },
    )


@final
@DATASETS.register("fashion-mnist")
@dataclass(frozen=True)
class FashionMNIST(_IDX):
    """Articles of clothing in MNIST's format (Xiao, Rasul & Vollgraf, 2017)."""

    name = "fashion-mnist"
    summary = "Articles of clothing, 60,000 + 10,000 grey images of 28 x 28 (IDX files)."
    labels = (
        "t-shirt",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    )
    downloads = _downloads(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte": (
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                26421880,
            ),
            "train-labels-idx1-ubyte": (
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                29515,
            ),
            "t10k-images-idx3-ubyte": (
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                4422102,
            ),
            "t10k-labels-idx1-ubyte": (
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                5148,
            ),
        },
    )
