from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pixel_run import make, metrics, weights

from equipoise.core import Interrupted, SourceError
from equipoise.runs import load_config, resume_run
from equipoise.runs.config import dump_config


@pytest.mark.parametrize(("steps", "epochs"), [(3, 1), (8, 2), (10, 3)])
def test_run_of_some_steps_ends_there_and_is_scored(
    tmp_path: Path, steps: int, epochs: int
) -> None:
    trainer = make(tmp_path, steps=steps, epochs=1)
    summary = trainer.fit()
    assert (summary.stopped, summary.steps, summary.epochs) == ("finished", steps, epochs)
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, steps + 1))
    last = [line for line in lines if line["kind"] == "epoch"][-1]
    assert last["step"] == steps
    assert last["test"]["miou"] == summary.test["miou"]
    # The learning rate falls over the whole run.
    assert trainer.learning_rate(steps - 1) < trainer.learning_rate(0)


def test_steps_of_whole_epochs_are_the_same_run(tmp_path: Path) -> None:
    by_epochs, by_steps = make(tmp_path / "epochs", epochs=2), make(tmp_path / "steps", steps=8)
    by_epochs.fit()
    by_steps.fit()
    assert torch.equal(weights(by_epochs), weights(by_steps))
    assert metrics(tmp_path / "epochs") == metrics(tmp_path / "steps")


@pytest.mark.parametrize("at", [2, 4, 9, 10])
def test_run_of_some_steps_resumes_bit_identically(tmp_path: Path, at: int) -> None:
    options: dict[str, Any] = {"steps": 10, "dropout": 0.3, "ema": 0.5}
    whole = make(tmp_path / "whole", **options)
    expected = whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", stop_at=at, **options).fit()
    again = make(tmp_path / "parts", **options)
    assert again.fit(resume=True).test == expected.test
    assert torch.equal(weights(again), weights(whole))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("train.epochs=20", "train.epochs must stay 10, since the run is measured in train.steps"),
        ("train.steps=9", "train.steps must stay 5 when the run is resumed; got 9"),
    ],
)
def test_run_of_some_steps_is_not_made_longer(tmp_path: Path, change: str, expected: str) -> None:
    config = load_config("digits", ["train.steps=5", "schedule.name=constant"])
    (tmp_path / "config.toml").write_text(dump_config(config))
    with pytest.raises(SourceError, match=expected):
        resume_run(tmp_path, [change], quiet=True)
