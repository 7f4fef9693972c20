"""Samples for a trained model from files: images, arrays, tables and text."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.data import DataError, Encoding, Greyscale
from equipoise.data.bounded_io import data_errors_of, read_file, require_room
from equipoise.data.csv_file import open_csv
from equipoise.data.encoding import CategoryColumn, RawTable
from equipoise.data.image import SUFFIXES, list_images, read_greys, read_image
from equipoise.data.image_depth import warn_of_depth
from equipoise.data.numpy_table import read_npy
from equipoise.data.vocabulary import UNKNOWN, Vocabulary

__all__ = ["UnknownTokenWarning", "read_inputs", "read_texts"]

MAX_NAMED = 5  # unknown tokens that a warning names


class UnknownTokenWarning(UserWarning):
    """A text holds tokens that a language model does not know, and which it takes for one."""


def read_inputs(
    paths: Iterable[Path | str],
    *,
    shape: Sequence[int],
    multiple: int | None = None,
    vocabulary: Vocabulary | None = None,
    columns: Sequence[str] = (),
    encoding: Encoding | None = None,
    separator: str = "",
    deep: bool = False,
    on_bad_file: Callable[[DataError], None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Read samples one by one, each with a name: its file, and its index in a file of many.

    Images come as bytes, brought to the size of the model as those of a data set are: scaled
    until they cover it, then cropped about their centre. Arrays and tables hold a sample in each
    row, must have the model's size, and stay as they are: bytes, or float32. A table whose first
    row names its columns gives those of `columns`, in that order. Rows of a table without names
    that are one longer end in a label, which is left out, unless the model was trained on named
    columns: then nobody knows which one is the label. Every failure is a `DataError` that names
    the file; it is raised, or handed to `on_bad_file`, and the other files are read.

    Args:
        paths: Files, and folders whose images are meant, sorted, with those in their subfolders.
        shape: Of a sample: channels, height and width, or the number of features.
        multiple: What height and width must be multiples of, if they need not be those of `shape`
            (`Model.size_multiple`); each is brought to the nearest one.
        vocabulary: The tokens of a language model, whose inputs are text: files of one sample
            each.
        columns: Names of the features that the model was trained on (`Dataset.columns`).
        encoding: What becomes of the columns of a table (`Dataset.encoding`).
        separator: As of `open_csv`.
        deep: Whether images of 16 bits of grey come as floats in [0, 1], not as bytes.
        on_bad_file: Called with what is wrong with a file or a folder, which is then left out; by
            default the first bad one ends the reading.
    """
    shape = tuple(shape)
    for path in map(Path, paths):
        files: list[Path] = []
        with _bad_files_to(on_bad_file):
            files = _list_files(path)
        for file in files:
            samples: list[tuple[str, Tensor]] = []
            with _bad_files_to(on_bad_file):  # around the reading, not around what is made of it
                samples = list(
                    _read(
                        file, shape, multiple, vocabulary, tuple(columns), encoding, separator, deep
                    )
                )
            yield from samples


def read_texts(texts: Sequence[str], vocabulary: Vocabulary) -> Iterator[tuple[str, Tensor]]:
    """Read texts that are to be continued, each named by its place.

    Args:
        texts: The texts.
        vocabulary: The tokens of the language model.
    """
    for place, text in enumerate(texts):
        yield f"text[{place}]", _text(f"text[{place}]", text.encode(), vocabulary)


@contextmanager
def _bad_files_to(on_bad_file: Callable[[DataError], None] | None) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        if on_bad_file is None:
            raise
        on_bad_file(error)


def _list_files(path: Path) -> list[Path]:
    """A file, or the images in a folder."""
    with data_errors_of(path):
        if path.is_dir():
            files = list_images(path)
            if not files:
                raise DataError(path, "is a folder without images")
            return files
        if not path.is_file():
            raise DataError(path, "is not there")
        return [path]


def _read(
    path: Path,
    shape: tuple[int, ...],
    multiple: int | None,
    vocabulary: Vocabulary | None,
    columns: tuple[str, ...],
    encoding: Encoding | None,
    separator: str,
    deep: bool,
) -> Iterator[tuple[str, Tensor]]:
    suffix = path.suffix.lower()
    if vocabulary is not None:
        if suffix in (*SUFFIXES, ".npy", ".npz", ".csv"):
            raise DataError(path, "must be text for a language model")
        yield str(path), _text(str(path), read_file(path), vocabulary)
    elif suffix in SUFFIXES:
        yield str(path), _image(path, shape, multiple, deep=deep)
    elif suffix in (".npy", ".npz", ".csv"):
        if suffix == ".csv":
            values: NDArray[Any] = _table(path, columns, math.prod(shape), encoding, separator)
        else:
            values = _array(path) if encoding is None else _encode(path, _array(path), encoding)
        for i, sample in enumerate(_samples(path, values, shape, multiple)):
            yield f"{path}[{i}]", sample
    else:
        raise DataError(
            path,
            f"must be an image ({', '.join(SUFFIXES)}), arrays (.npy, .npz) or a table (.csv)",
        )


def _text(name: str, content: bytes, vocabulary: Vocabulary) -> Tensor:
    try:
        pieces = vocabulary.split_prompt(content)
        numbers = vocabulary.encode(pieces)
    except ValueError as error:
        raise DataError(name, error) from error
    unknown = vocabulary.find_unknown(pieces)
    if unknown:
        named = ", ".join(map(repr, unknown[:MAX_NAMED])) + ", ..." * (len(unknown) > MAX_NAMED)
        warnings.warn(
            f"{name}: the model does not know {named}, and reads {UNKNOWN} in place of "
            f"{'it' if len(unknown) == 1 else 'them'}",
            UnknownTokenWarning,
            stacklevel=2,
        )
    return numbers


