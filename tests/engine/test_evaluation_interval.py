from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pixel_run import make, metrics, weights

from equipoise.core import Interrupted
from equipoise.engine import Trainer, read_checkpoint


def scored(folder: Path, split: str = "test") -> dict[int, int]:
    """Epochs that were scored, each with how many samples."""
    lines = [line for line in metrics(folder) if line["kind"] == "epoch"]
    return {line["epoch"]: line[split]["samples"] for line in lines if split in line}


def test_evaluation_comes_every_few_epochs_and_in_the_end(tmp_path: Path) -> None:
    summary = make(tmp_path / "some", epochs=5, evaluate_every=2).fit()
    expected = make(tmp_path / "all", epochs=5).fit()
    assert scored(tmp_path / "some") == {1: 20, 3: 20}
    assert scored(tmp_path / "all") == dict.fromkeys(range(5), 20)
    assert summary.test == expected.test
    assert summary.confusion == expected.confusion
    assert read_checkpoint(tmp_path / "some" / "model.safetensors")[1]["epoch"] == 5


def test_evaluation_of_some_samples_ends_with_all(tmp_path: Path) -> None:
    summary = make(tmp_path, evaluate_samples=7).fit()
    assert scored(tmp_path) == dict.fromkeys(range(3), 7)
    assert summary.test == make().fit().test
    assert summary.test["samples"] == 20


def test_patience_counts_evaluations_and_the_best_weights_are_scored_on_all(tmp_path: Path) -> None:
    options: dict[str, Any] = {"held_out": True, "patience": 2, "epochs": 40}
    trainer = make(tmp_path, evaluate_every=3, evaluate_samples=9, **options)
    summary = trainer.fit()
    assert summary.stopped == "early"
    scores = {
        line["epoch"]: line["validation"]["miou"]
        for line in metrics(tmp_path)
        if "validation" in line
    }
    best = max(scores, key=lambda epoch: scores[epoch])
    assert list(scores) == [2, *range(5, summary.epochs, 3)]
    assert summary.epochs == best + 1 + 2 * 3
    assert summary.validation["samples"] == 20
    # What was scored are the weights in the file, which are those of the best evaluation.
    about = read_checkpoint(tmp_path / "model.safetensors")[1]
    assert about["epoch"] == summary.kept_epoch == best + 1
    assert trainer.evaluate(trainer.train).metrics["miou"] == summary.validation["miou"]


def test_last_epoch_is_scored_before_the_best_weights_are_chosen(tmp_path: Path) -> None:
    """Between evaluations, too: else the weights of the first epoch would be kept."""
    options: dict[str, Any] = {"held_out": True, "evaluate_every": 9}
    expected = make(tmp_path / "last", epochs=3, **options)
    last = expected.fit()
    trainer = make(tmp_path / "best", epochs=3, patience=2, **options)
    summary = trainer.fit()
    assert torch.equal(weights(trainer), weights(expected))
    assert summary.validation == last.validation
    assert summary.kept_epoch == last.kept_epoch == 3
    kept, about = read_checkpoint(tmp_path / "best" / "model.safetensors")
    assert about["epoch"] == 3
    assert all(torch.equal(kept[name], each) for name, each in trainer.model.state_dict().items())


@pytest.mark.parametrize("patience", [0, 5])
@pytest.mark.parametrize("at", [6, 12])
def test_run_with_few_evaluations_resumes_bit_identically(
    tmp_path: Path, at: int, patience: int
) -> None:
    options: dict[str, Any] = {
        "evaluate_every": 2,
        "evaluate_samples": 7,
        "ema": 0.5,
        "patience": patience,
        "held_out": bool(patience),
    }
    whole = make(tmp_path / "whole", **options)
    expected = whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", stop_at=at, **options).fit()
    again = make(tmp_path / "parts", **options)
    summary = again.fit(resume=True)
    assert torch.equal(weights(again), weights(whole))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert (summary.test, summary.validation) == (expected.test, expected.validation)


def test_last_evaluation_that_is_interrupted_is_made_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, evaluate_samples=7)
    evaluate = Trainer._evaluate

    def stop(self: Trainer, dataset: Any) -> Any:
        if len(dataset) == 20:
            raise Interrupted
        return evaluate(self, dataset)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", stop)
        with pytest.raises(Interrupted):
            trainer.fit()
    assert make(tmp_path, evaluate_samples=7).fit(resume=True).test == make().fit().test
