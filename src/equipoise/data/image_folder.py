"""Images in folders, one folder for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from equipoise.data.bounded_io import data_errors_of, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.image import (
    Size,
    find_shape,
    list_images,
    list_subfolders,
    read_image,
    require_size,
)
from equipoise.data.reader import DATASETS, Reader

__all__ = ["ImageFolder"]


@dataclass(frozen=True)
class _Labelled:
    """Reads one image and its class; a class, so that data-loading workers can pickle it."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: Size

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        return read_image(self.paths[index], self.size), torch.tensor(self.labels[index])


@final
@DATASETS.register("image-folder")
@dataclass(frozen=True)
class ImageFolder(Reader):
    """Images in `split/class/*.jpg`, laid out as ImageNet (Russakovsky et al., 2015).

    Images are decoded when they are needed, and may lie in subfolders of the folder of their class.
    Classes are the sorted names of the folders in `train`, if there is one, so that all splits
    number them alike. Files not named like images are left out.

    Tiny ImageNet (Le & Yang, 2015) is read as it is published: `val/val_annotations.txt` names the
    class of each image in `val/images`.

    Args:
        size: Height and width to bring each image to: scaled until it covers them, then cropped
            around its centre. By default images stay as they are.
    """

    name = "image-folder"
    summary = (
        "Images in folders split/class/*.jpg, laid out as ImageNet; decoded when they are needed."
    )
    splits = ("train", "val", "test")
    scored = ("val", "test")
    needs_root = True

    size: Size = None

    def __post_init__(self) -> None:
        if self.size is not None:
            require_size("ImageFolder.size", self.size)

    def has(self, folder: Path, split: str) -> bool:
        return (folder / split).is_dir()

    def read(self, folder: Path, split: str) -> Dataset:
        root = folder / split
        if not root.is_dir():
            raise self.missing(
                folder, f"a folder {split!r} with one folder of images for each class"
            )
        found = _read_annotations(root) or _list_classes(root)
        own, train = sorted({name for _, name in found}), folder / "train"
        classes = list_subfolders(train) if train.is_dir() else own
        unknown = sorted(set(own) - set(classes))
        if unknown:
            raise DataError(root / unknown[0], f"is a class that {train} does not have")
        number = {name: i for i, name in enumerate(classes)}
        paths = [path for path, _ in found]
        labels = tuple(number[name] for _, name in found)
        sample = _Labelled(tuple(paths), labels, self.size)
        shape = find_shape(paths, self.size)
        return Dataset(
            self.name,
            split,
            "classification",
            tuple(classes),
            shape,
            y=torch.tensor(labels),
            sample=sample,
            count=len(paths),
            files=tuple((path,) for path in paths),
        )


def _list_classes(root: Path) -> list[tuple[Path, str]]:
    """All images of a split, each with the folder that is its class."""
    names = list_subfolders(root)
    if not names:
        raise DataError(root, "holds no folders of images, one for each class")
    found = []
    for name in names:
        images = list_images(root / name)
        if not images:
            raise DataError(root / name, "holds no images")
        found += [(path, name) for path in images]
    return found


def _read_annotations(root: Path) -> list[tuple[Path, str]]:
    """The images that `SPLIT_annotations.txt` names, each with its class; none without it.

    A line is the name of a file in `images` and its class, separated by a tab, and what else is
    known of it.
    """
    path = root / f"{root.name}_annotations.txt"
    if not path.is_file():
        return []
    with data_errors_of(path):
        lines = read_file(path).decode("utf-8-sig").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        name, *rest = line.split("\t")
        if not rest or Path(name).name != name:
            raise DataError(path, f"line {number} must be the name of a file, a tab and its class")
        found.append((root / "images" / name, rest[0].strip()))
    if not found:
        raise DataError(path, "names no images")
    return found
