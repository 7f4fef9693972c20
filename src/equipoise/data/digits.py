"""The digits that come with scikit-learn: real data for a first run, with nothing to fetch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch

from equipoise.data.bundled_split import split_rows
from equipoise.data.dataset import Dataset
from equipoise.data.reader import DATASETS, Reader

__all__ = ["Digits"]


@final
@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(Reader):
    """1,797 handwritten digits, 8 x 8 (Alpaydin & Kaynak, 1998); a fixed fifth is the test set."""

    name = "digits"
    summary = "Handwritten digits, 1,438 + 359 grey images of 8 x 8, bundled with scikit-learn."
    bundled = True

    def read(self, folder: Path, split: str) -> Dataset:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]

        pixels, labels = load_digits(return_X_y=True)
        rows = split_rows(labels, split)
        x = torch.from_numpy((pixels[rows] / 16).astype(np.float32)).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(labels[rows].astype(np.int64))
        return Dataset(self.name, split, "classification", tuple("0123456789"), (1, 8, 8), x, y)
