"""Pictures in folders: one folder for each class, or pictures beside masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from equipoise.data.bounded_io import reading
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.image import Size, check_size, is_picture, read_pair, read_picture
from equipoise.data.reader import DATASETS, Reader

__all__ = ["CamVid", "Cityscapes", "ImageFolder"]

IGNORE = 255
_STREET = (
    "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation", "terrain",
    "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
)  # fmt: skip
_STREET_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


@dataclass(frozen=True)
class _Labelled:
    """Reads picture number i and its class; an object, because data-loading workers need something that pickles."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: Size

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        return read_picture(self.paths[index], self.size), torch.tensor(self.labels[index])


@dataclass(frozen=True)
class _Masked:
    """Reads picture number i and its mask, whose values `table` turns into classes; -1 in it marks values that must not occur."""

    pairs: tuple[tuple[Path, Path], ...]
    table: tuple[int, ...]
    size: Size

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        path, beside = self.pairs[index]
        picture, mask = read_pair(path, beside, self.size)
        classes = torch.tensor(self.table)[mask]
        if (classes < 0).any():
            raise DataError(beside, f"has label {int(mask[classes < 0][0])}, which is out of range")
        return picture, classes


def _subfolders(folder: Path) -> list[str]:
    with reading(folder):
        return sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )


def _pictures(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(entry for entry in folder.iterdir() if is_picture(entry))


@final
@DATASETS.register("image-folder")
@dataclass(frozen=True)
class ImageFolder(Reader):
    """Pictures in `split/class/*.jpg`, as ImageNet is kept (Russakovsky et al., 2015), decoded when they are asked for.

    Classes are the sorted names of the folders in `train`, if there is one, so that all splits
    number them alike. Files that are not called like pictures are left out.

    Args:
        size: Height and width to bring each picture to: scaled until it covers them, then cropped
            about its centre. By default pictures stay as they are.
    """

    name = "image-folder"
    summary = (
        "Pictures in folders split/class/*.jpg, as ImageNet is kept; decoded when they "
        "are asked for."
    )
    splits = ("train", "val", "test")
    needs_root = True

    size: Size = None

    def __post_init__(self) -> None:
        check_size("ImageFolder", self.size)

    def read(self, folder: Path, split: str) -> Dataset:
        place = folder / split
        if not place.is_dir():
            raise self.missing(
                folder, f"a folder {split!r} with one folder of pictures for each class"
            )
        own = _subfolders(place)
        if not own:
            raise DataError(place, "holds no folders of pictures, one for each class")
        train = folder / "train"
        classes = _subfolders(train) if train.is_dir() else own
        strange = sorted(set(own) - set(classes))
        if strange:
            raise DataError(place / strange[0], f"is a class that {train} does not have")
        paths: list[Path] = []
        labels: list[int] = []
        for name in own:
            found = _pictures(place / name)
            if not found:
                raise DataError(place / name, "holds no pictures")
            paths += found
            labels += [classes.index(name)] * len(found)
        sample = _Labelled(tuple(paths), tuple(labels), self.size)
        shape = (3, *self.size) if self.size else tuple(sample(0)[0].shape)
        return Dataset(
            self.name,
            split,
            "classification",
            tuple(classes),
            shape,
            sample=sample,
            count=len(paths),
        )


@dataclass(frozen=True)
class _Segmentation(Reader):
    splits = ("train", "val", "test")

    size: Size = None

    def __post_init__(self) -> None:
        check_size(type(self).__name__, self.size)

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
            raise DataError(folder, "holds no pictures")
        for path, mask in found:
            if not mask.is_file():
                raise DataError(mask, f"is not there; it must hold the mask of {path.name}")
        sample = _Masked(found, tuple(table.get(value, -1) for value in range(256)), self.size)
        shape = (3, *self.size) if self.size else tuple(sample(0)[0].shape)
        return Dataset(
            self.name,
            split,
            "segmentation",
            classes,
            shape,
            sample=sample,
            count=len(found),
            ignore=IGNORE,
        )


@final
@DATASETS.register("camvid")
@dataclass(frozen=True)
class CamVid(_Segmentation):
    """Street scenes with masks of 11 classes (Brostow, Fauqueur & Cipolla, 2009, in the layout of SegNet).

    Pictures lie in `train`, masks of the same name in `trainannot`. The label 11 (void) becomes
    `Dataset.ignore`, 255.

    Args:
        size: Height and width to bring each picture and mask to; by default they stay as they are.
    """

    name = "camvid"
    summary = "Street scenes with masks of 11 classes (train/*.png beside trainannot/*.png)."

    def read(self, folder: Path, split: str) -> Dataset:
        pictures, masks = folder / split, folder / f"{split}annot"
        if not pictures.is_dir() or not masks.is_dir():
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
        pairs = ((path, masks / f"{path.stem}.png") for path in _pictures(pictures))
        table = {value: value for value in range(len(classes))} | {len(classes): IGNORE}
        return self._dataset(pictures, split, pairs, classes, table)


@final
@DATASETS.register("cityscapes")
@dataclass(frozen=True)
class Cityscapes(_Segmentation):
    """Street scenes of 50 cities with masks (Cordts et al., 2016), in the 19 classes that are trained on.

    Pictures are `leftImg8bit/train/city/*_leftImg8bit.png`, masks
    `gtFine/train/city/*_gtFine_labelIds.png`. Labels that are not trained on become
    `Dataset.ignore`, 255.

    Args:
        size: Height and width to bring each picture and mask to; by default they stay as they are.
    """

    name = "cityscapes"
    summary = "Street scenes of 50 cities with masks of 19 classes (leftImg8bit/ beside gtFine/)."

    def read(self, folder: Path, split: str) -> Dataset:
        pictures, masks = folder / "leftImg8bit" / split, folder / "gtFine" / split
        if not pictures.is_dir() or not masks.is_dir():
            raise self.missing(folder, f"folders leftImg8bit/{split}", f"gtFine/{split}")
        pairs = []
        for city in _subfolders(pictures):
            for path in _pictures(pictures / city):
                if not path.stem.endswith("_leftImg8bit"):
                    raise DataError(path, "must have a name that ends in _leftImg8bit")
                pairs.append(
                    (
                        path,
                        masks
                        / city
                        / f"{path.stem.removesuffix('_leftImg8bit')}_gtFine_labelIds.png",
                    )
                )
        table = dict.fromkeys((*range(34), 255), IGNORE) | {
            value: i for i, value in enumerate(_STREET_IDS)
        }
        return self._dataset(pictures, split, pairs, _STREET, table)
