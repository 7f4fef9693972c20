"""Batches in an order that depends on nothing but a seed and the number of the epoch."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from equipoise.core import SettingError, require_count, require_whole
from equipoise.data.dataset import Dataset
from equipoise.data.loader import Loading
from equipoise.data.transform import Transform

__all__ = ["batch_count", "batch_positions", "batches"]


def batches(
    dataset: Dataset,
    size: int,
    seed: int = 0,
    epoch: int = 0,
    *,
    shuffle: bool = True,
    transform: Transform | None = None,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
    stop: int | None = None,
    continuous: bool = False,
    loading: Loading | None = None,
) -> Generator[tuple[Tensor, Tensor]]:
    """Return the batches of one epoch, from batch number `start` on.

    The order is a pure function of `(seed, epoch)`, and the random numbers of a transform one of
    `(seed, epoch, rank, batch)`, so a run resumed at a batch is the same bit for bit. Rank r of w
    gets every w-th sample of the order, from the r-th on: the k-th batches of all ranks together
    are the k-th batch, of `w size` samples, of a single process.

    With `shuffle`, all ranks get equally many samples, so that none waits for another: the last
    `len(dataset) mod world` of the order are left out. Without it every sample comes once, as
    scores need. Where `dataset.bad` notes samples that cannot be read, others come in their place
    with `shuffle`; without it they are left out, so that a batch may be empty.

    With `continuous` the samples are segments of a text, which is read in `w size` pieces side by
    side: the i-th sample of each batch goes on where the i-th of the last one ended. With `shuffle`
    the pieces have equally many samples, and what is left over is left out; without it the first
    ones have one more.

    Args:
        dataset: Where the samples come from.
        size: Samples in each batch of each rank; the last batch may be smaller. Those of a data set
            that is `one_by_one` have one.
        seed: Seeds the order and the transforms.
        epoch: The number of the epoch.
        shuffle: Whether to draw an order; otherwise it is that of the data set.
        transform: What to do to each batch.
        rank: The number of this process.
        world: How many processes there are.
        start: The number of the first batch to return.
        stop: The number of the batch before which to end; by default all are returned.
        continuous: Whether the samples of a row go on from batch to batch.
        loading: Reads samples ahead and keeps them; by default they are read when they are needed.
            Close the batches if you leave them early, so that its workers end.
    """
    require_count("batches.size", size)
    size = 1 if dataset.one_by_one else size
    samples = _positions(dataset, size, shuffle, rank, world, continuous)
    for name, value in (("seed", seed), ("epoch", epoch), ("start", start)):
        require_whole(f"batches.{name}", value)
    count = -(-len(samples) // size)
    if start > count:
        raise SettingError("batches.start", f"be at most {count}, the number of batches", start)
    last = count if stop is None else min(count, stop)
    return _run(
        dataset,
        size,
        seed,
        epoch,
        shuffle,
        transform,
        rank,
        world,
        range(start, last),
        continuous,
        loading or Loading(),
    )


def batch_count(
    dataset: Dataset,
    size: int,
    *,
    shuffle: bool = True,
    rank: int = 0,
    world: int = 1,
    continuous: bool = False,
) -> int:
    """Return how many batches `batches` makes in a whole epoch.

    Args:
        dataset: As in `batches`.
        size: As in `batches`.
        shuffle: As in `batches`.
        rank: As in `batches`.
        world: As in `batches`.
        continuous: As in `batches`.
    """
    require_count("batch_count.size", size)
    size = 1 if dataset.one_by_one else size
    return -(-len(_positions(dataset, size, shuffle, rank, world, continuous)) // size)


def batch_positions(
    dataset: Dataset,
    size: int,
    seed: int = 0,
    epoch: int = 0,
    *,
    shuffle: bool = True,
    rank: int = 0,
    world: int = 1,
    continuous: bool = False,
) -> list[Tensor]:
    """Return where in the data set the samples of each of the batches of an epoch are.

    Args:
        dataset: As in `batches`.
        size: As in `batches`.
        seed: As in `batches`.
        epoch: As in `batches`.
        shuffle: As in `batches`.
        rank: As in `batches`.
        world: As in `batches`.
        continuous: As in `batches`.
    """
    positions = _positions(dataset, size, shuffle, rank, world, continuous)
    if continuous:
        order = _side_by_side(positions.stop, size * world)
    elif shuffle:
        order = torch.randperm(len(dataset), generator=_generator(seed, epoch))
    else:
        order = torch.arange(len(dataset))
    return list(torch.split(order[positions.start : positions.stop : world], size))


def _positions(
    dataset: Dataset, size: int, shuffle: bool, rank: int, world: int, continuous: bool
) -> range:
    """Return the positions in the order that belong to a rank."""
    require_count("batches.world", world)
    require_whole("batches.rank", rank)
    if rank >= world:
        raise SettingError("batches.rank", f"be at most {world - 1}", rank)
    total = len(dataset)
    if shuffle:
        total -= total % world
        if not total:
            rule = f"be at most {len(dataset)}, the number of samples"
            raise SettingError("batches.world", rule, world)
        if continuous:
            total -= total % min(size * world, total)
    return range(rank, total, world)


def _run(
    dataset: Dataset,
    size: int,
    seed: int,
    epoch: int,
    shuffle: bool,
    transform: Transform | None,
    rank: int,
    world: int,
    numbers: range,
    continuous: bool,
    loading: Loading,
) -> Generator[tuple[Tensor, Tensor]]:
    order = batch_positions(
        dataset,
        size,
        seed,
        epoch,
        shuffle=shuffle,
        rank=rank,
        world=world,
        continuous=continuous,
    )
    rows = order[numbers.start : numbers.stop]
    found = loading.loader(dataset).batches(rows, replace_bad=shuffle)
    with closing(found):
        for number, (x, y) in zip(numbers, found, strict=True):
            if transform is not None and len(x):
                x, y = transform(x, y, generator=_generator(seed, epoch, rank, number))
            yield x, y


def _side_by_side(total: int, pieces: int) -> Tensor:
    """The order in which so many samples come in pieces side by side, the longer ones first."""
    pieces = max(min(pieces, total), 1)
    whole, longer = divmod(total, pieces)
    piece = torch.arange(pieces)
    starts = piece * whole + piece.clamp(max=longer)
    columns = [starts + column for column in range(whole)]
    return torch.cat([*columns, starts[:longer] + whole])


def _generator(*numbers: int) -> torch.Generator:
    # Neighbouring seeds of torch's generator are not promised to be unrelated; a seed sequence
    # mixes them.
    mixed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed >> 1)
