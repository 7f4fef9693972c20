"""Running text as word numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch

from equipoise.core import require_count
from equipoise.data.bounded_io import find_file, read_file
from equipoise.data.dataset import Dataset
from equipoise.data.errors import DataError
from equipoise.data.reader import DATASETS, Reader

__all__ = ["Text"]

_FILES = {"train": "ptb.train.txt", "val": "ptb.valid.txt", "test": "ptb.test.txt"}
_UNKNOWN, _END = "<unk>", "<eos>"
IGNORE = -100  # what torch's cross entropy leaves out by default


@final
@DATASETS.register("text")
@dataclass(frozen=True)
class Text(Reader):
    """Running text for language models, as the Penn Treebank is published.

    Words are separated by blanks, each line ends in `<eos>`, and the vocabulary is that of the
    training file in order of first appearance, with `<unk>` for all other words (Marcus et al.,
    1993; Mikolov et al., 2010). `x` is one long tensor, and `y` is the next word of each.

    Args:
        length: Cuts `x` and `y` into rows of this many words, each of which is a sample; what is
            left over is dropped.
    """

    name = "text"
    summary = "Running text as word numbers (ptb.train.txt, ptb.valid.txt, ptb.test.txt)."
    splits = ("train", "val", "test")

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            require_count("Text.length", self.length)

    def read(self, folder: Path, split: str) -> Dataset:
        files = dict.fromkeys((_FILES["train"], _FILES[split]))
        absent = [file for file in files if find_file(folder, file) is None]
        if absent:
            raise self.missing(folder, *absent)
        words = _words(folder / _FILES["train"])
        vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*words, _END, _UNKNOWN]))}
        if split != "train":
            words = _words(folder / _FILES[split])
        unknown = vocabulary[_UNKNOWN]
        x = torch.from_numpy(
            np.fromiter(
                (vocabulary.get(word, unknown) for word in words), dtype=np.int64, count=len(words)
            )
        )
        y = torch.cat([x[1:], torch.tensor([IGNORE])])
        if self.length is not None:
            rows = (len(x) - 1) // self.length  # the last word has no next one
            if not rows:
                raise DataError(
                    folder / _FILES[split],
                    f"holds {len(x)} words, too few for one row of {self.length}",
                )
            x, y = (tensor[: rows * self.length].reshape(rows, self.length) for tensor in (x, y))
        return Dataset(
            self.name, split, "text", tuple(vocabulary), tuple(x.shape[1:]), x, y, ignore=IGNORE
        )


def _words(path: Path) -> list[str]:
    content = read_file(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(path, f"is not text in UTF-8 (byte {error.start})") from error
    if "\0" in text:
        raise DataError(path, "is not text: it holds zero bytes")
    if not text.strip():
        raise DataError(path, "holds no words")
    # Lines end at line feeds only: splitlines would also cut at rarer characters within them.
    return [word for line in text.removesuffix("\n").split("\n") for word in (*line.split(), _END)]
