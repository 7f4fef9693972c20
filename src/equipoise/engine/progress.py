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
from equipoise.core.printable import printable
from equipoise.engine.pace import Pace, describe_duration
from equipoise.engine.progress_line import describe_epoch, describe_step, fit_line

__all__ = ["Progress", "make_progress", "shown_by"]

FRAME = 1 / 8  # seconds between two frames of the live bar
PAUSE = 30.0  # seconds between two plain lines within an epoch


class Progress(ABC):
    """The display of a run."""

    def __init__(self) -> None:
        self._epochs, self._shown, self._pace = 0, time.monotonic(), Pace()
        self._counted: tuple[str, int, float] | None = None  # what, from where on, and since when

    def start(
        self,
        epochs: int,
        steps: int,
        first_step: int = 0,
        title: str = "",
        *,
        scored: int = 0,
        batch: int = 1,
    ) -> None:
        """Begin.

        Args:
            epochs: Of the whole run.
            steps: Of the whole run.
            first_step: Steps that were made before, in a run that is resumed.
            title: A line to begin with.
            scored: Samples that evaluations will score from now on, for the time that is left.
            batch: Samples in each step.
        """
        self._epochs, self._pace = epochs, Pace(steps, first_step, scored, batch)
        self._shown = time.monotonic()
        if title:
            self.note(title)

    def evaluate(self, done: int, total: int, epoch: int = 0) -> None:
        """Tell of an evaluation under way, after an epoch of a run or by itself.

        Args:
            done: How many samples are scored.
            total: How many there are.
            epoch: The last epoch, counted from 0.
        """
        self._pace.evaluate(done)
        if done < total:
            self._show_evaluation(done, total, epoch)

    def _show_evaluation(self, done: int, total: int, epoch: int) -> None:
        """Show how far an evaluation is."""
        return

    def count(self, done: int, total: int, what: str) -> None:
        """Tell of work under way that is no run.

        Args:
            done: How much is done.
            total: How much there is.
            what: Of what, in the plural.
        """
        if not self._counted or self._counted[0] != what:
            self._counted = what, done, time.monotonic()
        if done >= total:
            return
        _, first, began = self._counted
        spent = time.monotonic() - began
        left = spent / (done - first) * (total - done) if done > first else None
        duration = describe_duration(left)
        self._show_count(
            done, total, [f"{done:,}/{total:,} {what}", duration and f"{duration} left"]
        )

    def _show_count(self, done: int, total: int, parts: list[str]) -> None:
        """Show how far such work is."""
        return

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
        count = self._count(epoch)
        short = [count, *describe_epoch(line, short=True)]
        self.note(fit_line([count, *describe_epoch(line)], short, len(count) + 2))

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
        if not self._epochs:  # an evaluation by itself
            return ""
        width = len(str(self._epochs))
        return f"epoch {min(epoch + 1, self._epochs):{width}d}/{self._epochs}"

    def _left(self) -> str:
        """Say how long the rest will take at the pace of this run so far."""
        left = describe_duration(self._pace.left() or None)
        return f"{left} left" if left else ""


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
        self._pace.step(step)
        if time.monotonic() - self._shown >= PAUSE:
            count = self._count(epoch)
            facts = describe_step(values, short=True)
            parts = [f"step {step}/{self._pace.steps}", *facts, self._left()]
            self.note(fit_line([count, *parts], indent=len(count) + 2))

    def _show_evaluation(self, done: int, total: int, epoch: int) -> None:
        if time.monotonic() - self._shown >= PAUSE:
            self.note(fit_line([self._count(epoch), _evaluated(done, total), self._left()]))

    def _show_count(self, done: int, total: int, parts: list[str]) -> None:
        if time.monotonic() - self._shown >= PAUSE:
            self.note(fit_line(parts))

    def note(self, text: str) -> None:
        self._shown = time.monotonic()
        print(printable(text), file=self._stream, flush=True)


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

    def step(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        self._pace.step(step)
        steps = self._pace.steps
        if self._frame_is_due() or step >= steps:
            self._draw(step, steps, epoch, [self._left(), *describe_step(values)])

    def _show_evaluation(self, done: int, total: int, epoch: int) -> None:
        if self._frame_is_due():
            self._draw(done, total, epoch, [_evaluated(done, total), self._left()])

    def _show_count(self, done: int, total: int, parts: list[str]) -> None:
        if self._frame_is_due():
            self._draw(done, total, 0, parts)

    def _frame_is_due(self) -> bool:
        return time.monotonic() - self._shown >= FRAME

    def note(self, text: str) -> None:
        self._console.print(printable(text))

    def stop(self) -> None:
        self._live.stop()

    def _draw(self, done: int, total: int, epoch: int, parts: list[str]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._shown = time.monotonic()
        self._live.start()  # unless it is
        facts = "   ".join(part for part in parts if part)
        bar = ProgressBar(
            total=max(total, 1), completed=done, width=24 if self._console.width > 120 else 10
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


def _evaluated(done: int, total: int) -> str:
    return f"evaluating {done:,}/{total:,} samples"
