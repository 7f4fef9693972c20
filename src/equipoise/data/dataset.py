"""What every reader returns: samples with targets, and what is known about them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import data

from equipoise.core import SettingError, choose
from equipoise.data.bad_sample import BadSampleError, BadSamples, is_bad_sample
from equipoise.data.encoding import Encoding, RawTable
from equipoise.data.errors import DataError
from equipoise.data.vocabulary import Tokens

__all__ = ["TASKS", "Dataset", "Task"]

Task = Literal["classification", "segmentation", "text", "arrays", "regression", "images"]
TASKS: tuple[Task, ...] = get_args(Task)
MAX_LISTED = 20  # classes named in a message


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with targets, in memory or read one by one; also fit for `torch`'s `DataLoader`.

    Args:
        name: The registered name of its reader.
        split: The published split: `train`, `val` or `test`.
        task: What the targets are: classes, masks of classes, the next words, labels of plain
            arrays, numbers, or nothing beside the images.
        classes: Names of the classes, the vocabulary, or names of the numbers to predict.
        shape: Of one sample; of the first one where they differ.
        x: All samples, uint8 (images, 0 to 255), float32 or int64 (words); `None` if they are
            read one by one. Of a table that is not encoded yet, float64.
        y: All targets, int64, or float32 (samples, numbers) of a regression; also of
            samples that are read one by one, if they are known before.
        sample: Reads the sample at a position, if they are read one by one.
        count: How many samples `sample` can read.
        ignore: The target that losses and scores must leave out, if there is one.
        columns: Names of the features of a table, if its file names them.
        tokens: What a text was split into.
        files: The files of each sample, if samples are read one by one from files.
        raw: What the numbers of a table stand for that is not encoded yet.
        encoding: What became of the columns of a table.
        bad: Where samples that cannot be read are noted, which `gather` then does without; `None`
            raises their errors.
        one_by_one: Whether samples differ in shape, so that each is a batch of its own.
        value_range: The least and the largest number of images, if only that is known of them; of
            samples in memory, `about` finds them.
    """

    name: str
    split: str
    task: Task
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    x: Tensor | None = None
    y: Tensor | None = None
    sample: Callable[[int], tuple[Tensor, Tensor]] | None = None
    count: int = 0
    ignore: int | None = None
    columns: tuple[str, ...] = ()
    tokens: Tokens | None = None
    files: tuple[tuple[Path, ...], ...] = ()
    raw: RawTable | None = None
    encoding: Encoding | None = None
    bad: BadSamples | None = None
    one_by_one: bool = False
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        choose("Dataset.task", self.task, TASKS)
        if self.sample is None and (self.x is None or self.y is None or len(self.x) != len(self.y)):
            raise ValueError(
                "Dataset must have x and y of equal length, or sample and count; got neither "
                f"in {self.name!r}."
            )

    @property
    def continuous(self) -> bool:
        """Whether each sample goes on where the one before it ends, as segments of a text do."""
        return self.task == "text"

    def __len__(self) -> int:
        return self.count if self.x is None else len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"Dataset has {len(self)} samples; got index {index}.")
        if self.x is not None and self.y is not None:
            return self.x[position], self.y[position]
        assert self.sample is not None  # __post_init__ saw to it
        found = self.sample(position)
        if (
            not isinstance(found, tuple)
            or len(found) != 2
            or not all(isinstance(each, Tensor) for each in found)
        ):
            kinds = [type(each).__name__ for each in found] if isinstance(found, tuple) else []
            raise SettingError(
                f"Sample {position} of {self.name!r} {self.split}",
                "be a pair of tensors, the sample and its target",
                None,
                "Let `sample` of its Dataset return torch.tensor(label) for a plain label.",
                got=f"({', '.join(kinds)})" if kinds else type(found).__name__,
            )
        return found

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.shape) or "scalar"
        where = "read one by one" if self.x is None else "in memory"
        return (
            f"Dataset({self.name} {self.split}: {len(self)} samples {shape}, "
            f"{len(self.classes)} classes, {self.task}, {where})"
        )

    def gather(
        self,
        indices: Tensor | Sequence[int],
        *,
        replace_bad: bool = False,
        read: Callable[[int], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return some samples as one batch.

        With `bad`, samples that cannot be read are left out, or replaced by the next one that can.
        Both are functions of the files alone, so that a run can be repeated.

        Args:
            indices: Their positions, from 0 to `len(self) - 1`.
            replace_bad: Whether the batch keeps its length, as in training.
            read: Returns the sample at a position in place of `self[position]`, which may have been
                read ahead.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        if self.x is not None and self.y is not None:
            return self.x[index], self.y[index]
        found = (self._read(i, read or self.__getitem__, replace_bad) for i in index.tolist())
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            return torch.zeros(0, *self.shape), torch.zeros(0, dtype=torch.int64)
        if len({x.shape for x, _ in pairs}) > 1:
            raise ValueError(
                f"Dataset.gather must have samples of one shape; {self.name!r} has several. "
                "Load it with size=(h, w), data.options.size in a config."
            )
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def _read(
        self, position: int, read: Callable[[int], tuple[Tensor, Tensor]], replace_bad: bool
    ) -> tuple[Tensor, Tensor] | None:
        """A sample, or if it cannot be read the next one or nothing."""
        first: DataError | None = None
        for ahead in range(len(self) if replace_bad else 1):
            each = (position + ahead) % len(self)
            file = self.files[each][0] if self.files else None
            if self.bad is not None and file is not None and self.bad.knows(file):
                continue
            try:
                return read(each)
            except DataError as error:
                if not is_bad_sample(error):
                    raise
                if self.bad is None:
                    raise BadSampleError(error.source, error.reason) from error
                self.bad.add(file, error)
                first = first or error
        if replace_bad:
            raise first or DataError(self.name, f"no sample of {self.split!r} can be read")
        return None

    def about(self) -> dict[str, Any]:
        """Return what is known about the samples, as plain values."""
        names = ("name", "task", "classes", "shape", "ignore", "columns", "tokens")
        encoding = {} if self.encoding is None else {"encoding": self.encoding.to_dict()}
        found = self._find_range()
        values = {} if found is None else {"value_range": found}
        return {name: getattr(self, name) for name in names} | encoding | values

    def _find_range(self) -> tuple[float, float] | None:
        if self.x is None or len(self.shape) != 3 or not self.x.numel():
            return self.value_range
        if self.x.dtype == torch.uint8:
            return 0.0, 1.0  # what bytes become
        low, high = (float(bound) for bound in self.x.aminmax())
        return (low, high) if math.isfinite(high - low) else None

    def select_rows(self, indices: Tensor | Sequence[int]) -> Dataset:
        """Return a data set of some of the samples, in the order given.

        Args:
            indices: Their positions, from 0 to `len(self) - 1`.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        if self.x is not None and self.y is not None:
            raw = None if self.raw is None else self.raw.select_rows(index.numpy())
            return replace(self, x=self.x[index], y=self.y[index], raw=raw)
        positions = index.tolist()
        y = None if self.y is None else self.y[index]
        return replace(
            self,
            sample=_Selected(self, tuple(positions), y),
            count=len(positions),
            y=y,
            files=tuple(self.files[i] for i in positions) if self.files else (),
        )

    def select_classes(self, classes: Sequence[int | str]) -> Dataset:
        """Return the samples of some classes, renumbered in the order given.

        Args:
            classes: Names or numbers of classes, each once.
        """
        key = "Dataset.select_classes.classes"
        if self.task not in ("classification", "arrays") or self.y is None:
            raise SettingError(
                key,
                "be for data with one class for each sample, known before they are read",
                self,
                got=f"{self.name!r}, {self.task}",
            )
        labels = [self._find_class(key, each) for each in classes]
        if len(set(labels)) != len(labels) or not labels:
            raise SettingError(key, "be different classes", list(classes))
        number = torch.full((len(self.classes),), -1)
        number[list(labels)] = torch.arange(len(labels))
        rows = torch.nonzero(number[self.y] >= 0).flatten()
        kept = self.select_rows(rows)
        assert kept.y is not None  # since ours is not
        y = number[kept.y]
        return replace(
            kept,
            y=y,
            sample=None if self.sample is None else _Selected(self, tuple(rows.tolist()), y),
            classes=tuple(self.classes[label] for label in labels),
        )

    def _find_class(self, key: str, wanted: int | str) -> int:
        """The number of a class, by its name or its number."""
        if isinstance(wanted, str):
            if wanted in self.classes:
                return self.classes.index(wanted)
            known, more = self.classes[:MAX_LISTED], len(self.classes) > MAX_LISTED
            near = difflib.get_close_matches(wanted, self.classes, n=1)
            raise SettingError(
                key,
                f"be names of classes, {', '.join(known)}{', ...' * more}, or their numbers",
                wanted,
                f"Did you mean {near[0]!r}?" if near else "",
            )
        if 0 <= wanted < len(self.classes):
            return wanted
        raise SettingError(key, f"be numbers from 0 to {len(self.classes) - 1}, or names", wanted)

    def in_memory(self) -> Dataset:
        """Return the same samples, all read at once."""
        if self.x is not None:
            return self
        x, y = self.gather(range(len(self)))
        return replace(self, x=x, y=y, sample=None, count=0, files=())


@dataclass(frozen=True, eq=False)
class _Selected:
    """Reads some samples of a data set; a class, so that data-loading workers can pickle it.

    Args:
        whole: The data set.
        positions: Where the samples are in it.
        y: Their targets, if they are known, which may be numbered anew.
    """

    whole: Dataset
    positions: tuple[int, ...]
    y: Tensor | None

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.whole[self.positions[index]]
        return x, y if self.y is None else self.y[index]
