"""Runs of two processes under torchrun, beside the same run in one process.

Sums over two shares are rounded otherwise than sums over the whole, and training can magnify that:
a unit that is just switched on in one run and off in the other changes the gradient at once, by
more the larger the steps. Two runs of one process whose weights differ in the last bit part in the
same way. Here the steps are small, and the solves exact enough that it does not matter whether
rounding lets a sample stop one step earlier; then the losses agree to a few units in the last
place.
"""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from two_processes import run

from equipoise import Cell, Equilibrium
from equipoise.cli import main
from equipoise.data import Dataset, batches
from equipoise.engine import (
    Group,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    distributed,
    make_progress,
    make_task,
    read_checkpoint,
    read_metrics,
)
from equipoise.runs import load_config, resume_run, train_run

STEPS = 16
SETTINGS = [
    "data.subset=512",
    "train.epochs=2",
    "train.batch=64",
    "train.log_every=1",
    "train.checkpoint_steps=2",
    "train.device=cpu",
    "model.options.tolerance=1e-6",
    "optimizer.learning_rate=1e-3",
]
TRAIN = ["train", "digits", *SETTINGS]
MOMENT = 5  # the step in which something happens: after a checkpoint and before the next


def weights(folder: Path) -> dict[str, Tensor]:
    return read_checkpoint(folder / "model.safetensors")[0]


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == kind]


