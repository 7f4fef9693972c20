"""The tables that come with scikit-learn: real data for a first run, with nothing to fetch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch

from equipoise.data.bundled_split import split_rows
from equipoise.data.dataset import Dataset
from equipoise.data.reader import DATASETS
from equipoise.data.table import RawReader, make_raw

__all__ = ["BreastCancer", "Diabetes", "Iris", "Wine"]


@dataclass(frozen=True)
class BundledTable(RawReader):
    """A table that comes with scikit-learn; a fixed fifth of each class is the test set.

    Attributes:
        loader: The function of `sklearn.datasets`.
        settings: Its arguments.
        target: What the number to predict is called, of a regression.
    """

    bundled = True
    loader: ClassVar[str]
    settings: ClassVar[dict[str, Any]] = {}
    target: ClassVar[str] = ""

    def read_raw(self, folder: Path, split: str) -> Dataset:
        from sklearn import datasets  # type: ignore[import-untyped]

        found = getattr(datasets, self.loader)(**self.settings)
        rows = split_rows(np.zeros(len(found.data)) if self.target else found.target, split)
        # Their names are texts of NumPy.
        columns = tuple(str(name) for name in found.feature_names)
        x, raw = make_raw(Path(f"{self.name} of scikit-learn"), found.data[rows], columns)
        if self.target:
            y = torch.from_numpy(found.target[rows].astype(np.float64))[:, None]
        else:
            y = torch.from_numpy(found.target[rows].astype(np.int64))
        names = [self.target] if self.target else found.target_names
        return Dataset(
            self.name,
            split,
            "regression" if self.target else "arrays",
            tuple(str(name) for name in names),
            (len(columns),),
            x,
            y,
            columns=columns,
            raw=raw,
        )


@final
@DATASETS.register("iris")
@dataclass(frozen=True)
class Iris(BundledTable):
    """150 flowers of three species, four lengths of each (Fisher, 1936)."""

    name = "iris"
    summary = "Three species of flowers, 120 + 30 rows of 4 lengths, bundled with scikit-learn."
    loader = "load_iris"


@final
@DATASETS.register("wine")
@dataclass(frozen=True)
class Wine(BundledTable):
    """178 wines of three growers, 13 measurements of each (Aeberhard & Forina, 1991)."""

    name = "wine"
    summary = "Wines of three growers, 142 + 36 rows of 13 numbers, bundled with scikit-learn."
    loader = "load_wine"


@final
@DATASETS.register("breast-cancer")
@dataclass(frozen=True)
class BreastCancer(BundledTable):
    """569 tumours, malignant or benign, 30 measurements of each (Wolberg et al., 1995)."""

    name = "breast-cancer"
    summary = "Two kinds of tumours, 456 + 113 rows of 30 numbers, bundled with scikit-learn."
    loader = "load_breast_cancer"


@final
@DATASETS.register("diabetes")
@dataclass(frozen=True)
class Diabetes(BundledTable):
    """442 patients, ten numbers of each, and how far diabetes progressed (Efron et al., 2004)."""

    name = "diabetes"
    summary = (
        "Progression of diabetes, a number; 354 + 88 rows of 10 numbers, bundled with scikit-learn."
    )
    loader = "load_diabetes"
    settings: ClassVar[dict[str, Any]] = {"scaled": False}  # in their own units
    target = "progression"
