"""Small runs of the command, ways to stop them at chosen moments, and how to compare them."""

from __future__ import annotations

import io
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import equipoise.core.atomic_file
from equipoise.cli import main
from equipoise.engine import Checkpoints, MetricLog, read_checkpoint, read_metrics
from equipoise.runs import run

# Six steps in each epoch: checkpoints after 4, 6, 6, 8, 12, 12, 16, 18 and 18, each second one of a
# step after its evaluation. The second epoch is no better than the first, so that its weights are
# not kept.
SETTINGS = (
    "data.subset=112",
    "data.holdout=0.15",
    "data.augment=pad-crop-flip",
    "data.padding=1",
    "train.epochs=3",
    "train.batch=16",
    "train.evaluate_batch=8",
    "train.checkpoint_steps=4",
    "train.log_every=1",
    "train.ema=0.5",
    "train.patience=2",
    "train.seed=2",
    "optimizer.name=adamw",
    "optimizer.weight_decay=0.01",
)
TIMES = ("seconds", "epoch_seconds", "busy", "loading", "samples_per_second", "loading_fraction")
FILES = ("config.toml", "environment.json", "model.safetensors", "summary.json", "report.html")


def command(*words: str | Path) -> int:
    """Run a command, with dropout in the model so that the state of torch's generator matters."""
    make = run.make_model

    def drop(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (nn.functional.dropout(inputs[0], 0.2, head.training),)

    def make_random(config: Any) -> nn.Module:
        model = make(config)
        model.head.register_forward_pre_hook(drop)
        return model

    with mock.patch.object(run, "make_model", make_random):
        return main([str(word) for word in words])


def train(folder: Path, *words: str) -> int:
    """Begin a run, with other settings after the usual ones."""
    return command("train", "digits", *SETTINGS, *words, "--output", folder, "--quiet")


def resume(folder: Path) -> int:
    """Resume it."""
    return command("resume", folder, "--quiet")


def resume_or_begin(folder: Path, *words: str) -> int:
    """Resume a run, or begin it again if it did not even write its config."""
    return resume(folder) if (folder / "config.toml").exists() else train(folder, *words)


@contextmanager
def at_moment(moment: str, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Act when a moment comes for the n-th time.

    Moments of the writing of a file are `NAME open`, `NAME half` (half of its bytes are written),
    `NAME written` (all, but they are not on the disk yet), `NAME synced` (they are, but not in
    their place) and `NAME replaced`. NAME is that of the file, or `checkpoint`. Others are
    `line half`, of a line of metrics, and `removal` and `removed`, of an old checkpoint.
    """
    count = 0

    def reach(name: str) -> bool:
        nonlocal count
        count += name == moment
        return name == moment and count == number

    def pause(name: str) -> None:
        if reach(name):
            act()

    class Writer(io.BytesIO):
        def __init__(self, partial: Path, mode: str) -> None:
            super().__init__()
            self.name = _name(Path(partial).name.removeprefix(".").rsplit(".", 2)[0])
            pause(f"{self.name} open")
            self.raw = io.FileIO(partial, mode)

        def flush(self) -> None:
            content = self.getvalue()
            self.raw.write(content[: len(content) // 2])
            pause(f"{self.name} half")
            self.raw.write(content[len(content) // 2 :])
            pause(f"{self.name} written")

        def fileno(self) -> int:
            return self.raw.fileno()

        def close(self) -> None:
            self.raw.close()
            super().close()

    replace, unlink, write = os.replace, Path.unlink, MetricLog.write

    def replace_file(source: Path, target: Path) -> None:
        pause(f"{_name(target.name)} synced")
        replace(source, target)
        pause(f"{_name(target.name)} replaced")

    def unlink_file(path: Path, missing_ok: bool = False) -> None:
        old = path.name.startswith("step-")
        if old:
            pause("removal")
        unlink(path, missing_ok)
        if old:
            pause("removed")

    def write_line(log: MetricLog, line: dict[str, Any]) -> None:
        if reach("line half"):
            text = json.dumps(line).encode()
            os.write(log._file.fileno(), text[: len(text) // 2])
            act()
        write(log, line)

    with (
        mock.patch.object(equipoise.core.atomic_file, "open", Writer, create=True),
        mock.patch.object(os, "replace", replace_file),
        mock.patch.object(Path, "unlink", unlink_file),
        mock.patch.object(MetricLog, "write", write_line),
    ):
        yield


def _name(name: str) -> str:
    return name if name in FILES else "checkpoint"


def start(work: Callable[[], int], output: Path) -> int:
    """Do some work in a process of its own, and return the number of that process.

    It is forked, so that torch need not be imported again; whoever forks must not have several
    threads of torch.
    """
    assert torch.get_num_threads() == 1
    process = os.fork()
    if process:
        return process
    code = 99
    try:
        with output.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            code = work()
    except BaseException:
        output.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(process: int) -> int:
    """Return how a process ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at(folder: Path, moment: str, number: int = 1, words: Sequence[str] = ()) -> None:
    """Resume a run in a process that SIGKILL ends at a given moment, and check that it did."""

    def work() -> int:
        with at_moment(moment, number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            return resume_or_begin(folder, *words)

    output = folder.with_suffix(".output")
    ended = wait(start(work, output))
    assert ended == -signal.SIGKILL, f"{moment} {number} did not come: {ended} {output.read_text()}"


def assert_same_runs(found: Path, whole: Path, *, newest: int = 2) -> None:
    """See that two runs of the same settings have the same files, which differ in times only.

    Args:
        found: A run that was stopped and resumed.
        whole: One that was not.
        newest: How many checkpoints they have in common; a run that is told to stop writes one more
            there, so that only the last one may be.
    """
    names, expected_names = _tree(found), _tree(whole)
    assert names == expected_names if newest == 2 else len(names) == len(expected_names), names
    for name in ("config.toml", "model.safetensors"):
        assert (found / name).read_bytes() == (whole / name).read_bytes()
    for path in sorted((whole / "checkpoints").iterdir())[-newest:]:
        tensors, state = read_checkpoint(found / "checkpoints" / path.name)
        expected, expected_state = read_checkpoint(path)
        assert {name.partition(".")[0] for name in tensors} - {"warm"} == {
            "model",
            "optimizer",
            "average",
            "kept",
            "random",
            "totals",
        }
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == expected[name].dtype, name
            assert tensor.numpy().tobytes() == expected[name].numpy().tobytes(), name
        # the log's length depends on how many digits its times have
        assert state["position"].pop("log") <= (found / "metrics.jsonl").stat().st_size
        expected_state["position"].pop("log")
        assert _timeless(state) == _timeless(expected_state)
    lines = read_metrics(found / "metrics.jsonl")
    assert [_timeless(line) for line in lines] == [
        _timeless(line) for line in read_metrics(whole / "metrics.jsonl")
    ]
    summary, expected_summary = (
        json.loads((folder / "summary.json").read_text()) for folder in (found, whole)
    )
    assert _timeless(summary) == _timeless(expected_summary)
    assert (found / "report.html").read_text().rstrip().endswith("</html>")


def latest_step(folder: Path) -> int | None:
    """Return the step of the last checkpoint that can be read."""
    stored = Checkpoints(folder / "checkpoints").latest()
    return stored.step if stored else None


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in TIMES}
    return value
