from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from runs import assert_same_runs, at_moment, resume_or_begin, start, train, wait
from torch import nn

from equipoise.core import (
    Interrupted,
    interruptible,
    interruption,
    stop_requested,
    uninterrupted,
    write_atomically,
)
from equipoise.engine import Checkpoints
from equipoise.models import Model
from equipoise.runs import closeup

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

STOPPING = "equipoise: stopping ... (a second signal stops at once)\n"


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    return folder


def hear(*numbers: int, deferred: int) -> list[int]:
    """Get signals in some nested sections, note which of them did not raise, and then raise."""
    done: list[int] = []

    def work() -> None:
        with interruptible(), ExitStack() as stack:
            for _ in range(deferred):
                stack.enter_context(uninterrupted())
            for number in numbers:
                tell(number)
                assert stop_requested()
                done.append(number)
            stack.pop_all().close()  # raises here, at the end of the outermost section
            done.append(0)

    with pytest.raises(Interrupted) as raised:
        work()
    assert raised.value.exit_code == 128 + numbers[0]
    assert not stop_requested()
    return done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_raises_at_once_except_in_sections_that_put_it_off(number, capfd):
    assert hear(number, deferred=0) == []
    assert capfd.readouterr().err == ""
    for depth in (1, 2):
        assert hear(number, deferred=depth) == [number]
        assert capfd.readouterr().err == STOPPING


def test_sentence_about_a_stopped_run_survives_what_is_tidied_up_after_it():
    sentence = "the run was interrupted at step 3; a checkpoint was written"

    def stop_and_tidy_up():
        try:
            with uninterrupted():
                tell()
                raise interruption(sentence)
        finally:
            with uninterrupted():
                pass

    with interruptible(), pytest.raises(Interrupted, match=sentence):
        stop_and_tidy_up()


def test_second_signal_raises_at_once():
    assert hear(signal.SIGTERM, signal.SIGINT, deferred=1) == [signal.SIGTERM]


def test_signal_that_torchrun_repeats_counts_once(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert hear(signal.SIGINT, signal.SIGINT, deferred=1) == [signal.SIGINT] * 2


def test_signal_handlers_are_given_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with interruptible(), interruptible():
        assert signal.getsignal(signal.SIGTERM) is not before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_file_is_whole_and_alone_after_a_signal_in_its_writing(tmp_path):
    def pieces():
        yield b"one "
        tell()
        yield b"two"

    with pytest.raises(Interrupted), interruptible():
        write_atomically(tmp_path / "file", pieces())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"one two"


def test_forked_worker_is_ended_by_a_signal_as_if_nobody_listened(tmp_path):
    with interruptible(), uninterrupted():
        worker = start(lambda: tell() or time.sleep(60) or 0, tmp_path / "output")
        assert wait(worker) == -signal.SIGTERM


def stop_at(folder: Path, context: AbstractContextManager[None]) -> tuple[int, list[int], str]:
    """Resume a run that gets a signal, and return its exit code and what it did after the signal.

    The latter are the batches that a model was given and the checkpoints that were written.
    """
    output = folder.with_suffix(".output")
    counts = torch.zeros(2, dtype=torch.int64).share_memory_()

    def count(number: int, function: Callable[..., Any], wanted: type) -> Callable[..., Any]:
        def counted(self, *arguments, **options):
            counts[number] += stop_requested() and isinstance(self, wanted)
            return function(self, *arguments, **options)

        return counted

    def work() -> int:
        with (
            context,
            mock.patch.object(nn.Module, "__call__", count(0, nn.Module.__call__, Model)),
            mock.patch.object(Checkpoints, "save", count(1, Checkpoints.save, Checkpoints)),
        ):
            return resume_or_begin(folder)

    code = wait(start(work, output))
    return code, counts.tolist(), output.read_text()


def tell_when(owner: object, name: str, number: int, only: Callable[..., bool]):
    """Get a signal at the n-th call of a function."""
    function, calls = getattr(owner, name), 0

    def called(*arguments, **options):
        nonlocal calls
        calls += only(*arguments)
        if calls == number:
            calls += 1
            tell()
        return function(*arguments, **options)

    return mock.patch.object(owner, name, called)


def stray(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith((".partial", ".lock"))]


def test_run_that_gets_a_signal_stops_within_a_batch_and_a_save_wherever_it_is(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def trained(module, *_):
        return isinstance(module, Model) and module.training

    def scored(module, *_):
        return isinstance(module, Model) and not module.training

    def called(*_):
        return True

    # One run lives through all of these; at last it makes its final evaluation and its report.
    for context, saves in (
        (tell_when(nn.Module, "__call__", 2, trained), 1),
        (at_moment("checkpoint half", 1, tell), 0),
        (tell_when(nn.Module, "__call__", 3, scored), 0),
        (at_moment("model.safetensors half", 1, tell), 1),
        (at_moment("checkpoint half", 3, tell), 0),
        (tell_when(nn.Module, "__call__", 10, scored), 0),
        (at_moment("summary.json half", 1, tell), 0),
        (tell_when(closeup, "_solve", 1, called), 0),
        (at_moment("report.html half", 1, tell), 0),
    ):
        code, after, printed = stop_at(folder, context)
        assert code == 143, printed
        assert after == [0, saves], printed
        resumable = list((folder / "checkpoints").glob("*"))
        assert printed.endswith(
            f"equipoise: interrupted; resume with: equipoise resume {folder}\n"
            if resumable
            else "equipoise: interrupted; there is no checkpoint yet\n"
        )
        assert stray(folder) == []
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)


@pytest.mark.slow
def test_run_that_gets_fifty_signals_ends_as_if_it_had_not(whole: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    assert wait(start(lambda: train(tmp_path / "timed"), tmp_path / "output")) == 0
    longest, draw = time.monotonic() - began, random.Random(0)
    waits: list[float] = []
    told = runs = 0
    while told < 50:
        folder, stopped, runs = tmp_path / f"run-{runs}", True, runs + 1
        while stopped and told < 50:
            output = folder.with_suffix(".output")
            process = start(lambda folder=folder: resume_or_begin(folder), output)
            time.sleep(draw.uniform(0.02, longest))
            began = time.monotonic()
            os.kill(process, signal.SIGTERM)
            code = wait(process)
            stopped = code != 0
            # Ended by the signal itself where the command did not listen yet.
            assert code in (0, 143, -signal.SIGTERM), output.read_text()
            assert stray(folder) == []
            if stopped:
                told += 1
                waits.append(time.monotonic() - began)
        assert resume_or_begin(folder) == 0
        assert_same_runs(folder, whole, newest=1)
    waits.sort()
    print(
        f"{told} signals in {runs} runs of {longest:.2f} s; from signal to exit "
        f"{1000 * waits[len(waits) // 2]:.0f} ms (median), {1000 * waits[-1]:.0f} ms (longest)"
    )
