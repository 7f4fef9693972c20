"""The data sets that a config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from equipoise.core import SettingError
from equipoise.data import (
    DATASETS,
    BadSamples,
    DataError,
    Dataset,
    Encoding,
    encode_dataset,
    find_scored_split,
    find_watched_split,
    fit_dataset,
    load_raw,
)
from equipoise.data.image import find_other_size
from equipoise.data.image_depth import warn_of_depth
from equipoise.data.reader import find_folder
from equipoise.runs.sections import DataConfig, as_config_error

__all__ = ["Samples", "load_part", "load_samples", "require_alike"]


@dataclass(frozen=True)
class Samples:
    """The data sets of a run.

    Attributes:
        train: To learn from.
        watched: To score after each epoch: held out of the training data, or published for it, or
            else the test samples.
        test: To score in the end; `None` where only samples of `train` are held out.
        bad: Those that cannot be read, if they are to be skipped.
    """

    train: Dataset
    watched: Dataset
    test: Dataset | None
    bad: BadSamples | None = None


def load_samples(data: DataConfig, encoding: Encoding | None = None) -> Samples:
    """Load the data sets that a run needs.

    Args:
        data: Which ones.
        encoding: What becomes of the columns of a table; by default what its training samples say.
    """
    found = _load_samples(data)
    if encoding is None:
        encoding = fit_dataset(found.train, standardize=data.standardize, impute=data.impute)
    train, watched = (encode_dataset(each, encoding) for each in (found.train, found.watched))
    test = found.test
    if test is not None:
        test = watched if test is found.watched else encode_dataset(test, encoding)
    return Samples(train, watched, test, found.bad)


def _load_samples(data: DataConfig) -> Samples:
    """The data sets, tables as they are in their files."""
    bad = BadSamples() if data.on_bad_sample == "skip" else None
    train, test = replace(_load(data, "train"), bad=bad), _load_test(data)
    if test is not None:
        test = replace(test, bad=bad)
        require_alike(train, test)
    if not data.holdout and (split := _find_watched(data)):
        watched = replace(_load(data, split), bad=bad)
        kept = train.select_rows(_draw(data, train)) if _draws(data) else train
        return Samples(kept, watched, test, bad)
    if not _draws(data) and not data.holdout:
        assert test is not None  # _load_test would have said so
        return Samples(train, test, test, bad)
    if data.holdout and _holds_out(data):
        # What a reader learns from training samples, such as a vocabulary, knows nothing of others.
        watched = replace(_load(data, "val"), bad=bad)
        kept = train.select_rows(_draw(data, train)) if _draws(data) else train
        return Samples(kept, watched, test, bad)
    order = _draw(data, train)
    held = round(data.holdout * len(order))
    if data.holdout and not 0 < held < len(order):
        got = f"{data.holdout} of {len(order)} samples"
        raise SettingError("data.holdout", "leave samples on both sides", data.holdout, got=got)
    kept = train.select_rows(order[: len(order) - held])
    scored = train.select_rows(order[len(order) - held :]) if held else test
    assert scored is not None  # either some are held out, or _load_test would have said so
    return Samples(kept, scored, test, bad)


def _holds_out(data: DataConfig) -> bool:
    """Whether a reader itself keeps the end of the training data apart."""
    return "holdout" in [option.name for option in fields(DATASETS[data.name])]


def _reader_options(data: DataConfig) -> dict[str, Any]:
    if data.holdout and _holds_out(data):
        return {**data.options, "holdout": data.holdout}
    return dict(data.options)


def _find_watched(data: DataConfig) -> str | None:
    with _config_errors(data):
        return find_watched_split(data.name, data.root or None, **_reader_options(data))


def _draws(data: DataConfig) -> bool:
    """Whether only some of the training samples are used."""
    return data.subset > 0 or data.samples_per_class > 0


def _draw(data: DataConfig, train: Dataset) -> Tensor:
    """The training samples to use: of a text the first ones, else in a fixed shuffled order."""
    count = len(train)
    if data.subset > count:
        rule = f"be at most {count}, the number of training samples"
        raise SettingError("data.subset", rule, data.subset)
    if train.continuous and not data.samples_per_class:
        return torch.arange(data.subset or count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    if data.samples_per_class:
        return order[_first_of_each_class(data.samples_per_class, train, order)]
    return order[: data.subset or count]


def _first_of_each_class(wanted: int, train: Dataset, order: Tensor) -> Tensor:
    """Where in an order of the samples the first ones of each class are."""
    key = "data.samples_per_class"
    if train.task not in ("classification", "arrays") or train.y is None or train.y.dim() != 1:
        rule = "be for data with one class for each sample, known before they are read"
        raise SettingError(key, rule, wanted, got=f"{train.name!r}, {train.task}")
    y = train.y[order]
    for label, name in enumerate(train.classes):
        found = int((y == label).sum())
        if found < wanted:
            rule = f"be at most {found}, the training samples of class {name!r}"
            raise SettingError(key, rule, wanted)
    places = [torch.nonzero(y == label).flatten()[:wanted] for label in range(len(train.classes))]
    return torch.cat(places).sort().values


def require_alike(train: Dataset, other: Dataset) -> None:
    """Raise unless samples have the columns and the classes of those that a model learns from.

    Tables number their classes, so one that lacks the last ones still agrees.

    Args:
        train: What the model learns from, or what is known of it.
        other: What it is scored on.
    """
    if train.columns and other.columns and train.columns != other.columns:
        raise SettingError(
            f"The columns of {other.name!r} {other.split}",
            f"be those of the training data, {_shorten(train.columns)}",
            other.columns,
            got=_shorten(other.columns),
        )
    same = train.classes[: len(other.classes)] if other.task == "arrays" else train.classes
    if other.classes != same:
        raise SettingError(
            f"The classes of {other.name!r} {other.split}",
            f"be those of the training data, {_shorten(train.classes)}",
            other.classes,
            got=_shorten(other.classes),
        )


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 10 else (*names[:8], "...", names[-1]))


def _load_test(data: DataConfig) -> Dataset | None:
    """The samples to score: the first of the splits to score that is there.

    There must be one, unless samples are held out of the training data.
    """
    with _config_errors(data):
        split = find_scored_split(data.name, data.root or None, **_reader_options(data))
    if split is not None:
        return _load(data, split)
    if data.holdout:
        return None
    folder = find_folder(data.name, data.root or None)
    if not folder.exists():
        raise DataError(
            folder,
            f"does not exist; say where the files of {data.name!r} are: --data-root DIR, or "
            "data.root in a config",
        )
    splits = " or ".join(repr(each) for each in DATASETS[data.name].scored)
    raise SettingError(
        "data.holdout",
        f"be more than 0, since there is no {splits} to score",
        data.holdout,
        "Write data.holdout = 0.1 to hold out a tenth of the training samples.",
    )


def load_part(data: DataConfig, split: str | None, encoding: Encoding | None) -> Dataset:
    """Load what a run means by a split of its data.

    Args:
        data: Of which run.
        split: `train` is what it learns from, `val` what it holds out, if it does; others are those
            of the data. By default what the run scores in the end.
        encoding: What becomes of the columns of a table, as the run keeps it.
    """
    if split == "train" and (_draws(data) or data.holdout):
        found = _load_samples(data).train
    elif split == "val" and data.holdout:
        found = _load_samples(data).watched
    elif split is not None:
        found = _load(data, split)
    else:
        found = _load_test(data) or _load_samples(data).watched
    return encode_dataset(found, encoding)


@contextmanager
def _config_errors(data: DataConfig) -> Iterator[None]:
    """Say what is wrong by the names that the config has for it."""
    try:
        yield
    except SettingError as error:
        raise as_config_error(error, DataConfig, data.options) from error
    except TypeError as error:
        rule = f"suit the data {data.name!r}"
        raise SettingError("data.options", rule, data.options, f"{error}.") from error
    except ImportError as error:
        rule = "be data that can be read with what is installed"
        raise SettingError("data.name", rule, data.name, str(error)) from error


def _load(data: DataConfig, split: str) -> Dataset:
    with _config_errors(data):
        options = _reader_options(data)
        dataset = load_raw(data.name, split, data.root or None, data.download, **options)
    try:
        dataset = dataset.select_classes(data.classes) if data.classes else dataset
    except SettingError as error:
        raise error.about("data.classes") from error
    if dataset.x is None:
        if data.on_bad_sample == "skip":
            dataset = replace(dataset, bad=BadSamples())
        else:
            dataset.gather([0])  # files of another kind are bad from the first one on
        _require_one_size(data, dataset)
        if dataset.files:
            warn_of_depth(dataset.files[0][0])
    return dataset


def _require_one_size(data: DataConfig, dataset: Dataset) -> None:
    """Raise unless images can make a batch."""
    options = [option.name for option in fields(DATASETS[data.name])]
    if "size" not in options or data.options.get("size"):
        return
    different = find_other_size([files[0] for files in dataset.files])
    if different is not None:
        (height, width), (other_height, other_width) = different
        size = [min(height, other_height), min(width, other_width)]
        raise SettingError(
            "data.options.size",
            "be given for images of different sizes, which it brings to one",
            None,
            f"Write data.options.size = {size}, say.",
            got=f"images of {width} x {height} and {other_width} x {other_height}",
        )
