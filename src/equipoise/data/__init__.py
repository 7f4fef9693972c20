"""Readers for the formats in which data sets are published, transforms of pictures, and batches that can be resumed."""

# Importing a reader's module registers it.
from equipoise.data import cifar, digits, folder, mnist, svhn, table, text  # noqa: F401
from equipoise.data.batch import batch_count, batches
from equipoise.data.crop import PadCropFlip, RandomResizedCrop, Resize
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import DATASETS, Reader, list_data, load_data
from equipoise.data.transform import AddNoise, Compose, Greyscale, Normalize, ToFloat, Transform

__all__ = [
    "DATASETS",
    "AddNoise",
    "Compose",
    "DataError",
    "Dataset",
    "Greyscale",
    "Normalize",
    "PadCropFlip",
    "RandomResizedCrop",
    "Reader",
    "Resize",
    "ToFloat",
    "Transform",
    "batch_count",
    "batches",
    "list_data",
    "load_data",
]