def agree(actual: Path, expected: Path) -> None:
    """Compare two runs, up to rounding."""
    assert [line["step"] for line in lines(actual, "step")] == list(range(1, STEPS + 1))
    for found, line in zip(lines(actual, "step"), lines(expected, "step"), strict=True):
        for name in ("loss", "accuracy", "learning_rate", "gradient_norm"):
            assert found[name] == pytest.approx(line[name], rel=1e-5, abs=1e-5), (
                name,
                line["step"],
            )
        assert (found["forward_status"], found["backward_status"]) == (
            line["forward_status"],
            line["backward_status"],
        )
        assert (found["epoch"], found["skipped"]) == (line["epoch"], False)
    for found, line in zip(lines(actual, "epoch"), lines(expected, "epoch"), strict=True):
        assert found["train"] == pytest.approx(line["train"], rel=1e-5, abs=1e-5)
        assert found["forward_status"] == line["forward_status"] == {"CONVERGED": 512}
        assert found["operator_norms"] == pytest.approx(line["operator_norms"], rel=1e-4)
        # An odd number: one process scores one sample more than the other.
        assert found["test"].pop("status") == line["test"].pop("status") == {"CONVERGED": 359}
        assert found["test"]["samples"] == 359
        assert found["test"].pop("forward_steps") == pytest.approx(
            line["test"].pop("forward_steps"), rel=1e-2
        )
        assert found["test"] == pytest.approx(line["test"], rel=1e-5, abs=1e-5)
    torch.testing.assert_close(weights(actual), weights(expected), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of two processes."""
    folder = tmp_path_factory.mktemp("pair")
    code, printed = run(folder, "-m", "equipoise", *TRAIN, "--output", str(folder / "run"))
    assert code == 0, printed
    assert printed.count("finished after 2 epochs") == 1
    return folder / "run"


def test_terms_of_the_loss_are_logged_in_the_mean_over_all_processes(
    pair: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, "train.steps=2", "train.checkpoint_steps=0", f"task.teacher.run={pair}"]
    folder = tmp_path / "two"
    words = ["train", "digits", *settings, "--output", str(folder)]
    code, printed = run(tmp_path, "-m", "equipoise", *words)
    assert code == 0, printed
    train_run(load_config("digits", settings), tmp_path / "one", quiet=True)
    both = [
        [line["distillation_loss"] for line in lines(tmp_path / name, "step")]
        for name in ("two", "one")
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-5)


def test_two_processes_train_like_one(pair: Path, tmp_path: Path) -> None:
    train_run(load_config("digits", SETTINGS), tmp_path, quiet=True)
    agree(pair, tmp_path)
    assert (pair / "report.html").exists()
    assert {path.name for path in (pair / "checkpoints").iterdir()} == {
        f"step-{step:09d}.safetensors" for step in (14, 16)
    }


@pytest.mark.slow  # half a minute; resuming with other processes is tested below
def test_killed_process_is_started_again_and_finishes(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, printed = run(
        tmp_path, "--max-restarts=2", __file__, "kill", *TRAIN, "--output", str(folder)
    )
    assert code == 0, printed
    assert printed.count("killed in step 5") == 1
    assert [line["step"] for line in lines(folder, "step")] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines(folder, "step")] == [
        line["loss"] for line in lines(pair, "step")
    ]
    for name, tensor in weights(pair).items():
        assert torch.equal(weights(folder)[name], tensor), name


def test_start_sees_nothing_of_the_start_before() -> None:
    store = torch.distributed.HashStore()

    def start(rank: int) -> str:
        time.sleep(0.1 * rank)  # so that the first process finds the other's old greeting
        own = distributed._own(store, rank, 2)
        own.set(str(rank), f"{number}, {rank}")
        return own.get(str(1 - rank)).decode()

    for number in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(start, (0, 1))) == [f"{number}, 1", f"{number}, 0"]


@pytest.mark.slow
def test_stopped_run_goes_on_with_another_number_of_processes(pair: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, printed = run(tmp_path, __file__, "stop", *TRAIN, "--output", str(folder))
    assert code != 0
    assert printed.count(f"equipoise: interrupted; resume with: equipoise resume {folder}") == 2, (
        printed
    )
    last = max(line["step"] for line in lines(folder, "step"))
    assert MOMENT <= last < STEPS
    assert (folder / "checkpoints" / f"step-{last:09d}.safetensors").exists()
    resume_run(folder, quiet=True)
    agree(folder, pair)


@pytest.mark.slow  # ten seconds for a sentence
def test_batch_that_processes_cannot_share_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, printed = run(
        tmp_path, "-m", "equipoise", "train", "digits", "train.batch=63", "--output", str(folder)
    )
    assert code != 0
    assert re.search(r"exitcode +: 2 ", printed), printed
    # Once a process has ended, torchrun ends the other, which may not have come so far.
    assert (
        1
        <= len(
            re.findall(
                "equipoise: error: .*train.batch must be a multiple of the 2 processes; got 63",
                printed,
            )
        )
        <= 2
    )
    assert not folder.exists()


class Scaled(Cell):
    """`z = rate W z + U x`, where the last number of each sample is its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(0.5 * torch.eye(4))
        self.U = nn.Linear(4, 4)

    def inject(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.U(x[:, :-1]), x[:, -1:]

    def initial(self, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return context[1] * (z @ self.W.T) + context[0]


def train_on_poison(folder: Path, group: Group, *, resume: bool = False) -> Trainer:
    """Train where the second of two processes meets NaN in step 2 and a divergence in step 4.

    Whatever the equilibrium, the output is bounded: nothing that the processes exchange tells of
    the divergence.
    """
    torch.manual_seed(0)
    x, y = torch.cat([torch.rand(48, 4), torch.ones(48, 1)], 1), torch.randint(3, (48,))
    numbers = Dataset("numbers", "train", "arrays", (), (), torch.zeros(48), torch.arange(48))
    share = [rows.tolist() for _, rows in batches(numbers, 4, 0, 0, rank=1, world=2)]
    x[share[1][0], 0], x[share[3][0], -1] = torch.nan, 50.0
    data = Dataset("poison", "train", "arrays", ("a", "b", "c"), (5,), x, y)
    layer = Equilibrium(Scaled(), "fixed_point", on_failure="ignore", tolerance=1e-6)
    trainer = Trainer(
        nn.Sequential(layer, nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        make_task("auto", data),
        data,
        settings=TrainConfig(epochs=1, batch=8, log_every=1),
        optimizer=OptimizerConfig("sgd", learning_rate=0.1),
        schedule=ScheduleConfig("constant"),
        folder=folder,
        group=group,
        progress=make_progress(quiet=group.world == 1 or not group.is_main),
    )
    trainer.fit(resume=resume)
    return trainer


@pytest.mark.slow
def test_step_that_fails_in_one_process_is_skipped_in_all(tmp_path: Path) -> None:
    code, printed = run(tmp_path, __file__, "poison", str(tmp_path))
    assert code == 0, printed
    assert "step 4 was skipped: another process skipped it." in printed
    both = [read_checkpoint(tmp_path / f"weights-{rank}.safetensors")[0] for rank in (0, 1)]
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())
    alone = tmp_path / "alone"
    torch.testing.assert_close(
        both[0], train_on_poison(alone, Group()).model.state_dict(), rtol=1e-5, atol=1e-5
    )
    for folder in (tmp_path / "process-0", alone):
        assert [line["step"] for line in lines(folder, "step") if line["skipped"]] == [2, 4]


def work_on_poison(folder: Path) -> None:
    """What each process does for the test above."""
    from equipoise.engine import write_checkpoint

    with Group.from_environment("cpu") as group:
        own = folder / f"process-{group.rank}"
        write_checkpoint(
            folder / f"weights-{group.rank}.safetensors",
            train_on_poison(own, group).model.state_dict(),
            {},
        )
        # Only the first process writes checkpoints, so that in a folder of its own the second finds
        # none.
        with pytest.raises(ValueError, match="must be a folder that all processes share"):
            train_on_poison(own, group, resume=True)


def work_until(event: str, words: list[str]) -> int:
    """Run a command; in one step of its first start a process is killed, or torchrun stopped."""
    step = Trainer._step

    def disturbed(trainer: Trainer, *batch: Tensor) -> dict[str, Any] | None:
        if trainer.position.step + 1 == MOMENT and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if event == "kill" and trainer.group.rank == 1:
                print(f"killed in step {MOMENT}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "stop" and trainer.group.is_main:
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(1)  # until torchrun has told both
        return step(trainer, *batch)

    Trainer._step = disturbed  # type: ignore[method-assign]
    return main(words)


if __name__ == "__main__":
    if sys.argv[1] == "poison":
        work_on_poison(Path(sys.argv[2]))
    else:
        sys.exit(work_until(sys.argv[1], sys.argv[2:]))
