"""Images in folders, one folder for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

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

    Images are decoded when they are needed. Classes are the sorted names of the folders in `train`,
    if there is one, so that all splits number them alike. Files not named like images are left out.

    Args:
        size: Height and width to bring each image to: scaled until it covers them, then cropped
            around its centre. By default images stay as they are.
    """

    name = "image-folder"
    summary = (
        "Images in folders split/class/*.jpg, laid out as ImageNet; decoded when they are needed."
    )
    splits = ("train", "val", "test")
    needs_root = True

    size: Size = None

    def __post_init__(self) -> None:
        if self.size is not None:
            require_size("ImageFolder.size", self.size)

    def read(self, folder: Path, split: str) -> Dataset:
        root = folder / split
        if not root.is_dir():
            raise self.missing(
                folder, f"a folder {split!r} with one folder of images for each class"
            )
        own = list_subfolders(root)
        if not own:
            raise DataError(root, "holds no folders of images, one for each class")
        train = folder / "train"
        classes = list_subfolders(train) if train.is_dir() else own
        unknown = sorted(set(own) - set(classes))
        if unknown:
            raise DataError(root / unknown[0], f"is a class that {train} does not have")
        paths: list[Path] = []
        labels: list[int] = []
        for name in own:
            found = list_images(root / name)
            if not found:
                raise DataError(root / name, "holds no images")
            paths += found
            labels += [classes.index(name)] * len(found)
        sample = _Labelled(tuple(paths), tuple(labels), self.size)
        shape = find_shape(paths, self.size)
        return Dataset(
            self.name,
            split,
            "classification",
            tuple(classes),
            shape,
            sample=sample,
            count=len(paths),
            files=tuple((path,) for path in paths),
        )
