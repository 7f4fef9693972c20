"""CIFAR-10 as published: the binary version, the pickled one, and the archives of both."""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data.bounded_io import (
    check_labels,
    check_member,
    data_errors_of,
    open_file,
    read_file,
)
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.fetch import Download
from equipoise.data.reader import DATASETS, Reader
from equipoise.data.safe_pickle import read_pickle

__all__ = ["CIFAR10"]

_FILES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_VERSIONS = (
    (".bin", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    ("", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
)
_ROW = 1 + 3 * 32 * 32
_MAX_MEMBERS = 100  # the published archives have nine
_MAX_MEMBER_BYTES = 2**27  # the published ones have 3.1e7
_ARCHIVE = Download(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
    200_000_000,
)


@final
@DATASETS.register("cifar10")
@dataclass(frozen=True)
class CIFAR10(Reader):
    """Ten classes of colour images, 32 x 32 (Krizhevsky, 2009): 50,000 to train, 10,000 to test.

    The files may lie in the folder itself, in the folder that the archive unpacks to, or in the
    archive, which is never unpacked to disk.
    """

    name = "cifar10"
    summary = (
        "Ten kinds of things, 50,000 + 10,000 colour images of 32 x 32 "
        "(binary or pickled batches, or their archive)."
    )
    downloads = {"train": (_ARCHIVE,), "test": (_ARCHIVE,)}  # noqa: RUF012

    def read(self, folder: Path, split: str) -> Dataset:
        classes = (
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        )
        for suffix, inner, archive in _VERSIONS:
            names = [f"{file}{suffix}" for file in _FILES[split]]
            for root in (folder, folder / inner):
                if all((root / name).is_file() for name in names):
                    contents = {str(root / name): read_file(root / name) for name in names}
                    break
            else:
                if not (folder / archive).is_file():
                    continue
                contents = _unpack(folder / archive, names)
            pairs = [
                _binary(path, content) if suffix else _pickled(path, content)
                for path, content in contents.items()
            ]
            x, y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
            return Dataset(self.name, split, "classification", classes, (3, 32, 32), x, y)
        raise self.missing(folder, *(f"{file}.bin" for file in _FILES[split]))


def _unpack(archive: Path, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with open_file(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as members:
        for count, member in enumerate(members):
            name = check_member(archive, member.name)
            if count >= _MAX_MEMBERS:
                raise DataError(archive, f"has more than {_MAX_MEMBERS} members")
            if name.name not in names:
                continue
            content = members.extractfile(member) if member.isreg() else None
            if content is None:
                raise DataError(archive, f"has a member {member.name!r} that is not a plain file")
            if member.size > _MAX_MEMBER_BYTES:
                raise DataError(
                    archive,
                    f"has a member {member.name!r} of {member.size} bytes; "
                    f"the limit is {_MAX_MEMBER_BYTES}",
                )
            with data_errors_of(archive):
                found[name.name] = content.read()
        while stream.read(2**20):  # to the end, where gzip keeps the checksum
            pass
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(archive, f"has no member {absent[0]}")
    return {f"{archive}/{name}": found[name] for name in names}


def _binary(path: str, content: bytes) -> tuple[Tensor, Tensor]:
    if not content or len(content) % _ROW:
        raise DataError(
            path, f"is truncated: its {len(content)} bytes are not a positive multiple of {_ROW}"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, _ROW)
    return _to_images(rows[:, 1:]), check_labels(path, rows[:, 0], 10)


def _pickled(path: str, content: bytes) -> tuple[Tensor, Tensor]:
    batch = read_pickle(path, content)
    pixels: Any = batch.get("data")
    labels: Any = batch.get("labels")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _ROW - 1:
        raise DataError(path, f"must hold an array 'data' with {_ROW - 1} columns")
    if not isinstance(labels, list) or not all(
        type(label) is int and abs(label) < 2**31 for label in labels
    ):
        raise DataError(path, "must hold a list 'labels' of whole numbers")
    return _to_images(pixels), check_labels(path, labels, 10, rows=len(pixels))


def _to_images(pixels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy())
