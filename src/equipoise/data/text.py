"""Running text for language models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch

from equipoise.core import SettingError, choose, require_between, require_count
from equipoise.data.bounded_io import data_errors_of, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import DATASETS, Reader
from equipoise.data.vocabulary import TOKENS, Tokens, Vocabulary, split_text

__all__ = ["Text"]

IGNORE = -100  # what torch's cross-entropy leaves out, too
_NAMES = {"train": "train", "val": "val|valid|validation|dev", "test": "test"}
_SUFFIXES = (".txt", ".text", ".tokens", ".raw", ".rst")


@final
@DATASETS.register("text")
@dataclass(frozen=True)
class Text(Reader):
    """Running text for language models, as words, characters or bytes.

    A sample is a segment of `length` tokens, `x` of shape (length,), and `y` is the token after
    each of them. What is left over at the end of a training text is dropped; `val` and `test` are
    scored to their end: the last sample repeats its last token, and its targets there are `ignore`.
    The vocabulary is that of the training text, in order of first appearance, with `<unk>` for all
    that is not in it.

    The files of a folder are found by their names: `train.txt`, `ptb.train.txt`,
    `wiki.train.tokens`; `valid`, `val` or `dev`; `test`; or all files of a folder `train`. A single
    file, or a folder whose files are not named so, is all training text, of which `holdout` keeps
    the end apart. Words are separated by blanks, and each line ends in `<eos>`, as the Penn
    Treebank is published (Marcus et al., 1993; Mikolov et al., 2010).

    Args:
        length: How many tokens a sample has.
        tokens: What the text is split into: `words`, `characters` or `bytes`.
        max_vocabulary: How many tokens to know at most, the most frequent ones; by default all.
        holdout: Fraction of the training text, its end, that is the split `val` in place of a file.
            In a config, write data.holdout.
        vocabulary: The tokens to know, in place of those of the training text.
    """

    name = "text"
    summary = "Running text as words, characters or bytes (train.txt, valid.txt, test.txt)."
    splits = ("train", "val", "test")
    scored = ("test", "val")
    watched = "val"

    length: int = 64
    tokens: Tokens = "words"
    max_vocabulary: int | None = None
    holdout: float = 0.0
    vocabulary: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_count("Text.length", self.length)
        choose("Text.tokens", self.tokens, TOKENS)
        require_between("Text.holdout", self.holdout, 0, 1, "[)")
        if self.max_vocabulary is None:
            return
        require_count("Text.max_vocabulary", self.max_vocabulary)
        if self.tokens == "bytes":
            raise SettingError(
                "Text.max_vocabulary", "be left out for bytes, of which there are 256", 256
            )
        if self.max_vocabulary < 3:
            raise SettingError(
                "Text.max_vocabulary",
                "be at least 3, since <eos> and <unk> are among them",
                self.max_vocabulary,
            )

    @classmethod
    def as_trained(cls, about: Dataset) -> dict[str, Any]:
        return {"vocabulary": about.classes}

    def has(self, folder: Path, split: str) -> bool:
        if split == "val" and self.holdout:
            return False  # it is part of the training text
        return bool(_find_files(folder, split))

    def read(self, folder: Path, split: str) -> Dataset:
        held = self.holdout > 0 and split == "val"
        part = self._read(folder, "train" if held else split)
        train: Sequence[str] | None = part if held or split == "train" else None
        if self.holdout and train is not None:
            cut = round(len(train) * (1 - self.holdout))
            part, train = (train[cut:] if held else train[:cut]), train[:cut]
        if self.vocabulary:
            vocabulary = Vocabulary(self.tokens, self.vocabulary)
        elif self.tokens == "bytes":
            vocabulary = Vocabulary.learn("bytes", "")  # all of them, whatever was read
        else:
            if train is None:
                train = self._read(folder, "train")
                train = train[: round(len(train) * (1 - self.holdout))]
            vocabulary = Vocabulary.learn(self.tokens, train, self.max_vocabulary)
        targets = len(part) - 1  # the last token has no next one
        rows = targets // self.length if split == "train" else -(-targets // self.length)
        if rows < 1:
            raise DataError(
                folder,
                f"has {len(part)} {self.tokens} in {split!r}, too few for one sample of "
                f"{self.length} and the one after them; choose a smaller length"
                if split == "train"
                else f"has {len(part)} {self.tokens} in {split!r}, of which none has a next one",
            )
        numbers = vocabulary.encode(part[: rows * self.length + 1])
        missing = rows * self.length + 1 - len(numbers)
        x = torch.cat([numbers[:-1], numbers[-1:].expand(missing)]).reshape(rows, self.length)
        y = torch.cat([numbers[1:], numbers.new_full((missing,), IGNORE)]).reshape(x.shape)
        return Dataset(
            self.name,
            split,
            "text",
            vocabulary.names,
            (self.length,),
            x.contiguous(),
            y.contiguous(),
            ignore=IGNORE,
            tokens=self.tokens,
        )

    def _read(self, folder: Path, split: str) -> Sequence[str]:
        """The tokens of a split."""
        files = _find_files(folder, split)
        if not files:
            raise self.missing(folder, f"a file {split}.txt")
        found = []
        for file in files:
            try:
                found.append(split_text(read_file(file), self.tokens))
            except DataError:
                raise
            except ValueError as error:
                raise DataError(file, error) from error
        if len(found) == 1:
            return found[0]
        return list(chain(*found)) if self.tokens == "words" else "".join(chain(*found))


def _find_files(folder: Path, split: str) -> list[Path]:
    """The files of a split; all of a single file is training text, or of files named otherwise."""
    if folder.is_file():
        return [folder] if split == "train" else []
    if not folder.is_dir():
        return []
    with data_errors_of(folder):
        named = [_find_named(folder, names) for names in _NAMES.values()]
        found = named[list(_NAMES).index(split)]
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise DataError(folder, f"has several texts for {split!r}: {names}; leave one of them")
        if found and found[0].is_dir():
            return _list_texts(found[0])
        if found or any(named) or split != "train":
            return found
        return _list_texts(folder)


def _find_named(folder: Path, names: str) -> list[Path]:
    """Files and folders that are named like a split."""
    pattern = re.compile(rf"(?:.*[._-])?(?:{names})", re.IGNORECASE)
    return sorted(
        path
        for path in folder.iterdir()
        if (path.is_dir() and re.fullmatch(names, path.name))
        or (path.suffix in _SUFFIXES and pattern.fullmatch(path.stem) and path.is_file())
    )


def _list_texts(folder: Path) -> list[Path]:
    """All texts in a folder and below, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
