"""Images in folders without classes, whole or in patches, for what restores images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from equipoise.core import SettingError, require_between, require_whole
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.image import find_shape, find_size, list_images, read_image
from equipoise.data.reader import DATASETS, Reader

__all__ = ["CleanImages"]

Corner = tuple[int, int]


@dataclass(frozen=True)
class _Patches:
    """Reads one image or a patch of it; a class, so that data-loading workers can pickle it.

    Args:
        places: The file of each sample, and the first row and column of its patch.
        side: Height and width of the patch; 0 for whole images.
    """

    places: tuple[tuple[Path, Corner], ...]
    side: int

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        path, (top, left) = self.places[index]
        image, target = read_image(path), torch.tensor(0)
        if not self.side:
            return image, target
        patch = image[:, top : top + self.side, left : left + self.side]
        if patch.shape[1:] != (self.side, self.side):
            raise DataError(path, f"must be at least {self.side} x {self.side} (patch)")
        return patch.contiguous(), target


@final
@DATASETS.register("images")
@dataclass(frozen=True)
class CleanImages(Reader):
    """Clean images in `train/*.png` and `test/*.png`, of any sizes, for the task `restoration`.

    Training images are cut into patches, as many in a row and a column as cover the image, evenly
    spread. Images that are scored stay whole, each in a batch of its own if their sizes differ.

    Args:
        patch: Height and width of the training patches; 0 leaves images whole.
        holdout: Fraction of the training images that is the split `val`.
    """

    name = "images"
    summary = "Clean images in train/*.png and test/*.png, of any sizes, to restore; in patches."
    splits = ("train", "val", "test")
    scored = ("test", "val")
    needs_root = True

    patch: int = 0
    holdout: float = 0.0

    def __post_init__(self) -> None:
        require_whole("CleanImages.patch", self.patch)
        require_between("CleanImages.holdout", self.holdout, 0, 1, "[)")

    def has(self, folder: Path, split: str) -> bool:
        return (folder / split).is_dir()

    def read(self, folder: Path, split: str) -> Dataset:
        held = self.holdout > 0 and split == "val"
        root = folder / ("train" if held else split)
        if not root.is_dir():
            raise self.missing(folder, f"a folder {root.name!r} of images")
        paths = list_images(root)
        if not paths:
            raise DataError(root, "holds no images")
        if self.holdout and split in ("train", "val"):
            paths = self._split(paths, held=held)
        side = self.patch if split == "train" else 0
        places = [(path, corner) for path in paths for corner in _corners(path, side)]
        shape = (3, side, side) if side else find_shape(paths, None)
        sizes = set() if side else {find_size(path) for path in paths} - {None}
        return Dataset(
            self.name,
            split,
            "images",
            (),
            shape,
            sample=_Patches(tuple(places), side),
            count=len(places),
            files=tuple((path,) for path, _ in places),
            one_by_one=len(sizes) > 1,
        )

    def _split(self, paths: Sequence[Path], *, held: bool) -> list[Path]:
        count = round(self.holdout * len(paths))
        if not 0 < count < len(paths):
            raise SettingError(
                "CleanImages.holdout",
                "leave images on both sides",
                self.holdout,
                got=f"{self.holdout} of {len(paths)} images",
            )
        # the old generator, because its numbers are promised never to change
        order = np.random.RandomState(0).permutation(len(paths))
        chosen = order[:count] if held else order[count:]
        return [paths[i] for i in sorted(chosen)]


def _corners(path: Path, side: int) -> list[Corner]:
    """Where patches begin; one that cannot be read has one, at which the error is raised."""
    size = find_size(path) if side else None
    if size is None or min(size) < side:
        return [(0, 0)]
    rows, columns = (_spread(length, side) for length in size)
    return [(row, column) for row in rows for column in columns]


def _spread(length: int, side: int) -> list[int]:
    count = -(-length // side)
    return [round(i * (length - side) / max(count - 1, 1)) for i in range(count)]
