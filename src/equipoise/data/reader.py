"""The registry of readers, and loading data by name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from equipoise.core import Registry, SettingError, choose
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.fetch import Download, fetch

__all__ = [
    "DATASETS",
    "Reader",
    "find_folder",
    "find_scored_split",
    "find_watched_split",
    "list_data",
    "load_data",
    "load_raw",
]


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one published format; the options of a format are the fields of its reader.

    Attributes:
        name: The name under which it is registered.
        summary: One sentence about it.
        splits: What it can read.
        scored: The splits that models are scored on, the first of them that is there.
        watched: The split that a run is scored on while it trains, where it is there beside the
            one that is scored in the end; by default there is none.
        downloads: The files of each split that can be downloaded.
        needs_root: Whether the user must say where the files are.
        bundled: Whether it needs no files.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    scored: ClassVar[tuple[str, ...]] = ("test",)
    watched: ClassVar[str] = ""
    downloads: ClassVar[dict[str, tuple[Download, ...]]] = {}
    needs_root: ClassVar[bool] = False
    bundled: ClassVar[bool] = False

    @abstractmethod
    def read(self, folder: Path, split: str) -> Dataset:
        """Read one split from a folder.

        Args:
            folder: Where the published files are.
            split: One of `splits`.
        """

    def read_raw(self, folder: Path, split: str) -> Dataset:
        """Read one split, of tables as they are in the file, for `fit_dataset`; else as `read`.

        Args:
            folder: As of `read`.
            split: As of `read`.
        """
        return self.read(folder, split)

    def has(self, folder: Path, split: str) -> bool:
        """Return whether a split is there, for formats of which not all need be.

        Args:
            folder: Where the files are.
            split: One of `splits`.
        """
        return True

    @classmethod
    def as_trained(cls, about: Dataset) -> dict[str, Any]:  # noqa: ARG003
        """Return options with which it numbers classes as the data of a trained model.

        By default none: the files say it all.

        Args:
            about: What is known of those data.
        """
        return {}

    def missing(self, folder: Path, *files: str) -> DataError:
        """Return the error that says which files to put where."""
        remedy = (
            ", or have it downloaded (--download, download=True)"
            if self.downloads
            else " (it cannot be downloaded for you)"
        )
        where = "in this folder" if folder.is_dir() else "in this folder, which does not exist"
        return DataError(
            folder, f"{self.name} needs {' and '.join(files)} {where}; put it there{remedy}"
        )


DATASETS: Registry[Reader] = Registry("dataset", Reader, "equipoise.data")  # type: ignore[type-abstract]


def load_data(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    download: bool = False,
    **options: Any,
) -> Dataset:
    """Return one split of a data set.

    Args:
        name: One of `list_data()`, a plug-in, or code: `package.module:Name` or `file.py:Name` of a
            class that derives from `Reader`.
        split: `train`, `test` or `val`, as far as they were published.
        root: The folder with the data set's own files. By default the folder of that name in
            `$EQUIPOISE_DATA`, or else in `~/.cache/equipoise`.
        download: Whether to download missing files from where they were published. Nothing is ever
            downloaded otherwise.
        options: The options of the reader, such as `size=(64, 64)` for `image-folder`.
    """
    reader, folder = _prepare(name, split, root, download, options)
    return reader.read(folder, split)


def load_raw(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    download: bool = False,
    **options: Any,
) -> Dataset:
    """Return one split of a data set; of tables as they are in the file, for `fit_dataset`.

    Args:
        name: As of `load_data`.
        split: As of `load_data`.
        root: As of `load_data`.
        download: As of `load_data`.
        options: As of `load_data`.
    """
    reader, folder = _prepare(name, split, root, download, options)
    return reader.read_raw(folder, split)


def _prepare(
    name: str, split: str, root: str | Path | None, download: bool, options: dict[str, Any]
) -> tuple[Reader, Path]:
    """A reader and where it reads, with the files that it needs."""
    kind = DATASETS[name]
    choose(f"load_data.split of {name!r}", split, kind.splits)
    reader, folder = _make_reader(name, root, options)
    if download:
        for file in kind.downloads.get(split, ()):
            if not any(
                (folder / known).is_file() for known in (file.file, file.file.removesuffix(".gz"))
            ):
                fetch(file, folder)
    return reader, folder


def find_scored_split(name: str, root: str | Path | None = None, **options: Any) -> str | None:
    """Return the split of a data set that models are scored on; `None` if there is none.

    Args:
        name: As of `load_data`.
        root: As of `load_data`.
        options: As of `load_data`.
    """
    reader, folder = _make_reader(name, root, options)
    return next((split for split in reader.scored if reader.has(folder, split)), None)


def find_watched_split(name: str, root: str | Path | None = None, **options: Any) -> str | None:
    """Return the split that a run is scored on while it trains, if that is not the last one.

    Args:
        name: As of `load_data`.
        root: As of `load_data`.
        options: As of `load_data`.
    """
    reader, folder = _make_reader(name, root, options)
    apart = reader.watched and reader.watched != find_scored_split(name, root, **options)
    return reader.watched if apart and reader.has(folder, reader.watched) else None


def find_folder(name: str, root: str | Path | None = None) -> Path:
    """Return the folder in which the files of a data set are looked for.

    Args:
        name: As of `load_data`.
        root: As of `load_data`.
    """
    if root is None:
        return _default_root() / name.rpartition(":")[2]
    return Path(root).expanduser()


def _make_reader(
    name: str, root: str | Path | None, options: dict[str, Any]
) -> tuple[Reader, Path]:
    """A reader with its options, and where it reads."""
    kind = DATASETS[name]
    names = [field.name for field in fields(kind)]
    for option in options:
        if not names:
            raise SettingError(f"load_data of {name!r}", "have no options", option)
        choose(f"load_data option of {name!r}", option, names)
    if kind.needs_root and root is None:
        rule = f"be given for {name!r}"
        raise SettingError("load_data.root", rule, None, "Pass the folder with the files.")
    return kind(**options), find_folder(name, root)


def list_data() -> dict[str, str]:
    """Return all names that are registered, each with one sentence about it."""
    return {name: DATASETS[name].summary for name in DATASETS}


def _default_root() -> Path:
    folder = os.environ.get("EQUIPOISE_DATA")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "equipoise"
