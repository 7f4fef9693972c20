from __future__ import annotations

import importlib.util
import io
import math
import re
import sys
import time
from typing import Any

import pytest

from equipoise.engine import progress as module
from equipoise.engine.pace import Pace
from equipoise.engine.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    SilentProgress,
    make_progress,
)

EPOCH: dict[str, Any] = {
    "kind": "epoch",
    "epoch": 2,
    "train": {"loss": 0.12341, "accuracy": 0.961},
    "test": {
        "loss": 0.2,
        "accuracy": 0.952,
        "samples": 360,
        "missed": 0,
        "status": {"CONVERGED": 360},
        "forward_steps": 7.0,
    },
    "forward_steps": 6.5,
    "backward_steps": 4.0,
    "forward_status": {"CONVERGED": 128},
    "backward_status": {"CONVERGED": 128},
    "skipped": 0,
    "seconds": 12.1,
}
VALUES = {
    "loss": 0.5,
    "accuracy": 0.75,
    "forward_steps": 6.5,
    "backward_steps": 4.0,
    "skipped": 0,
    "failed": 0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def seen(stream: io.StringIO) -> str:
    """What was written, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def shown(line: dict[str, Any], epochs: int = 10) -> str:
    stream = io.StringIO()
    display = make_progress(stream=stream)
    display.start(epochs, 100)
    display.epoch(int(line.get("epoch", 2)), line)
    return stream.getvalue()


def test_display_is_chosen_by_the_stream(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(make_progress(stream=Terminal()), LiveProgress)
    assert isinstance(make_progress(stream=io.StringIO()), PlainProgress)
    assert isinstance(make_progress(quiet=True, stream=Terminal()), SilentProgress)
    make_progress().note("to stderr")
    assert capsys.readouterr() == ("", "to stderr\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert isinstance(make_progress(), SilentProgress)
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "rich" else importlib.util.find_spec(name)
    )
    assert isinstance(make_progress(stream=Terminal()), PlainProgress)


def test_quiet_display_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress(quiet=True) as display:
        display.start(1, 2, title="title")
        display.step(1, 0, VALUES)
        display.epoch(0, EPOCH)
        display.note("note")
        display.stop()
    assert capsys.readouterr() == ("", "")


def test_epoch_line_reads_well() -> None:
    expected = "epoch  3/10  loss 0.1234  accuracy 96.1 %  test 95.2 %  steps 6.5+4.0  12 s\n"
    assert shown(EPOCH) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"validation": {"accuracy": 1.0}}, "val 100.0 %"),
        ({"validation": {"accuracy": 0.9996}}, "val 99.9 %"),
        ({"train": {"loss": 3.0, "perplexity": 20.0855}}, "loss 3  perplexity 20.09"),
        ({"train": {"psnr": 31.4159}}, "PSNR 31.42 dB"),
        (
            {"train": {"miou": 0.51234, "macc": 0.6, "aacc": 0.7}},
            "  mIoU 51.2 %  test accuracy 95.2 %",
        ),
        ({"train": {"loss": math.nan, "accuracy": math.nan}}, "loss nan  accuracy nan  "),
        ({"train": {"loss": math.inf, "psnr": math.inf}}, "loss inf  PSNR inf  "),
        ({"train": {"loss": None, "accuracy": 0.5}}, "epoch  3/10  accuracy 50.0 %  "),
        ({"train": {"own_score": 1234567.0}}, "own_score 1.235e+06"),
        ({"test": None, "forward_steps": None}, "accuracy 96.1 %   steps 4.0 backward   12 s"),
        (
            {"forward_steps": None, "backward_steps": None, "seconds": None},
            "test accuracy 95.2 %\n",
        ),
        ({"forward_steps": math.nan}, "steps nan+4.0"),
        ({"skipped": 3}, "3 skipped"),
        (
            {"backward_status": {"CONVERGED": 90, "MAX_STEPS": 8, "STALLED": 2}},
            "10 of 100 backward not converged",
        ),
        ({"seconds": 0.04}, "0.0 s\n"),
        ({"seconds": 9.96}, "  10 s\n"),
        ({"seconds": 59.6}, "  1 min 00 s\n"),
        ({"seconds": 185}, "  3 min 05 s\n"),
        ({"seconds": 3600 * 30 + 62}, "  30 h 01 min\n"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_epoch_line_shows_each_number_in_its_way(change: dict[str, Any], expected: str) -> None:
    text = shown({**EPOCH, **change})
    assert expected in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_epoch_line_with_hardly_anything_is_short() -> None:
    assert shown({"kind": "epoch"}, epochs=5) == "epoch 3/5\n"


def test_plain_display_writes_within_long_epochs_only(clock: Clock) -> None:
    stream = io.StringIO()
    display = make_progress(stream=stream)
    display.start(10, 1000, first_step=100, title="a run")
    for step in range(101, 201):
        clock.now += 1.0
        display.step(step, 1, {**VALUES, "failed": step // 150, "skipped": 2})
    facts = "loss 0.5  accuracy 75.0 %"
    assert stream.getvalue().splitlines() == [
        "a run",
        f"epoch  2/10  step 130/1000  {facts}  2 skipped  steps 6.5+4.0",
        "             14 min 30 s left",
        f"epoch  2/10  step 160/1000  {facts}  1 failed  2 skipped",
        "             steps 6.5+4.0  14 min 00 s left",
        f"epoch  2/10  step 190/1000  {facts}  1 failed  2 skipped",
        "             steps 6.5+4.0  13 min 30 s left",
    ]


def test_plain_display_shows_how_far_a_long_evaluation_is(clock: Clock) -> None:
    stream = io.StringIO()
    display = make_progress(stream=stream)
    display.start(2, 20, scored=2000, batch=100)
    for step in range(1, 11):
        clock.now += 1.0
        display.step(step, 0, VALUES)
    for done in range(0, 1001, 100):
        display.evaluate(done, 1000)
        clock.now += 20.0
    # Ten steps of a second, 700 samples of this evaluation and 1,000 of the next at 0.2 seconds.
    assert stream.getvalue().splitlines()[1] == (
        "epoch 1/2   evaluating 300/1,000 samples   5 min 50 s left"
    )


def test_time_left_expects_evaluations_before_the_first(clock: Clock) -> None:
    pace = Pace(20, 0, scored=1000, batch=100)
    assert pace.left() is None
    clock.now += 10.0
    pace.step(10)
    assert pace.left() == pytest.approx(10 + 1000 / 100 / 2)
    clock.now += 30.0
    pace.evaluate(500)
    assert pace.left() == pytest.approx(10 + 500 * 30 / 500)
    pace.evaluate(500)
    clock.now += 10.0
    pace.step(20)
    assert pace.left() == pytest.approx(30)


def test_live_display_shows_an_evaluation_by_itself(clock: Clock) -> None:
    stream = Terminal()
    with make_progress(stream=stream) as display:
        clock.now += 10
        display.evaluate(300, 1000)
    assert "evaluating 300/1,000 samples" in seen(stream)
    assert "epoch" not in seen(stream)


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "live"])
def test_text_is_shown_as_it_is(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    text = "[red]x[/red] [/nothing] :smile: 12 \x1b[31mred\x07 \u00e9 " + "long " * 60
    with make_progress(stream=stream) as display:
        display.start(1, 10, title="[bold]title")
        display.step(1, 0, VALUES)
        display.note(text)
    assert "[bold]title" in seen(stream)
    assert "[red]x[/red] [/nothing] :smile: 12 \\x1b[31mred\\x07 \u00e9 " + "long " * 60 in seen(
        stream
    )
    assert "\x1b[31m" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_live_display_shows_the_run(clock: Clock) -> None:
    stream = Terminal()
    with make_progress(stream=stream) as display:
        display.start(10, 1000)
        clock.now += 10
        display.step(100, 0, {**VALUES, "failed": 7})
        picture = seen(stream)
        assert "epoch  1/10" in picture
        assert (
            "1 min 30 s left   loss 0.5   accuracy 75.0 %   7 failed   steps 6.5 forward, 4.0 "
            "backward" in picture
        )
        display.epoch(2, EPOCH)
    assert "epoch  3/10  loss 0.1234  accuracy 96.1 %  test 95.2 %" in seen(stream)
    assert stream.getvalue().endswith("\x1b[2K")  # the bar is gone, the lines stay
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back


def test_live_display_fits_a_narrow_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    stream = Terminal()
    display = make_progress(stream=stream)
    display.start(10, 1000)
    clock.now += 10
    display.step(100, 0, VALUES)
    assert "\n" not in stream.getvalue()
    assert len(seen(stream)) <= 50
    assert "epoch  1/10" in seen(stream)
    assert "1 min 30 s left" in seen(stream)
    display.stop()


def test_live_display_draws_eight_times_a_second(clock: Clock) -> None:
    stream = Terminal()
    with make_progress(stream=stream) as display:
        display.start(1, 10_000)
        for step in range(1, 1001):
            clock.now += 0.002
            display.step(step, 0, VALUES)
        assert 10 <= stream.getvalue().count("epoch 1/1") <= 17


def test_live_display_keeps_what_is_printed_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", pipe)
    with make_progress() as display:
        display.start(1, 10)
        display.step(10, 0, VALUES)
        print("UserWarning: odd [/red] thing", file=sys.stderr)
        print("half [/red] a line", end="", file=sys.stderr, flush=True)
        print("result")
    assert sys.stderr is stream
    assert "UserWarning: odd [/red] thing" in seen(stream)
    assert "half [/red] a line" in seen(stream)
    assert pipe.getvalue() == "result\n"


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "live"])
def test_step_is_cheap(terminal: bool) -> None:
    display: Progress = make_progress(stream=Terminal() if terminal else io.StringIO())
    with display:
        display.start(1, 10**6)
        began = time.process_time()
        for step in range(5000):
            display.step(step, 0, VALUES)
        assert (time.process_time() - began) / 5000 < 50e-6
