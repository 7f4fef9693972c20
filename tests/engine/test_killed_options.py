"""Runs with more to remember than others, killed in their middle, end as if they had not been."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import assert_same_runs, kill_at, resume_or_begin, train

from equipoise.engine import read_checkpoint

OPTIONS = {
    "warm": ("train.warm_start=true", "data.augment=none"),
    "penalty": ("task.jacobian_penalty=0.1",),
    "weights": ("train.weights_every=1",),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills with SIGKILL")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("option", OPTIONS)
def test_run_with_more_to_remember_that_is_killed_ends_as_if_it_had_not_been(
    option: str, tmp_path: Path
) -> None:
    words = OPTIONS[option]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert train(whole, *words) == 0
    for moment, number in (
        ("line half", 3),
        ("checkpoint half", 1),
        ("checkpoint replaced", 1),
        ("line half", 3),  # between two checkpoints
        ("checkpoint synced", 3),
    ):
        kill_at(folder, moment, number, words)
    assert resume_or_begin(folder, *words) == 0
    assert_same_runs(folder, whole)
    newest = read_checkpoint(max((whole / "checkpoints").iterdir()))[0]
    assert any(name.startswith("warm.") for name in newest) == (option == "warm")
    # Weights that are kept of steps are files of their own beside the checkpoints.
    kept = sorted((whole / "weights").glob("*.safetensors"))
    assert bool(kept) == (option == "weights")
    for path in kept:
        assert (folder / "weights" / path.name).read_bytes() == path.read_bytes()
