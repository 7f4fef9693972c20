"""Street scenes with masks: CamVid and Cityscapes."""

from __future__ import annotations

from collections.abc import Iterable
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
    read_image_and_mask,
    require_size,
)
from equipoise.data.reader import DATASETS, Reader

__all__ = ["CamVid", "Cityscapes"]

IGNORE = 255
_CITYSCAPES_CLASSES = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign",
    "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle",
    "bicycle",
)  # fmt: skip
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


@dataclass(frozen=True)
class _Masked:
    """Reads one image and its mask; a class, so that data-loading workers can pickle it.

    Args:
        pairs: The files of images and masks.
        table: The class for each value of a mask; -1 for values that must not occur.
        size: Height and width to bring both to.
    """

    pairs: tuple[tuple[Path, Path], ...]
    table: tuple[int, ...]
    size: Size

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        path, mask_path = self.pairs[index]
        image, mask = read_image_and_mask(path, mask_path, self.size)
        classes = torch.tensor(self.table)[mask]
        if (classes < 0).any():
            raise DataError(
                mask_path, f"has label {int(mask[classes < 0][0])}, which is out of range"
            )
        return image, classes


@dataclass(frozen=True)
class _Segmentation(Reader):
    splits = ("train", "val", "test")

    size: Size = None

    def __post_init__(self) -> None:
        if self.size is not None:
            require_size(f"{type(self).__name__}.size", self.size)

    def _dataset(
        self,
        folder: Path,
        split: str,
        pairs: Iterable[tuple[Path, Path]],
        classes: tuple[str, ...],
        table: dict[int, int],
    ) -> Dataset:
        found = tuple(pairs)
        if not found:
            raise DataError(folder, "holds no images")
        for path, mask in found:
            if not mask.is_file():
                raise DataError(mask, f"is not there; it must hold the mask of {path.name}")
        sample = _Masked(found, tuple(table.get(value, -1) for value in range(256)), self.size)
        shape = find_shape((path for path, _ in found), self.size)
        return Dataset(
            self.name,
            split,
            "segmentation",
            classes,
            shape,
            sample=sample,
            count=len(found),
            ignore=IGNORE,
            files=found,
        )


@final
@DATASETS.register("camvid")
@dataclass(frozen=True)
class CamVid(_Segmentation):
    """Street scenes with masks of 11 classes (Brostow, Fauqueur & Cipolla, 2009).

    In the layout of SegNet: images in `train`, masks of the same name in `trainannot`. The label
    11 (void) becomes `Dataset.ignore`, 255.

    Args:
        size: Height and width to bring each image and mask to; by default they stay as they are.
    """

    name = "camvid"
    summary = "Street scenes with masks of 11 classes (train/*.png beside trainannot/*.png)."

    def read(self, folder: Path, split: str) -> Dataset:
        images, masks = folder / split, folder / f"{split}annot"
        if not images.is_dir() or not masks.is_dir():
            raise self.missing(folder, f"folders {split!r}", f"{split + 'annot'!r}")
        classes = (
            "sky",
            "building",
            "pole",
            "road",
            "pavement",
            "tree",
            "sign",
            "fence",
            "car",
            "pedestrian",
            "bicyclist",
        )
        pairs = ((path, masks / f"{path.stem}.png") for path in list_images(images))
        table = {value: value for value in range(len(classes))} | {len(classes): IGNORE}
        return self._dataset(images, split, pairs, classes, table)


@final
@DATASETS.register("cityscapes")
@dataclass(frozen=True)
class Cityscapes(_Segmentation):
    """Street scenes of 50 cities with masks of 19 classes (Cordts et al., 2016).

    Images are `leftImg8bit/train/city/*_leftImg8bit.png`, masks
    `gtFine/train/city/*_gtFine_labelIds.png`. Labels that are not for
    training become `Dataset.ignore`, 255.

    Args:
        size: Height and width to bring each image and mask to; by default they stay as they are.
    """

    name = "cityscapes"
    scored = ("val",)  # the masks of its test images are not published
    summary = "Street scenes of 50 cities with masks of 19 classes (leftImg8bit/ beside gtFine/)."

    def read(self, folder: Path, split: str) -> Dataset:
        images, masks = folder / "leftImg8bit" / split, folder / "gtFine" / split
        if not images.is_dir() or not masks.is_dir():
            raise self.missing(folder, f"folders leftImg8bit/{split}", f"gtFine/{split}")
        pairs = []
        for city in list_subfolders(images):
            for path in list_images(images / city):
                if not path.stem.endswith("_leftImg8bit"):
                    raise DataError(path, "must have a name that ends in _leftImg8bit")
                scene = path.stem.removesuffix("_leftImg8bit")
                pairs.append((path, masks / city / f"{scene}_gtFine_labelIds.png"))
        table = dict.fromkeys((*range(34), 255), IGNORE) | {
            value: i for i, value in enumerate(_CITYSCAPES_IDS)
        }
        return self._dataset(images, split, pairs, _CITYSCAPES_CLASSES, table)
