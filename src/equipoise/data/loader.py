"""Samples read ahead of their use, in processes of their own, and kept where they fit in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data

from equipoise.core import require_whole
from equipoise.core.interrupt import follow_parent
from equipoise.data.dataset import Dataset

__all__ = ["Loader", "LoaderWarning", "Loading"]

MAX_WORKERS = 1024
MAX_CHUNK = 16  # samples that a worker reads at once
CHUNK_BYTES = 2**22  # of larger samples it reads fewer
BATCHES_AHEAD = 2
MIN_FORKED, MIN_SPAWNED = 32, 2000  # samples worth a start; a spawned process imports torch anew
START_ERRORS = (OSError, RuntimeError, PicklingError, AttributeError, TypeError, AssertionError)

Sample = tuple[Tensor, Tensor]
Packed = tuple[NDArray[Any], NDArray[Any]]


class LoaderWarning(UserWarning):
    """Samples are not read ahead by other processes as was asked for."""


class Loading:
    """How the samples of a run are loaded; its data sets share the memory.

    Neither setting changes what is loaded.

    Args:
        workers: Processes that read samples ahead, at most one for each core; 0 reads them when
            they are needed. Data in memory need none.
        memory: Bytes of samples to keep, so that they are read from files once. A data set that
            does not fit is not kept.
    """

    def __init__(self, workers: int = 0, memory: int = 0) -> None:
        require_whole("Loading.workers", workers, MAX_WORKERS)
        require_whole("Loading.memory", memory)
        self.workers, self.memory = min(workers, _cores()), memory
        self._loaders: list[Loader] = []

    def loader(self, dataset: Dataset) -> Loader:
        """Return the loader of a data set, always the same one.

        Args:
            dataset: Which one.
        """
        for known in self._loaders:
            if known.dataset is dataset:
                return known
        self._loaders.append(Loader(dataset, self))
        return self._loaders[-1]

    def take(self, size: int) -> bool:
        """Return whether so many bytes are left, and count them as used if they are."""
        fits = size <= self.memory
        self.memory -= size if fits else 0
        return fits


class Loader:
    """Loads the batches of one data set.

    Workers decode and do nothing else, so whatever is random, fails or is remembered happens in
    this process, in the order of the batches: a sample that a worker could not read is read again
    here, and what is wrong with it is raised here.

    torch's `DataLoader` starts, feeds and watches the workers. They hold at most two batches that
    nobody has asked for yet.

    Args:
        dataset: What to load.
        loading: How.
    """

    def __init__(self, dataset: Dataset, loading: Loading) -> None:
        self.dataset, self.loading = dataset, loading
        self._known = torch.zeros(len(dataset), dtype=torch.bool)  # what is kept
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._keeps = dataset.x is None and loading.memory > 0

    def batches(self, rows: Sequence[Tensor], *, replace_bad: bool) -> Generator[Sample]:
        """Yield the samples at some positions, batch by batch; close it if it is left early.

        Args:
            rows: The positions of each batch.
            replace_bad: As of `Dataset.gather`.
        """
        missing = ~self._known
        with closing(self._read_ahead(rows, missing)) as ahead:
            for positions in rows:
                samples: dict[int, Sample] = next(ahead, {})
                if self._x is not None and self._y is not None and self._known[positions].all():
                    yield self._x[positions], self._y[positions]
                    continue

                def read(position: int, samples: dict[int, Sample] = samples) -> Sample:
                    return self._read(position, samples)

                yield self.dataset.gather(positions, replace_bad=replace_bad, read=read)

    def _read(self, position: int, samples: dict[int, Sample]) -> Sample:
        """A sample that is kept, was read ahead, or is read now."""
        if self._x is not None and self._y is not None and self._known[position]:
            return self._x[position], self._y[position]
        sample = samples.get(position) or self.dataset[position]
        if self._keeps:
            self._keep(position, *sample)
        return sample

    def _keep(self, position: int, x: Tensor, y: Tensor) -> None:
        if self._x is None or self._y is None:
            count = len(self.dataset)
            self._keeps = self.loading.take(count * (x.nbytes + y.nbytes))
            if not self._keeps:
                return
            # Memory that is not written to is not taken from the system.
            self._x = torch.empty(count, *x.shape, dtype=x.dtype)
            self._y = torch.empty(count, *y.shape, dtype=y.dtype)
        if x.shape == self._x.shape[1:] and y.shape == self._y.shape[1:]:
            self._x[position], self._y[position] = x, y
            self._known[position] = True

    def _read_ahead(self, rows: Sequence[Tensor], missing: Tensor) -> Generator[dict[int, Sample]]:
        """Yield what workers read of each batch; nothing once there are none."""
        chunk = max(1, min(MAX_CHUNK, CHUNK_BYTES // max(1, int(np.prod(self.dataset.shape)))))

        def split(positions: Tensor) -> list[list[int]]:
            wanted = positions[missing[positions]].tolist()
            return [wanted[i : i + chunk] for i in range(0, len(wanted), chunk)]

        if not self._needs_workers(rows, missing):
            return
        count = self.loading.workers
        longest = max(len(split(each)) for each in rows)
        chunks = _Chunks(split(each) for each in rows)
        try:
            workers = _Workers(self.dataset, chunks, count, -(-BATCHES_AHEAD * longest // count))
        except START_ERRORS as error:
            reason = str(error).partition("\n")[0]
            _warn(f"no process could be started to read samples ahead ({reason})")
            return
        with closing(workers):
            for positions in rows:
                found: dict[int, Sample] = {}
                for wanted in split(positions):
                    read = workers.read()
                    if read is None:
                        _warn("a process that reads samples ahead was ended from outside")
                        return
                    for position, each in zip(wanted, read, strict=True):
                        if each is not None:
                            found[position] = torch.from_numpy(each[0]), torch.from_numpy(each[1])
                yield found

    def _needs_workers(self, rows: Sequence[Tensor], missing: Tensor) -> bool:
        """Whether there is enough to read, and this process may have others."""
        if self.dataset.x is not None or not self.loading.workers:
            return False
        forks = multiprocessing.get_start_method() == "fork"
        wanted = sum(int(missing[positions].sum()) for positions in rows)
        daemon = multiprocessing.current_process().daemon
        return wanted >= (MIN_FORKED if forks else MIN_SPAWNED) and not daemon


class _Chunks:
    """The chunks of all batches one after another, as the sampler of a `DataLoader`."""

    def __init__(self, batches: Iterator[list[list[int]]]) -> None:
        self._chunks = (chunk for batch in batches for chunk in batch)

    def __iter__(self) -> Iterator[list[int]]:
        return self._chunks


class _Workers:
    """Processes that read chunks in order, until they are closed.

    Args:
        dataset: Where the samples are.
        chunks: What to read.
        count: How many processes.
        ahead: Chunks that each may have read or have to read.
    """

    def __init__(self, dataset: Dataset, chunks: _Chunks, count: int, ahead: int) -> None:
        loader: data.DataLoader[Any] = data.DataLoader(
            _Reader(dataset),
            batch_size=None,
            sampler=chunks,
            num_workers=count,
            prefetch_factor=ahead,
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # else the run's own would be drawn from, for their seeds
        )
        before = set(multiprocessing.active_children())
        with _quiet_start():
            self._results: Iterator[list[Packed | None]] | None = iter(loader)
        processes = set(multiprocessing.active_children()) - before
        self._kill = weakref.finalize(self, _kill, processes)  # at exit, too

    def read(self) -> list[Packed | None] | None:
        """Return the samples of the next chunk, `None` for bad ones; or `None` if one died."""
        assert self._results is not None
        try:
            return next(self._results)
        except (RuntimeError, OSError, EOFError):  # samples raise nothing in a worker
            return None

    def close(self) -> None:
        """End the processes, at once."""
        self._kill()
        self._results = None


class _Reader(data.Dataset[list["Packed | None"]]):
    """Reads chunks of samples in a worker.

    Arrays go through a pipe: tensors would go through shared memory, of which containers have
    little.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, positions: list[int]) -> list[Packed | None]:
        return [self._read(position) for position in positions]

    def _read(self, position: int) -> Packed | None:
        try:
            x, y = self.dataset[position]
            return x.numpy(), y.numpy()
        except Exception:  # whatever it is: the main process reads it again, and says so
            return None


def _as_it_is(chunk: list[Packed | None]) -> list[Packed | None]:
    return chunk


def _start_worker(_number: int) -> None:
    """Leave signals to the main process, and end with it."""
    follow_parent()


def _kill(processes: set[Any]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Start processes without side effects on this one, or of the program's own file on them."""
    main_thread = threading.current_thread() is threading.main_thread()
    number = getattr(signal, "SIGCHLD", None)
    handler = signal.getsignal(number) if number is not None and main_thread else None
    main = sys.modules["__main__"]
    # A spawned process would run the user's script again, unless that guards against it.
    if multiprocessing.get_start_method() != "fork":
        sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        with warnings.catch_warnings():
            # Forks beside threads: workers use no locks that others may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        sys.modules["__main__"] = main
        if number is not None and handler is not None:
            # torch's would raise wherever this process is when a worker dies.
            signal.signal(number, handler)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # which only Linux has
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _warn(reason: str) -> None:
    warnings.warn(f"{reason}; this process reads them", LoaderWarning, stacklevel=4)