def _image(path: Path, shape: tuple[int, ...], multiple: int | None, *, deep: bool) -> Tensor:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(path, f"is an image; the model takes samples of shape {shape}")

    def read(size: tuple[int, int] | None) -> Tensor:
        greys = read_greys(path, size) if deep else None
        return read_image(path, size) if greys is None else greys

    if multiple is None:
        image = read((shape[1], shape[2]))
    else:
        image = read(None)
        height, width = (max(round(side / multiple), 1) * multiple for side in image.shape[1:])
        if image.shape[1:] != (height, width):
            image = read((height, width))
    warn_of_depth(path)
    return image if shape[0] == 3 else Greyscale()(image[None], torch.zeros(1))[0][0]


def _array(path: Path) -> NDArray[Any]:
    with data_errors_of(path):
        size = path.stat().st_size
        require_room(path, size, size, packed=False)
        if path.suffix.lower() == ".npy":
            with path.open("rb") as stream:
                return read_npy(path, stream, size)
        with zipfile.ZipFile(path) as archive:
            members = {
                member.filename.removesuffix(".npy"): member for member in archive.infolist()
            }
            found = members.get("x") or (
                next(iter(members.values())) if len(members) == 1 else None
            )
            if found is None:
                raise DataError(
                    path,
                    "must hold an array 'x', or only one; it has "
                    f"{', '.join(sorted(members)) or 'none'}",
                )
            require_room(path, found.file_size, size, packed=True)
            with archive.open(found) as stream:
                return read_npy(path, stream, found.file_size)


def _table(
    path: Path, columns: tuple[str, ...], size: int, encoding: Encoding | None, separator: str
) -> NDArray[Any]:
    """The features of a table, without its label, if they can be told apart."""
    unsure = None if columns else False  # what was trained without names has none
    file = open_csv(path, known=columns, separator=separator, least=1, unsure=unsure)
    kinds = encoding.columns if encoding else ()
    size = len(kinds) or size
    if file.named and columns:
        kept = _find_columns(path, file.titles, columns)
    elif len(file.titles) == size + 1 and columns:
        raise DataError(
            path,
            f"has {size + 1} columns without names, so it cannot be told which one is the label "
            f"and not one of {_list_names(columns)}; name them in a first row",
        )
    else:
        more = len(file.titles) == size + 1  # the last column is the label
        kept = list(range(size if more else len(file.titles)))
    categories = {
        i for i, kind in zip(kept, kinds, strict=False) if isinstance(kind, CategoryColumn)
    }
    # Which texts are missing is told by the categories of training.
    values, raw = file.read_raw(kept, categories, categories)
    if encoding is not None:
        return encoding.encode(values, raw)
    if np.isnan(values).any():
        row, column = np.argwhere(np.isnan(values))[0]
        raise raw.error(row, column, "is missing")
    return values


def _encode(path: Path, values: NDArray[Any], encoding: Encoding) -> NDArray[np.float32]:
    """Rows of a table in an array, as the model takes them."""
    size = len(encoding.columns)
    values = values[None] if values.shape == (size,) else values
    if not values.size:
        raise DataError(path, "holds no samples")
    if values.shape[1:] != (size,):
        shape = values.shape[1:]
        raise DataError(path, f"holds samples of shape {shape}; the model takes {(size,)}")
    titles = tuple(str(i + 1) for i in range(size))
    raw = RawTable(path, titles, ((),) * size, np.arange(1, len(values) + 1))
    return encoding.encode(values, raw)


def _find_columns(path: Path, titles: Sequence[str], columns: Sequence[str]) -> list[int]:
    """Where the features that a model was trained on are in a table whose columns have names."""
    if len(set(columns)) < len(columns) or len(set(titles)) < len(titles):
        if list(titles) == list(columns):
            return list(range(len(columns)))
        raise DataError(path, "must give each column a name of its own")
    absent = [name for name in columns if name not in titles]
    if absent:
        raise DataError(
            path,
            f"has no column {absent[0]!r}; the model was trained on {_list_names(columns)}",
        )
    return [titles.index(name) for name in columns]


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def _samples(
    path: Path, values: NDArray[Any], shape: tuple[int, ...], multiple: int | None
) -> Tensor:
    """Return all samples of a file, shape (samples, ...), if the model can take them."""
    if not values.ndim or not values.size:
        raise DataError(path, "holds no samples")
    if values.shape == shape:
        values = values[None]
    size, own = math.prod(shape), values.shape[1:]
    free = (
        multiple is not None
        and len(own) == 3
        and own[0] == shape[0]
        and all(side % multiple == 0 for side in own[1:])
    )
    # Images with their channels last have as many numbers, but in another order: only flat ones
    # can be reshaped.
    if values.shape[1:] == (size,) or (len(shape) == 3 and shape[0] == 1 and own == shape[1:]):
        values = values.reshape(-1, *shape)
    elif own != shape and not free:
        raise DataError(path, f"holds samples of shape {own}; the model takes {shape}")
    if values.dtype != np.uint8:
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            raise DataError(
                path, f"sample {wrong[0][0]} holds a number that is not finite in float32"
            )
    return torch.from_numpy(
        np.array(values)
    )  # a copy, because arrays from files cannot be written to
