"""Networks for tables beside scikit-learn's own, by cross-validation on the tables that it bundles.

Each table is divided into the same folds for all. A fold is predicted by what the other folds
teach: columns are standardised by them, and of a method's two settings the one is taken that scores
better, on average over all tables, on a part of them that is held out. The fold itself is only
scored. Scores are accuracies, and R2 on diabetes.

Run: OMP_NUM_THREADS=1 python benchmarks/tables.py   (prints Markdown)
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning as NotConverged
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor

from equipoise.data import Dataset
from equipoise.data.table import encode_dataset, fit_dataset
from equipoise.engine import (
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    evaluate,
    make_task,
)
from equipoise.engine.progress import SilentProgress
from equipoise.models import create_model

TABLES = ("iris", "wine", "breast_cancer", "digits", "diabetes")
FOLDS = 5
MAX_TRIED = 400  # rows that a setting is tried with; it is chosen on at least a fifth of the others

Settings = Mapping[str, Any]
NETWORKS = [{"weight_decay": 0.01}, {"weight_decay": 1.0}]
WIDTH = 64
SIZES: dict[str, dict[str, Any]] = {
    "opteq-table": {"width": WIDTH, "hidden": WIDTH},
    "monotone-table": {"width": WIDTH},
    "mlp-table": {"widths": (WIDTH, WIDTH)},
}
METHODS: dict[str, list[dict[str, Any]]] = {
    "opteq-table": NETWORKS,
    "monotone-table": NETWORKS,
    "mlp-table": NETWORKS,
    # The first ones are the defaults of scikit-learn.
    "MLP of scikit-learn": [{"alpha": 1e-4}, {"alpha": 1.0}],
    "HistGradientBoosting": [{"max_leaf_nodes": 31}, {"max_leaf_nodes": 8}],
}


@dataclass
class Tally:
    """What a method cost.

    Attributes:
        seconds: Processor time of all its fits.
        solves: Equilibria of test rows, and how many of them missed the tolerance.
        skipped: Steps of training that were skipped.
    """

    seconds: float = 0.0
    solves: int = 0
    missed: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Split:
    """Rows to learn from and rows to score, standardised by the former."""

    train: Dataset
    test: Dataset

    @property
    def regression(self) -> bool:
        return self.train.task == "regression"

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return features and targets of both, those of regression standardised too."""
        found: list[NDArray[Any]] = []
        for each in (self.train, self.test):
            assert each.x is not None
            assert each.y is not None
            y = each.y.numpy()
            if self.regression:
                assert each.encoding is not None
                target = each.encoding.targets[0]
                y = (y[:, 0] - target.shift) / target.scale
            found += [each.x.numpy(), y]
        return tuple(found)


def load(name: str) -> Dataset:
    """Return a table as it is."""
    settings = {"scaled": False} if name == "diabetes" else {}
    found = getattr(datasets, f"load_{name}")(**settings)
    x, y = torch.from_numpy(found.data.astype(np.float64)), torch.from_numpy(found.target)
    if name == "diabetes":
        return Dataset(name, "train", "regression", ("progression",), x.shape[1:], x, y[:, None])
    classes = tuple(str(each) for each in found.target_names)
    return Dataset(name, "train", "arrays", classes, x.shape[1:], x, y.long())


def split(table: Dataset, train: NDArray[Any], test: NDArray[Any]) -> Split:
    """Return some rows of a table, and others, both standardised by the former."""
    rows = table.select_rows(torch.from_numpy(train))
    encoding = fit_dataset(rows, standardize=True)
    others = table.select_rows(torch.from_numpy(test))
    return Split(encode_dataset(rows, encoding), encode_dataset(others, encoding))


def folds(table: Dataset) -> Iterator[tuple[Split, Split]]:
    """Return for each fold what a setting is chosen on, and what is reported."""
    assert table.y is not None
    y, rows = table.y.numpy(), np.arange(len(table))
    classes = table.task != "regression"
    kind = StratifiedKFold if classes else KFold
    for train, test in kind(FOLDS, shuffle=True, random_state=0).split(rows, y):
        fit, held = train_test_split(
            train,
            train_size=min(MAX_TRIED, round(0.8 * len(train))),
            random_state=0,
            stratify=y[train] if classes else None,
        )
        yield split(table, fit, held), split(table, train, test)


def fit_network(name: str, data: Split, settings: Settings, tally: Tally, seed: int) -> float:
    """Train a network, and return its score."""
    torch.manual_seed(seed)
    assert data.train.x is not None
    model = create_model(
        name,
        input_shape=tuple(data.train.x.shape[1:]),
        num_classes=len(data.train.classes),
        **SIZES[name],
    )
    task = make_task("auto", data.train)
    start = time.process_time()
    summary = Trainer(
        model,
        task,
        data.train,
        settings=TrainConfig(epochs=20, batch=64, seed=seed),
        optimizer=OptimizerConfig("adamw", 1e-2, **settings),
        schedule=ScheduleConfig("one-cycle"),
        progress=SilentProgress(),
    ).fit()
    tally.seconds += time.process_time() - start
    tally.skipped += summary.skipped
    found = evaluate(model, task, data.test)
    tally.solves += sum(found.status.values())
    tally.missed += found.missed
    score = found.metrics["r2" if data.regression else "accuracy"]
    assert score is not None
    return score


def fit_peer(name: str, data: Split, settings: Settings, tally: Tally, seed: int) -> float:
    """Fit an estimator of scikit-learn, and return its score."""
    boosts = name == "HistGradientBoosting"
    if data.regression:
        kind, score = HistGradientBoostingRegressor if boosts else MLPRegressor, r2_score
    else:
        kind, score = HistGradientBoostingClassifier if boosts else MLPClassifier, accuracy_score
    x, y, new, expected = data.arrays()
    estimator = kind(random_state=seed, **settings)
    start = time.process_time()
    with warnings.catch_warnings():
        # Its 200 epochs are enough for a score, if not for its own criterion.
        warnings.simplefilter("ignore", NotConverged)
        estimator.fit(x, y)
    tally.seconds += time.process_time() - start
    return float(score(expected, estimator.predict(new)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tables = {name: list(folds(load(name))) for name in TABLES}
    print("| method | iris | wine | breast cancer | digits | diabetes (R2) | time | settings |")
    print("|---|---|---|---|---|---|---|---|")
    for method in args.methods:
        fit = fit_network if method in SIZES else fit_peer
        scores: dict[str, list[float]] = {name: [] for name in TABLES}
        tally, chosen = Tally(), []
        for fold in range(FOLDS):
            means = [
                np.mean([fit(method, tables[t][fold][0], s, Tally(), fold) for t in TABLES])
                for s in METHODS[method]
            ]
            chosen.append(int(np.argmax(means)))
            for t in TABLES:
                settings = METHODS[method][chosen[-1]]
                scores[t].append(fit(method, tables[t][fold][1], settings, tally, fold))
        cells = [
            f"{np.mean(s):.3f} ± {np.std(s):.3f}"
            if t == "diabetes"
            else f"{100 * np.mean(s):.1f} ± {100 * np.std(s):.1f}"
            for t, s in scores.items()
        ]
        picks = ", ".join(f"{chosen.count(i)} x {METHODS[method][i]}" for i in sorted({*chosen}))
        print(f"| {method} | {' | '.join(cells)} | {tally.seconds:.0f} s | {picks} |", flush=True)
        if tally.solves:
            print(f"<!-- {method}: {tally} -->", flush=True)


if __name__ == "__main__":
    main()
