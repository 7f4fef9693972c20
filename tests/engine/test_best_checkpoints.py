from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pixel_run import make, metrics, weights

from equipoise.core import Interrupted
from equipoise.engine import read_checkpoint
from equipoise.engine.run_state import RunProgress


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder."""
    return sorted(int(path.stem[5:]) for path in (folder / "checkpoints").iterdir())


def best(folder: Path, count: int) -> set[int]:
    """The steps of the best evaluations, by the log."""
    scores = {
        line["step"]: line["test"]["miou"] for line in metrics(folder) if line["kind"] == "epoch"
    }
    return set(sorted(scores, key=lambda step: -scores[step])[:count])


def test_best_checkpoints_are_kept_beside_the_newest(tmp_path: Path) -> None:
    make(tmp_path, epochs=8, checkpoint_keep=1, checkpoint_best=2).fit()
    assert set(kept(tmp_path)) == {32, *best(tmp_path, 2)}
    first = kept(tmp_path)[0]
    state = read_checkpoint(tmp_path / "checkpoints" / f"step-{first:09d}.safetensors")[1]
    assert state["position"]["step"] == first


@pytest.mark.parametrize("at", [14, 20])
def test_best_checkpoints_are_remembered_by_a_resumed_run(tmp_path: Path, at: int) -> None:
    options: dict[str, Any] = {"epochs": 8, "checkpoint_keep": 1, "checkpoint_best": 3}
    whole = make(tmp_path / "whole", **options)
    whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", stop_at=at, **options).fit()
    again = make(tmp_path / "parts", **options)
    again.fit(resume=True)
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    assert weights(again).equal(weights(whole))
    assert again.position.ranking == whole.position.ranking


def test_ranking_prefers_the_earlier_of_equal_scores_and_knows_no_nan() -> None:
    position = RunProgress()
    for step, score in enumerate((0.5, float("nan"), 0.7, 0.7, None, 0.6), 1):
        position.step = step
        position.rank(score, higher=True, keep=2)
    assert position.ranking == [[0.7, 3], [0.7, 4]]
    position.rank(0.1, higher=False, keep=2)
    assert position.best_steps == {6, 3}


@pytest.mark.parametrize("ranking", [[[0.5]], [["a", 1]], [[0.5, -1]], [1]])
def test_ranking_of_a_damaged_checkpoint_is_refused(ranking: list[Any]) -> None:
    values = {**vars(RunProgress()), "ranking": ranking}
    with pytest.raises((ValueError, TypeError)):
        RunProgress().load(values)
