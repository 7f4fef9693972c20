"""Training whose solves start where the last solves of the same samples ended."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, Equilibrium, create_model
from equipoise.core import Interrupted, SettingError
from equipoise.data import Compose, Dataset, Degrade, ToFloat
from equipoise.engine import (
    CheckpointError,
    Group,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    make_task,
    read_checkpoint,
    read_metrics,
    write_checkpoint,
)
from equipoise.engine.progress import SilentProgress
from equipoise.engine.warm_start import _Table
from equipoise.families.relu_implicit import ReluImplicitNetwork
from equipoise.gradients.start import rescale
from equipoise.solvers.linear_problem import LinearProblem
from equipoise.solvers.problem import Linearization


def make_data(count: int = 20) -> Dataset:
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 2
    x = torch.randn(count, 6, generator=draw) + y[:, None]
    return Dataset("blobs", "train", "classification", ("a", "b"), (6,), x, y)


class StopAt(SilentProgress):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, *_: object) -> None:
        self.at -= 1
        if not self.at:
            signal.raise_signal(signal.SIGINT)


def make_model() -> ReluImplicitNetwork:
    adjoint = {"name": "implicit", "solver": "fixed_point"}
    return ReluImplicitNetwork((6,), 32, gamma=0.3, tolerance=1e-6, gradient=adjoint)


def make(folder: Path | None = None, *, progress: object = None, **settings: object) -> Trainer:
    torch.manual_seed(0)
    data = make_data()
    chosen = {"epochs": 6, "batch": 20, "log_every": 1, "warm_start": True, **settings}
    return Trainer(
        make_model(),
        make_task("binary-regression", data),
        data,
        data,
        settings=TrainConfig(**chosen),  # type: ignore[arg-type]
        optimizer=OptimizerConfig("sgd", learning_rate=0.05, momentum=0.0),
        schedule=ScheduleConfig("constant"),
        folder=folder,
        progress=progress or SilentProgress(),  # type: ignore[arg-type]
    )


def epochs(folder: Path) -> list[dict[str, object]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "epoch"]


def test_warm_run_learns_the_same_in_fewer_steps(tmp_path: Path) -> None:
    for warm in (False, True):
        make(tmp_path / str(warm), warm_start=warm).fit()
    cold, warm_lines = epochs(tmp_path / "False"), epochs(tmp_path / "True")
    for first, second in zip(cold, warm_lines, strict=True):
        assert second["train"]["loss"] == pytest.approx(first["train"]["loss"], rel=1e-4)
        # Scores begin each solve anew.
        assert second["test"]["forward_steps"] == pytest.approx(
            first["test"]["forward_steps"], abs=0.2
        )
    for name in ("forward_steps", "backward_steps"):
        assert warm_lines[0][name] == cold[0][name]
        assert warm_lines[-1][name] < 0.75 * cold[-1][name]
    assert all(line["forward_status"] == {"CONVERGED": 20} for line in warm_lines)


def test_evaluation_sees_nothing_of_the_kept_states() -> None:
    trainer = make()
    trainer.fit()
    found = trainer.evaluate(make_data())
    torch.manual_seed(1)
    fresh = make_model()
    fresh.load_state_dict(trainer.model.state_dict())
    x = make_data().x
    assert x is not None
    assert torch.equal(trainer.model.eval()(x), fresh.eval()(x))
    assert found.status == {"CONVERGED": 20}


@pytest.mark.parametrize("batch", [20, 8])
def test_stopped_run_resumes_bit_for_bit(tmp_path: Path, batch: int) -> None:
    settings = {"batch": batch, "accumulate": 2, "epochs": 4}
    whole = make(tmp_path / "whole", **settings)
    whole.fit()
    # In the middle of an epoch where there are several steps in one.
    with pytest.raises(Interrupted):
        make(tmp_path / "cut", progress=StopAt(5 if batch == 8 else 2), **settings).fit()
    again = make(tmp_path / "cut", **settings)
    again.fit(resume=True)
    for name, tensor in whole.state.pack(Group())[0].items():
        assert torch.equal(tensor, again.state.pack(Group())[0][name]), name
    assert "warm.equilibrium.0.backward.last" in whole.state.pack(Group())[0]


def test_checkpoint_with_states_of_other_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, progress=StopAt(2)).fit()
    name = "warm.equilibrium.0.forward.last"
    for path in (tmp_path / "checkpoints").iterdir():
        tensors, state = read_checkpoint(path)
        write_checkpoint(path, {**tensors, name: tensors[name][:-1]}, state)
    with pytest.raises(CheckpointError, match="warm starts of another model or other samples"):
        make(tmp_path).fit(resume=True)


def test_samples_of_a_skipped_step_start_afresh() -> None:
    trainer = make(epochs=1)
    trainer.fit()
    warm = trainer.warm
    assert warm is not None
    rows = torch.arange(20)
    assert bool(warm.look_up("equilibrium.0", "forward", rows)[1].all())
    x, y = make_data().gather(rows)
    x[3, 2] = torch.nan
    trainer.model.equilibrium.solves.on_failure = "ignore"
    with trainer.solves.listening():
        step = trainer.stepper.compute(x[:5], y[:5], 0.1, rows[:5])
        trainer.stepper.apply(step, trainer.stepper.verdict(step))
    start, known = warm.look_up("equilibrium.0", "forward", rows)
    assert known.tolist() == [False] * 5 + [True] * 15
    assert not start[:5].any()
    assert start.isfinite().all()


def test_wrong_uses_are_refused_in_a_sentence() -> None:
    data, task = make_data(), make_task("binary-regression", make_data())
    settings = TrainConfig(warm_start=True, batch=20)
    model = ReluImplicitNetwork((6,), 32)
    transform = Compose(ToFloat(), Degrade(0.1))
    with pytest.raises(SettingError, match=r"train.warm_start must be false where samples are"):
        Trainer(model, task, data, settings=settings, transform=transform)
    with pytest.raises(SettingError, match="be false for a model without equilibrium layers"):
        Trainer(nn.Linear(6, 1), task, data, settings=settings)
    unrolled = ReluImplicitNetwork((6,), 32, gradient="unrolled")
    with pytest.raises(SettingError, match="since Unrolled depends on the start"):
        Trainer(unrolled, task, data, settings=settings)
    wide, small = ReluImplicitNetwork((6,), 4000), TrainConfig(warm_start=True, warm_start_memory=1)
    with pytest.raises(SettingError, match=r"warm_start_memory must be at least \d+, the MiB"):
        Trainer(wide, task, data, settings=small)


class Coupled(Cell):
    coupled = True

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.eye(6) / 4)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh((z - z.mean(0)) @ self.W + x)


def test_layer_that_solves_for_a_whole_batch_is_refused() -> None:
    data = make_data()
    model = nn.Sequential(Equilibrium(Coupled()), nn.Linear(6, 1))
    task = make_task("binary-regression", data)
    with pytest.raises(SettingError, match="which does not solve for each sample alone"):
        Trainer(model, task, data, settings=TrainConfig(warm_start=True, batch=20))


def test_start_is_the_multiple_of_least_residual() -> None:
    draw = torch.Generator().manual_seed(0)
    J = 0.2 * torch.randn(5, 5, dtype=torch.float64, generator=draw)
    v = torch.randn(3, 5, dtype=torch.float64, generator=draw)
    g = torch.randn(3, 5, dtype=torch.float64, generator=draw)
    v[1] = 0

    base = SimpleNamespace(
        args=(),
        mutable_args=(),
        symmetric=False,
        can_drop_rows=True,
        coupled=False,
        coupled_name="",
        work=SimpleNamespace(count=0),
    )
    local = Linearization(g, jvp=lambda u: u @ J.T, vjp=lambda u: u @ J)
    problem = LinearProblem(base, g, g, transpose=True, local=local)  # type: ignore[arg-type]
    start, value = rescale(problem, v)
    for row in (0, 2):
        gap = (v[row] - v[row] @ J).numpy()
        factor = np.linalg.lstsq(gap[:, None], g[row].numpy(), rcond=None)[0][0]
        torch.testing.assert_close(start[row], factor * v[row])
    assert not start[1].any()
    torch.testing.assert_close(value, start @ J + g)


def test_line_is_taken_only_where_it_would_have_been_nearer() -> None:
    table = _Table(torch.zeros(1, 2), 2, scaled=False)
    rows, sound = torch.arange(2), torch.ones(2, dtype=torch.bool)
    for k in range(1, 4):  # one sample moves evenly, the other back and forth
        table.write(rows, torch.tensor([[1.0 * k, 0], [(-1.0) ** k, 0]]), sound)
    start, known = table.read(rows)
    assert known.all()
    assert start[:, 0].tolist() == [4.0, -1.0]


def test_processes_share_the_newest_of_each_sample() -> None:
    """What two processes wrote to different samples, added up as all_reduce would."""
    tables = [_Table(torch.zeros(1, 2), 4, scaled=False) for _ in range(2)]
    sound = torch.tensor([True, True])
    for table in tables:  # both know the same of the epoch before
        table.write(torch.arange(4), torch.full((4, 2), 7.0), torch.tensor([True] * 4))
        table.fresh.zero_()
    tables[0].write(torch.tensor([0, 2]), torch.tensor([[1.0, 1], [2, 2]]), sound)
    tables[1].write(torch.tensor([1, 3]), torch.tensor([[3.0, 3], [4, 4]]), ~sound)

    def merge(own: _Table, other: _Table) -> dict[str, Tensor]:
        sent: list[Tensor] = []

        class Sending(Group):
            def sum(self, tensor: Tensor) -> Tensor:
                sent.append(tensor)
                return tensor

        class Adding(Group):
            def sum(self, tensor: Tensor) -> Tensor:
                return tensor + sent.pop(0)

        other.merged(Sending(world=2))
        return own.merged(Adding(world=2))

    first, second = merge(*tables), merge(*reversed(tables))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["last"][:, 0].tolist() == [1.0, 0.0, 2.0, 0.0]
    assert first["count"].tolist() == [2, 0, 2, 0]


def test_model_is_not_changed_by_a_look_at_its_layers() -> None:
    data = make_data()
    model = nn.Sequential(
        nn.BatchNorm1d(6), create_model("relu-implicit", input_shape=(6,), width=8)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    task = make_task("binary-regression", data)
    Trainer(model, task, data, settings=TrainConfig(warm_start=True, batch=20))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
