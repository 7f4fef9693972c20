"""What a user sees of a run under way: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self, TextIO, final

from equipoise.core import ConvergenceWarning, RepeatedNotes
from equipoise.engine.log import NOT_SCORES
from equipoise.engine.pace import describe_duration
from equipoise.engine.tasks import find_metric

__all__ = ["Progress", "make_progress", "shown_by"]

FRAME = 1 / 8  # seconds between two frames of the live bar
PAUSE = 30.0  # seconds between two plain lines within an epoch


class Progress(ABC):
    """The display of a run."""

    def __init__(self) -> None:
        self._epochs = self._steps = self._first = 0
        self._began = self._shown = 0.0

    def start(self, epochs: int, steps: int, first_step: int = 0, title: str = "") -> None:
        """Begin.

        Args:
            epochs: Of the whole run.
            steps: Of the whole run.
            first_step: Steps that were made before, in a run that is resumed.
            title: A line to begin with.
        """
        self._epochs, self._steps, self._first = epochs, steps, first_step
        self._began = self._shown = time.monotonic()
        if title:
            self.note(title)

    @abstractmethod
    def step(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Tell of a step.

        Args:
            step: How many were made.
            epoch: The present one, counted from 0.
            values: `loss`, scores, `forward_steps` and `backward_steps` of this step; how many were
                `skipped` and `failed` so far.
        """

    def epoch(self, epoch: int, line: Mapping[str, Any]) -> None:
        """Tell of an epoch that is over.

        Args:
            epoch: Which, counted from 0.
            line: Its line of metrics.
        """
        parts = [self._count(epoch), *_scores(line.get("train"), loss=True)]
        parts += [
            f"{part} {score}"
            for part in ("validation", "test")
            for score in _scores(line.get(part))
        ]
        parts += [*_solver(line), *_troubles(line), describe_duration(line.get("seconds"))]
        self.note("   ".join(part for part in parts if part))

    @abstractmethod
    def note(self, text: str) -> None:
        """Show a line that stays."""

    def stop(self) -> None:
        """End; a second time does nothing."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _count(self, epoch: int) -> str:
        width = len(str(self._epochs))
        return f"epoch {epoch + 1:{width}d}/{self._epochs}"

    def _left(self, step: int) -> str:
        """Say how long the rest will take at the pace of this run so far."""
        made = step - self._first
        if made <= 0 or step >= self._steps:
            return ""
        pace = (time.monotonic() - self._began) / made
        return f"{describe_duration(pace * (self._steps - step))} left"


@final
class SilentProgress(Progress):
    """Shows nothing."""

    def step(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        return

    def note(self, text: str) -> None:
        return


@final
class PlainProgress(Progress):
    """Lines only: one for each epoch, and in long ones one for each half minute.

    Args:
        stream: Where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def step(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        if time.monotonic() - self._shown >= PAUSE:
            parts = [
                self._count(epoch),
                f"step {step}/{self._steps}",
                *_facts(values),
                self._left(step),
            ]
            self.note("   ".join(part for part in parts if part))

    def note(self, text: str) -> None:
        self._shown = time.monotonic()
        print(_printable(text), file=self._stream, flush=True)


@final
class LiveProgress(Progress):
    """One bar that is drawn anew some times in a second, with lines above it.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._console = Console(
            file=stream, markup=False, emoji=False, highlight=False, soft_wrap=True
        )
        # what a run prints belongs above the bar, unless it goes to a file; warnings go to stderr
        # in any case
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )

    def start(self, epochs: int, steps: int, first_step: int = 0, title: str = "") -> None:
        super().start(epochs, steps, first_step, title)
        self._live.start()

    def step(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._shown >= FRAME or step >= self._steps:
            self._shown = now
            self._draw(step, epoch, values)

    def note(self, text: str) -> None:
        self._console.print(_printable(text))

    def stop(self) -> None:
        self._live.stop()

    def _draw(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        facts = "   ".join(part for part in (self._left(step), *_facts(values)) if part)
        bar = ProgressBar(
            total=max(self._steps, 1), completed=step, width=24 if self._console.width > 120 else 10
        )
        row = Table.grid(padding=(0, 1))
        row.add_column(no_wrap=True)
        row.add_column(no_wrap=True)
        row.add_column()  # the one that is cut on a narrow terminal
        row.add_row(Text(self._count(epoch)), bar, Text(facts, no_wrap=True, overflow="ellipsis"))
        self._live.update(row, refresh=True)


def make_progress(quiet: bool = False, stream: TextIO | None = None) -> Progress:
    """Choose a display: a live bar on a terminal, lines elsewhere, nothing when `quiet`.

    Args:
        quiet: Whether to show nothing.
        stream: Where to write; None takes stderr.
    """
    stream = sys.stderr if stream is None else stream
    if quiet or stream is None:  # there is no stderr in a process without a console
        return SilentProgress()
    return (
        LiveProgress(stream)
        if stream.isatty() and find_spec("rich") is not None
        else PlainProgress(stream)
    )


def _facts(values: Mapping[str, Any]) -> list[str]:
    """Say what is known of a step."""
    troubles = [f"{values[name]:.0f} {name}" for name in ("failed", "skipped") if values.get(name)]
    return [*_scores(values, loss=True), *troubles, *_solver(values)]


def _scores(values: Mapping[str, Any] | None, *, loss: bool = False) -> list[str]:
    """Name the scores, and first the loss if wanted."""
    numbers = {
        name: value for name, value in (values or {}).items() if isinstance(value, int | float)
    }
    names = ["loss"] if loss and "loss" in numbers else []
    names += [name for name in numbers if name not in NOT_SCORES]
    return [find_metric(name).describe(numbers[name]) for name in names]


@contextmanager
def shown_by(progress: Progress, notes: RepeatedNotes) -> Iterator[None]:
    """Show warnings about solves as lines of a display; a silent display leaves them as they are.

    Args:
        progress: The display.
        notes: Shows them there.
    """
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, ConvergenceWarning):
                notes.note(str(message))
            else:
                show(message, category, *rest, **named)

        if type(progress) is not SilentProgress:
            warnings.showwarning = note
            warnings.simplefilter("always", ConvergenceWarning)
        yield


def _solver(values: Mapping[str, Any]) -> list[str]:
    steps = [
        f"{values[f'{way}_steps']:.1f} {way}"
        for way in ("forward", "backward")
        if values.get(f"{way}_steps") is not None
    ]
    return [f"steps {', '.join(steps)}"] if steps else []


def _troubles(line: Mapping[str, Any]) -> list[str]:
    """Say what went wrong in an epoch."""
    troubles = []
    for way in ("forward", "backward"):
        ends = line.get(f"{way}_status") or {}
        missed = sum(count for name, count in ends.items() if name != "CONVERGED")
        if missed:
            troubles.append(f"{missed} of {sum(ends.values())} {way} not converged")
    return troubles + ([f"{line['skipped']} skipped"] if line.get("skipped") else [])


def _printable(text: str) -> str:
    """Show control characters by their codes: they would move the cursor or change colours."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text
    )
