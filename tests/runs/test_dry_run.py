from __future__ import annotations

import re
from pathlib import Path

import pytest

from equipoise.cli import main
from equipoise.engine import Trainer
from equipoise.engine.step import Stepper
from equipoise.runs import load_config, train_run
from equipoise.runs.dry_run import dry_run

SMALL = ["data.subset=64", "train.batch=32", "train.epochs=3", "train.evaluate_samples=40"]


def test_dry_run_says_what_a_step_costs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    compute = Stepper.compute
    monkeypatch.setattr(
        Stepper, "compute", lambda self, x, *rest: steps.append(len(x)) or compute(self, x, *rest)
    )
    monkeypatch.setattr(Trainer, "fit", lambda *_: pytest.fail("it trained"))
    assert main(["train", "digits", *SMALL, "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert steps == [32, 32]
    time = r"[\d.]+ m?s"
    patterns = [
        r".* with [\d,]+ parameters on 64 samples of digits",
        rf"a step of 32 samples: {time}, the first {time}; loss [\d.]+",
        rf"an evaluation of 40 samples: {time}",
        r"memory of this process: [\d,]+ MiB at its peak",
        rf"the run: 6 steps in 3 epochs, about {time}",
        "nothing was written",
    ]
    lines = capsys.readouterr().out.splitlines()
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line
        assert len(line) <= 80, line


def test_dry_run_refuses_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["train", "digits", "--dry-run", "--output", str(tmp_path)]) == 2
    assert "must be new or empty; it holds other files." in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::equipoise.core.ConvergenceWarning")
def test_dry_run_tells_of_a_step_that_would_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", *SMALL, "optimizer.learning_rate=1e30", "--dry-run"]
    assert main(words) == 3
    assert "the first steps would be skipped: " in capsys.readouterr().err


def test_dry_run_finds_a_batch_in_parts() -> None:
    text = dry_run(load_config("digits", [*SMALL, "train.accumulate=4"]))
    assert "a step of 32 samples in 4 parts: " in text


def test_runs_and_their_trials_keep_freed_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("equipoise.runs.run.keep_freed_memory", lambda: asked.append("memory"))
    config = load_config("digits", [*SMALL, "train.epochs=1"])
    dry_run(config)
    assert asked == ["memory"]
    train_run(config, tmp_path / "run", quiet=True)
    assert asked == ["memory", "memory"]
