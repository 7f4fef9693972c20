from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from runs import assert_same_runs, kill_at, latest_step, resume_or_begin, start, train, wait

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and kills with SIGKILL"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

# One run lives through each of these lists: a number counts from where the run goes on.
BEGINNING = [
    *((f"config.toml {stage}", 1) for stage in ("open", "half", "written", "synced", "replaced")),
    *((f"environment.json {stage}", 1) for stage in ("half", "synced", "replaced")),
]
FIRST = [
    ("line half", 3),
    *((f"checkpoint {stage}", 1) for stage in ("open", "half", "written", "synced", "replaced")),
]
MIDDLE = [
    *(
        (f"model.safetensors {stage}", 1)
        for stage in ("open", "half", "written", "synced", "replaced")
    ),
    ("checkpoint half", 1),
    ("checkpoint replaced", 1),
    ("removal", 1),
    ("removed", 1),
    ("line half", 1),
    ("checkpoint synced", 3),
]
END = [
    (
        "removal",
        2,
    ),  # after the last checkpoint: nothing comes later that would remove what is too much
    *((f"summary.json {stage}", 1) for stage in ("half", "synced", "replaced")),
    *((f"report.html {stage}", 1) for stage in ("half", "synced", "replaced")),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder) == 0
    return folder


def kill_at_random(folder: Path, longest: float, draw: random.Random) -> bool:
    """Resume a run, kill it after a while, and return whether it was still there to be killed."""
    process = start(lambda: resume_or_begin(folder), folder.with_suffix(".output"))
    time.sleep(draw.uniform(0.02, longest))
    os.kill(process, signal.SIGKILL)
    ended = wait(process)
    assert ended in (-signal.SIGKILL, 0), folder.with_suffix(".output").read_text()
    return ended != 0


def test_run_that_is_killed_in_saves_and_between_them_ends_as_if_it_had_not_been(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for moment, number in [
        ("config.toml synced", 1),
        ("config.toml replaced", 1),
        ("line half", 3),
        ("checkpoint half", 1),
    ]:
        kill_at(folder, moment, number)
    assert latest_step(folder) is None
    kill_at(folder, "checkpoint replaced")
    assert latest_step(folder) == 4
    kill_at(folder, "model.safetensors replaced")
    assert latest_step(folder) == 6
    for moment in ("checkpoint synced", "removal", "summary.json synced"):
        kill_at(folder, moment)
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)


def test_run_that_is_killed_at_random_ends_as_if_it_had_not_been(
    whole: Path, tmp_path: Path
) -> None:
    folder, draw = tmp_path / "run", random.Random(0)
    for _ in range(3):
        kill_at_random(folder, 0.3, draw)
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)


@pytest.mark.slow
def test_runs_that_are_killed_fifty_times_end_as_if_they_had_not_been(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chosen"
    chosen = [*BEGINNING, *FIRST, *MIDDLE, *END]
    for moment, number in chosen:
        kill_at(folder, moment, number)
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)
    saves = sum(moment != "line half" for moment, _ in chosen)
    assert saves >= 15

    draw, longest = random.Random(0), 1.0
    kills = runs = 0
    while kills < 50:
        folder, killed, runs = tmp_path / f"random-{runs}", True, runs + 1
        while killed and kills < 50:
            killed = kill_at_random(folder, longest, draw)
            kills += killed
            longest *= (
                1.05 if killed else 0.8
            )  # several kills in each run, however fast this machine is now
        assert resume_or_begin(folder) == 0
        assert_same_runs(folder, whole)
    print(
        f"{kills} kills at random in {runs} runs, {saves} in saves and {len(chosen) - saves} "
        "in lines"
    )


def test_resume_removes_the_old_checkpoint_that_a_kill_after_the_last_one_left(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    kill_at(folder, "removal", 4)
    assert latest_step(folder) == 18
    assert len(list((folder / "checkpoints").iterdir())) == 3
    assert resume_or_begin(folder) == 0
    assert_same_runs(folder, whole)
