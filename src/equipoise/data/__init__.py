"""Readers of published data sets, transforms of images, and batches that can be resumed."""

# Importing a reader's module registers it.
from equipoise.data import (  # noqa: F401
    cifar,
    clean_images,
    csv_table,
    digits,
    image_folder,
    mnist,
    numpy_table,
    sample_text,
    sklearn_table,
    street_scene,
    svhn,
    text,
)
from equipoise.data.bad_sample import (
    BadSampleError,
    BadSamples,
    BadSampleWarning,
    read_bad_samples,
)
from equipoise.data.batch import batch_count, batch_positions, batches
from equipoise.data.dataset import Dataset
from equipoise.data.degrade import Degrade
from equipoise.data.encoding import Encoding
from equipoise.data.errors import DataError
from equipoise.data.fingerprint import fingerprint
from equipoise.data.loader import LoaderWarning, Loading
from equipoise.data.mix import CutMix, Mixup
from equipoise.data.rand_augment import RandAugment
from equipoise.data.reader import (
    DATASETS,
    Reader,
    find_scored_split,
    find_watched_split,
    list_data,
    load_data,
    load_raw,
)
from equipoise.data.spatial_transform import PadCropFlip, RandomResizedCrop, Resize
from equipoise.data.table import encode_dataset, fit_dataset
from equipoise.data.transform import Compose, Greyscale, Normalize, ToFloat, Transform

__all__ = [
    "DATASETS",
    "BadSampleError",
    "BadSampleWarning",
    "BadSamples",
    "Compose",
    "CutMix",
    "DataError",
    "Dataset",
    "Degrade",
    "Encoding",
    "Greyscale",
    "LoaderWarning",
    "Loading",
    "Mixup",
    "Normalize",
    "PadCropFlip",
    "RandAugment",
    "RandomResizedCrop",
    "Reader",
    "Resize",
    "ToFloat",
    "Transform",
    "batch_count",
    "batch_positions",
    "batches",
    "encode_dataset",
    "find_scored_split",
    "find_watched_split",
    "fingerprint",
    "fit_dataset",
    "list_data",
    "load_data",
    "load_raw",
    "read_bad_samples",
]
