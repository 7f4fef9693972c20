"""What a run measures: one JSON object on each line of a file, and for TensorBoard if wanted."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from equipoise.core import SourceError, write_atomically
from equipoise.core.json_values import to_json_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "NOT_SCORES",
    "MetricLog",
    "MetricLogWarning",
    "read_metrics",
    "require_tensorboard",
]

NOT_SCORES = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "gradient_norm",
    "forward_steps",
    "backward_steps",
    "forward_residual",
    "backward_residual",
    "skipped",
    "failed",
    "samples",
    "samples_per_second",
    "loading_fraction",
    "seconds",
    "missed",
    "nonfinite",
}
"""The numbers in lines of metrics that are not scores of the task."""


class MetricLogWarning(UserWarning):
    """A file of metrics was damaged; what is left of it is kept, and the run continues."""


class MetricLog:
    """A file of lines of metrics, which a resumed run cuts back to where its checkpoint was.

    Args:
        path: The file, made if it is not there; None writes none, as in all processes but the
            first.
        tensorboard: Folder for TensorBoard's event files; None writes none.
    """

    def __init__(self, path: Path | str | None, tensorboard: Path | str | None = None) -> None:
        self._events = None if tensorboard is None else _Events(Path(tensorboard))
        self._path = None if path is None else Path(path)
        self._file = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line; numbers that are not finite become null, as JSON has it."""
        if self._file is not None:
            text = json.dumps(to_json_values(line), separators=(",", ":"), allow_nan=False)
            with self._named():
                self._file.write(text.encode() + b"\n")
                self._file.flush()
        if self._events is not None:
            self._events.write(line)

    @property
    def position(self) -> int:
        """Bytes written so far: what a checkpoint remembers."""
        return 0 if self._file is None else self._file.tell()

    def truncate(
        self, position: int, belongs: Callable[[Mapping[str, Any]], bool] = lambda _: True
    ) -> None:
        """Forget all that was written after a checkpoint.

        If the file is damaged before that, its whole lines are kept, with a warning.

        Args:
            position: What `position` was at that time.
            belongs: Whether a line was written before it, for damaged files, whose lines are
                elsewhere now.
        """
        if self._events is not None:
            self._events.resumed = True
        if self._file is None or self._path is None:
            return
        content = self._path.read_bytes()
        before = content[:position]
        lines = before.removesuffix(b"\n").split(b"\n") if before else []
        if len(before) < position or any(_parse(line) is None for line in lines):
            position = self._mend(content, belongs)
        with self._named():
            self._file.truncate(position)
        self._file.seek(position)

    def _mend(self, content: bytes, belongs: Callable[[Mapping[str, Any]], bool]) -> int:
        """Leave the whole lines that belong in the file, and return how long it is then."""
        assert self._file is not None
        assert self._path is not None
        lines = [(line, _parse(line)) for line in content.split(b"\n")]
        kept = [line for line, value in lines if value is not None and belongs(value)]
        whole = b"".join(line + b"\n" for line in kept)
        self._file.close()
        write_atomically(self._path, whole)
        self._file = self._path.open("ab")
        warnings.warn(
            f"{self._path}: lines of metrics are damaged or missing; the {len(kept)} that are left "
            "are kept, and the run continues.",
            MetricLogWarning,
            stacklevel=4,
        )
        return len(whole)

    def sync(self) -> None:
        """Bring all lines to the disk."""
        if self._file is not None:
            with self._named():
                os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close all files; a second time does nothing."""
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What could not be written is tried again by closing: that it fails again must not hide the
        # first error, which is named.
        with nullcontext() if error is None else suppress(OSError):
            self.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors of the file system say which file it was."""
        try:
            yield
        except OSError as error:
            failure = OSError(f"{self._path}: could not be written ({error.strerror or error}).")
            failure.errno = error.errno
            raise failure from error


def require_tensorboard() -> type[SummaryWriter]:
    """Return TensorBoard's writer class, or raise `ValueError` if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and an extra
    except ImportError as error:
        raise ValueError(
            "train.tensorboard must be false where TensorBoard is not installed: pip install "
            "'equipoise[tensorboard]'."
        ) from error
    return SummaryWriter


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Return the lines of a file of metrics; a last one that was only half written is left out.

    Args:
        path: The file.
    """
    whole, newline, rest = Path(path).read_bytes().rpartition(b"\n")
    last = _parse(rest)
    return [*(_parse_all(path, whole) if newline else []), *([] if last is None else [last])]


class _Events:
    """Scalars for TensorBoard, at the step of their line."""

    def __init__(self, folder: Path) -> None:
        self._make, self._folder = require_tensorboard(), folder
        self._writer: SummaryWriter | None = None
        self.resumed = False

    def write(self, line: Mapping[str, Any]) -> None:
        step = int(line.get("step", 0))
        if self._writer is None:
            # of an interrupted run, TensorBoard shows what came before this step only
            self._writer = self._make(str(self._folder), purge_step=step if self.resumed else None)
        values = {key: value for key, value in line.items() if key not in ("kind", "step")}
        for name, value in _scalars(values, str(line.get("kind", ""))):
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _scalars(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Give the finite numbers of a tree of mappings, with the path to each joined by slashes."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _scalars(item, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


def _parse_all(path: Path | str, content: bytes) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        value = _parse(line)
        if value is None:
            raise SourceError(str(path), f"line {number} is not a JSON object.")
        found.append(value)
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
