import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import equipoise
from equipoise.core import Interrupted, SourceError
from equipoise.data import Dataset, batches
from equipoise.engine import (
    CheckpointError,
    Group,
    Metric,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    Trainer,
    evaluate,
    make_task,
    operator_norms,
    read_checkpoint,
    read_metrics,
)
from equipoise.engine.log import MetricLogWarning
from equipoise.engine.optimizer import Average
from equipoise.engine.progress import SilentProgress
from equipoise.engine.solve_monitor import norm_limit
from equipoise.layers import Equilibrium
from equipoise.models import create_model


class Blobs:
    """Three classes of 8 x 8 pictures that a small network learns at once."""

    def __init__(self, count: int = 96, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.y = torch.arange(count) % 3
        self.x = torch.randn(count, 1, 8, 8, generator=random) / 4
        self.x[:, 0, 0, :3] += 3 * nn.functional.one_hot(self.y, 3)

    def dataset(self) -> Dataset:
        return Dataset(
            "blobs", "train", "classification", ("a", "b", "c"), (1, 8, 8), self.x, self.y
        )


class Small(nn.Module):
    """Batch normalisation, an equilibrium, dropout and a linear map: a run remembers them all."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.equilibrium = equipoise.OptEq(64, 16, 8, **options)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.drop(self.equilibrium(self.norm(x.flatten(1)))))


class Quiet(SilentProgress):
    """Takes warnings about solves, as displays do, and shows nothing."""


def make(
    folder: Path | None = None,
    *,
    data: Dataset | None = None,
    model: nn.Module | None = None,
    progress=None,
    **settings,
):
    torch.manual_seed(0)
    data = data or Blobs().dataset()
    parts = {
        name: settings.pop(name)
        for name in ("optimizer", "schedule", "held_out")
        if name in settings
    }
    test = settings.pop("test", data)
    return Trainer(
        model or Small(),
        make_task("auto", data),
        data,
        test,
        settings=TrainConfig(**{"epochs": 3, "batch": 16, "log_every": 1, "ema": 0.5, **settings}),
        folder=folder,
        progress=progress or Quiet(),
        **parts,
    )


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    state = {
        f"optimizer.{i}.{name}": value
        for i, each in trainer.optimizer.state_dict()["state"].items()
        for name, value in each.items()
    }
    average = (
        {f"average.{name}": value for name, value in trainer.average.values.items()}
        if trainer.average
        else {}
    )
    return {**trainer.model.state_dict(), **state, **average, "random": torch.get_rng_state()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


class StopAt(SilentProgress):
    """Sends a signal to the own process at one step, as Ctrl-C does."""

    def __init__(self, at: int, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.at, self.number = at, number

    def step(self, step, epoch, values) -> None:
        if step == self.at:
            os.kill(os.getpid(), self.number)


def test_trainer_equals_a_plain_loop_in_pytorch_bit_for_bit():
    trainer = make(
        ema=0.0,
        optimizer=OptimizerConfig("adamw", 1e-2, 1e-2, decay_all=True),
        schedule=ScheduleConfig("constant"),
    )
    trainer.fit()

    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-2)
    torch.manual_seed(0)
    with equipoise.flush_denormals():
        for epoch in range(3):
            for x, y in batches(Blobs().dataset(), 16, 0, epoch):
                model.train()
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert_same(trainer.model.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("opteq-mnist", {}, 1.0),
        ("opteq-mnist", {"activation": "sigmoid", "regularizer": "l1"}, 2.0),
        ("opteq-mnist", {"activation": ["relu", "sigmoid", "relu"]}, None),
        ("relu-implicit", {}, 1.0),
        ("monotone-digits", {}, None),
        ("lipschitz-table", {}, None),
    ],
)
def test_norms_are_compared_with_what_the_theory_of_a_model_allows(name, options, limit):
    assert norm_limit(create_model(name, **options)) == limit


def test_trainer_learns_and_says_what_its_solves_did(tmp_path):
    summary = make(tmp_path, epochs=8, optimizer=OptimizerConfig("adam", 2e-2)).fit()
    assert summary.test["accuracy"] == 1
    assert summary.test["samples"] == 96
    assert summary.test["missed"] == 0
    assert summary.steps == 48
    assert summary.forward_status == summary.backward_status == {"CONVERGED": 8 * 96}
    assert summary.stopped == "finished"
    assert torch.tensor(summary.confusion).diag().tolist() == [32, 32, 32]
    assert summary.parameters == {"total": sum(weight.numel() for weight in Small().parameters())}
    lines = read_metrics(tmp_path / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["step"] for line in steps] == list(range(1, 49))
    assert [line["epoch"] for line in epochs] == list(range(8))
    for name in (
        "loss",
        "accuracy",
        "learning_rate",
        "gradient_norm",
        "forward_steps",
        "backward_steps",
        "samples_per_second",
        "loading_fraction",
    ):
        assert all(math.isfinite(line[name]) and line[name] >= 0 for line in steps), name
    assert all(0 < line["forward_residual"] <= 1e-4 for line in steps)
    assert all(0 <= line["backward_residual"] <= 1e-4 for line in steps)
    assert all(line["operator_norms"].keys() == {"equilibrium.1"} for line in epochs)
    assert all(line["norm_limit"] == 1 for line in epochs)
    assert all(sum(line["forward_status"].values()) == 96 for line in epochs)
    assert epochs[-1]["train"]["loss"] == pytest.approx(
        sum(line["loss"] for line in steps[-6:]) / 6
    )


@pytest.mark.parametrize("at", [1, 6, 9, 17, 18])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_resume_after_a_signal_is_bit_identical(tmp_path, at, number):
    whole = make(tmp_path / "whole")
    expected = whole.fit()
    stopped = make(tmp_path / "parts", progress=StopAt(at, number))
    with pytest.raises(Interrupted, match=f"interrupted at step {at}; a checkpoint was written"):
        stopped.fit()
    torch.manual_seed(99)  # a new process has other random numbers
    again = make(tmp_path / "parts", model=Small())
    summary = again.fit(resume=True)
    assert_same(tensors(whole), tensors(again))
    assert summary.test == expected.test
    assert summary.train == expected.train
    assert summary.forward_status == expected.forward_status

    def lines(folder):
        timing = ("seconds", "samples_per_second", "loading_fraction")
        return [
            {k: v for k, v in line.items() if k not in timing}
            for line in read_metrics(folder / "metrics.jsonl")
        ]

    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    weights = [
        read_checkpoint(tmp_path / part / "model.safetensors")[0] for part in ("whole", "parts")
    ]
    assert_same(*weights)


@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig("sgd", 0.1, 1e-3, nesterov=True),
        OptimizerConfig("adam"),
        OptimizerConfig("adamw", 1e-3, 1e-2),
        OptimizerConfig("adamw", 1e-3, 1e-2, rates={"operators": 0.25, "bias": 3.0, "norm": 0.0}),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_is_bit_identical_for_every_optimizer(tmp_path, optimizer, precision):
    settings = {
        "optimizer": optimizer,
        "schedule": ScheduleConfig("one-cycle"),
        "precision": precision,
        "clip": 0.5,
    }
    whole = make(tmp_path / "whole", **settings)
    whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", progress=StopAt(8), **settings).fit()
    again = make(tmp_path / "parts", **settings)
    again.fit(resume=True)
    assert_same(tensors(whole), tensors(again))


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    whole = make(tmp_path / "whole")
    whole.fit()
    fresh = make(tmp_path / "fresh")
    fresh.fit(resume=True)
    assert_same(tensors(whole), tensors(fresh))


def test_resume_with_other_data_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        make(tmp_path, progress=StopAt(8)).fit()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    other, same = Blobs(seed=1).dataset(), Blobs().dataset()
    for options, name in (({"data": other, "test": same}, "training"), ({"test": other}, "test")):
        with pytest.raises(
            SourceError,
            match=rf"the {name} samples have changed since\. Put them back .* --output NEW",
        ):
            make(tmp_path, **options).fit(resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    make(tmp_path).fit(resume=True)


def test_resume_needs_checkpoints_once_there_are_weights(tmp_path):
    make(tmp_path, epochs=1).fit()
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SourceError, match="must hold checkpoints to be resumed; there are only"):
        make(tmp_path, epochs=1).fit(resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("damage", ["gone", "in the middle"])
def test_resume_goes_on_with_what_is_left_of_the_metrics(tmp_path, damage):
    whole = make(tmp_path / "whole")
    whole.fit()
    folder = tmp_path / "parts"
    with pytest.raises(Interrupted):
        make(folder, progress=StopAt(9)).fit()
    log = folder / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.unlink()
    kept: list[bytes] = []
    if damage != "gone":
        kept = lines[:2] + lines[3:]
        log.write_bytes(b"".join([*lines[:2], lines[2][:20], b"\n", *lines[3:]]))
    again = make(folder)
    with pytest.warns(MetricLogWarning, match=rf"the {len(kept)} that are left are kept"):
        again.fit(resume=True)
    assert_same(tensors(whole), tensors(again))
    assert log.read_bytes().splitlines(keepends=True)[: len(kept)] == kept
    steps = [line["step"] for line in read_metrics(log) if line["kind"] == "step"]
    assert steps == ([] if damage == "gone" else [1, 2, 4, 5, 6, 7, 8, 9]) + list(range(10, 19))
    assert len(read_metrics(log)) - len(steps) == (2 if damage == "gone" else 3)


def test_resume_of_a_finished_run_returns_its_summary(tmp_path):
    summary = make(tmp_path).fit()
    again = make(tmp_path).fit(resume=True)
    assert (again.test, again.train, again.steps) == (summary.test, summary.train, summary.steps)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"batch": 32}, "a checkpoint of a run with other settings: train.batch differs"),
        (
            {"optimizer": OptimizerConfig("sgd")},
            "a checkpoint of a run with other settings: optimizer.name differs",
        ),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 3))},
            "weights of another model: '1.bias' is in one of them only",
        ),
    ],
)
def test_resume_of_another_run_is_refused_in_one_line(tmp_path, change, reason):
    make(tmp_path).fit()
    with pytest.raises(CheckpointError, match=reason) as error:
        make(tmp_path, **change).fit(resume=True)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "checkpoints" / "step-"))


def poisoned(rows: list[int]) -> Dataset:
    blobs = Blobs()
    blobs.x[rows, 0, 7, 7] = math.nan
    return blobs.dataset()


class Monitor(SilentProgress):
    """Keeps what the model holds after each step, and what the display is told."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[str, torch.Tensor]] = []
        self.notes: list[str] = []
        self.trainer: Trainer | None = None

    def start(self, epochs, steps, first_step=0, title="", **pace) -> None:
        self.keep()

    def step(self, step, epoch, values) -> None:
        self.keep()

    def keep(self) -> None:
        state = {name: value for name, value in tensors(self.trainer).items() if name != "random"}
        self.states.append({name: value.clone() for name, value in state.items()})

    def note(self, text) -> None:
        self.notes.append(text)


def test_step_with_nan_is_skipped_and_changes_no_bit(tmp_path):
    watch = Monitor()
    trainer = watch.trainer = make(
        tmp_path,
        data=poisoned([5]),
        optimizer=OptimizerConfig("sgd", 0.1),
        test=Blobs().dataset(),
        progress=watch,
        epochs=2,
    )
    summary = trainer.fit()
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    skipped = [number for number, line in enumerate(lines) if line["skipped"]]
    assert len(skipped) == summary.skipped == 2
    for number in skipped:
        assert_same(watch.states[number], watch.states[number + 1])
        assert lines[number]["loss"] is None
    others = [number for number in range(12) if number not in skipped]
    assert all(
        not torch.equal(watch.states[n]["head.weight"], watch.states[n + 1]["head.weight"])
        for n in others
    )
    assert all(torch.isfinite(value).all() for value in tensors(trainer).values())
    assert any(
        "was skipped: forward solve: 16 of 16 samples met NaN or infinity" in note
        for note in watch.notes
    )
    assert (
        summary.forward_status["NONFINITE"] == 32
    )  # batch normalisation spreads it over the batch


class Blowing(equipoise.Cell):
    """`z -> 3 z + U x`, which no iteration can solve."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def inject(self, x):
        return self.inner(x)

    def initial(self, x, context):
        return torch.zeros_like(context)

    def step(self, z, context):
        return 3 * z + context


def test_ten_failed_steps_in_a_row_stop_the_run_with_cause_and_remedy(tmp_path):
    model = nn.Sequential(nn.Flatten(), Equilibrium(Blowing(), "fixed_point"), nn.Linear(4, 3))
    trainer = make(tmp_path, model=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(equipoise.ConvergenceError) as error:
        trainer.fit()
    text = str(error.value)
    assert text.startswith("10 steps in a row were skipped, up to step 10: ")
    assert "16 of 16 samples diverged" in text
    assert "bound the norm of the cell's Jacobian below 1" in text
    assert_same(before, model.state_dict())
    assert not trainer.optimizer.state_dict()["state"]


def test_nine_failed_steps_in_a_row_do_not():
    rows = list(
        range(9 * 8)
    )  # 12 batches of 8 in the order of the seed; fill all but three with NaN
    order = torch.cat(
        [
            y
            for _, y in batches(
                Dataset("i", "train", "arrays", (), (), torch.arange(96), torch.arange(96)), 8
            )
        ]
    )
    trainer = make(data=poisoned(order[rows].tolist()), test=None, epochs=1, batch=8)
    assert trainer.fit().skipped == 9


def test_infinite_loss_is_skipped_with_its_own_reason():
    class Exploding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, x):
            return self.head(x.flatten(1)) * math.inf

    with pytest.raises(
        equipoise.ConvergenceError,
        match=r"the loss was nan; lower optimizer.learning_rate or set train.clip",
    ):
        make(model=Exploding(), ema=0.0, test=None).fit()


def test_part_that_is_frozen_stays_so_through_steps_and_scores():
    model, asleep = Small(), Small().eval()
    model.norm.eval()
    make(model=model, ema=0.0).fit()
    assert (model.training, model.norm.training) == (True, False)
    assert not model.norm.running_mean.any()
    make(model=asleep, ema=0.0).fit()
    assert asleep.norm.running_mean.all()


def test_evaluate_says_how_many_samples_missed_the_tolerance():
    data = Blobs().dataset()
    model = Small(solver="fixed_point", tolerance=1e-7, max_steps=3, on_failure="ignore")
    scores = evaluate(model, make_task("auto", data), data)
    model.eval()
    with torch.no_grad():
        model(data.x)
    assert 0 < scores.missed == int((~model.equilibrium.last.converged).sum()) <= 96
    assert scores.status["MAX_STEPS"] == scores.missed
    assert sum(scores.status.values()) == scores.samples == 96


def test_evaluate_leaves_mode_weights_and_random_numbers_alone():
    data, model = Blobs().dataset(), Small()
    before, state = (
        {name: value.clone() for name, value in model.state_dict().items()},
        torch.get_rng_state(),
    )
    model.train()
    evaluate(model, make_task("auto", data), data, batch=7)
    assert model.training
    assert_same(before, model.state_dict())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("batch", [7, 32, 96])
def test_evaluate_does_not_depend_on_the_batch(batch):
    data, model = Blobs().dataset(), Small(tolerance=1e-6)
    scores = [evaluate(model, make_task("auto", data), data, batch=size) for size in (batch, 96)]
    assert scores[0].metrics["loss"] == pytest.approx(scores[1].metrics["loss"], abs=1e-6)
    assert scores[0].metrics["accuracy"] == scores[1].metrics["accuracy"]


def test_average_is_what_its_formula_says_and_what_is_kept(tmp_path):
    watch = Monitor()
    trainer = watch.trainer = make(tmp_path, progress=watch, ema=0.9, epochs=2)
    start = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.fit()
    average = start["head.weight"]
    for number, state in enumerate(watch.states[1:]):
        decay = min(0.9, (1 + number) / (10 + number))
        average = decay * average + (1 - decay) * state["head.weight"]
    kept, _ = read_checkpoint(tmp_path / "model.safetensors")
    assert torch.allclose(kept["head.weight"], average, atol=1e-6)
    assert not torch.equal(kept["head.weight"], watch.states[-1]["head.weight"])
    assert_same(
        kept, trainer.model.state_dict()
    )  # the model is left with the weights that were scored
    assert not torch.equal(kept["norm.running_mean"], watch.states[-1]["norm.running_mean"])


def test_early_stop_keeps_the_best_weights(tmp_path):
    train, held = Blobs(96).dataset(), Blobs(48, seed=1)
    held.y = held.y.roll(1)  # wrong answers: learning makes the score worse
    wrong = Dataset("blobs", "val", "classification", ("a", "b", "c"), (1, 8, 8), held.x, held.y)
    trainer = make(
        tmp_path,
        data=train,
        test=wrong,
        held_out=True,
        epochs=30,
        patience=3,
        ema=0.0,
        optimizer=OptimizerConfig("adam", 3e-2),
    )
    summary = trainer.fit()
    epochs = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "epoch"]
    scores = [line["validation"]["accuracy"] for line in epochs]
    best = scores.index(max(scores))
    assert summary.stopped == "early"
    assert summary.epochs == len(epochs) == best + 4 < 30
    assert summary.validation["accuracy"] == max(scores)
    assert not summary.test
    weights, state = read_checkpoint(tmp_path / "model.safetensors")
    assert state["epoch"] == best + 1
    assert_same(weights, trainer.model.state_dict())
    assert evaluate(trainer.model, trainer.task, wrong).metrics["accuracy"] == max(scores)


@pytest.mark.parametrize("at", [7, 15])
def test_resume_of_a_run_that_stops_early_is_bit_identical(tmp_path, at):
    train, held = Blobs(96).dataset(), Blobs(48, seed=1)
    wrong = Dataset(
        "blobs", "val", "classification", ("a", "b", "c"), (1, 8, 8), held.x, held.y.roll(1)
    )
    settings = {
        "data": train,
        "test": wrong,
        "held_out": True,
        "epochs": 30,
        "patience": 3,
        "optimizer": OptimizerConfig("adam", 3e-2),
    }
    whole = make(tmp_path / "whole", **settings)
    expected = whole.fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "parts", progress=StopAt(at), **settings).fit()
    again = make(tmp_path / "parts", **settings)
    assert again.fit(resume=True).validation == expected.validation
    assert_same(tensors(whole), tensors(again))


def test_run_with_scores_that_are_no_numbers_keeps_its_first_weights(tmp_path, monkeypatch):
    trainer = make(tmp_path, test=poisoned(list(range(96))), held_out=True, patience=2, epochs=9)
    monkeypatch.setattr(type(trainer.task), "metrics", (Metric("loss", "Loss"),))
    summary = trainer.fit()
    assert summary.stopped == "early"
    assert read_checkpoint(tmp_path / "model.safetensors")[1]["epoch"] == 1


def test_fit_writes_over_no_other_run(tmp_path):
    trainer = make(tmp_path)
    trainer.fit()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError,
        match=r"already holds a run\. Pass resume=True to resume it, or another folder",
    ):
        make(tmp_path).fit()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match=r"Trainer\.fit must be called once"):
        trainer.fit()


def test_last_batch_of_one_sample_is_refused_for_batch_normalisation():
    with pytest.raises(
        ValueError, match=r"train\.batch must not leave one sample for the last step"
    ):
        make(batch=19)  # 96 = 5 * 19 + 1
    make(batch=19, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), epochs=1).fit()


def test_signal_while_scoring_stops_after_the_epoch(tmp_path):
    class StopInEpoch(SilentProgress):
        def epoch(self, epoch, line) -> None:
            if epoch == 1:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="interrupted at step 12; a checkpoint was written"):
        make(tmp_path / "parts", progress=StopInEpoch()).fit()
    whole, again = make(tmp_path / "whole"), make(tmp_path / "parts")
    whole.fit()
    again.fit(resume=True)
    assert_same(tensors(whole), tensors(again))


class Pair(nn.Module):
    """Two equilibria, of which the first solves the whole batch as one."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first = equipoise.OptEq(
            64, 8, 8, solver="fixed_point", tolerance=1e-7, max_steps=steps, on_failure="ignore"
        )
        self.first.cell.coupled = True
        self.second = equipoise.OptEq(8, 8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1))))


@pytest.mark.parametrize(("steps", "missed"), [(2, 96), (300, 0)])
def test_missed_samples_are_counted_over_all_layers(steps, missed):
    data = Blobs().dataset()
    assert evaluate(Pair(steps), make_task("auto", data), data, batch=32).missed == missed


def test_patience_without_held_out_samples_is_refused():
    with pytest.raises(ValueError, match="held-out samples"):
        make(patience=2)


def test_clip_bounds_the_gradient_that_is_stepped_on():
    trainer = make(
        data=Blobs(16).dataset(),
        clip=1e-3,
        ema=0.0,
        epochs=1,
        optimizer=OptimizerConfig("sgd", 1.0, momentum=0.0),
        schedule=ScheduleConfig("constant"),
    )
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.fit()
    moved = (
        torch.cat(
            [
                (old - new).flatten()
                for old, new in zip(before, trainer.model.parameters(), strict=True)
            ]
        )
        .norm()
        .item()
    )
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_float16_looks_for_its_scale_without_failing(tmp_path):
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, x):
            return 300 * self.head(x.flatten(1))

    trainer = make(
        tmp_path, precision="float16", model=Steep(), ema=0.0, epochs=4, failures=1, test=None
    )
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    summary = trainer.fit()
    assert 1 < summary.skipped < 20
    assert trainer.state.scaler.get_scale() < 2.0**24


def test_float16_scales_gradients_and_learns():
    trainer = make(precision="float16", epochs=6, optimizer=OptimizerConfig("adam", 2e-2))
    assert trainer.fit().test["accuracy"] == 1
    assert trainer.state.scaler.is_enabled()


def test_norms_stay_projected_in_training(tmp_path):
    model = Small(norm="project", bound=0.5)
    make(tmp_path, model=model, optimizer=OptimizerConfig("adam", 0.1)).fit()
    assert 0 < operator_norms(model)["equilibrium.1"] <= 0.5 * (1 + 1e-5)


def test_orthogonal_run_resumes_bit_identically(tmp_path):
    def begin(folder, progress=None):
        torch.manual_seed(0)
        return make(folder, model=Small(norm="orthogonal"), ema=0.0, progress=progress)

    whole = begin(tmp_path / "whole")
    whole.fit()
    expected = tensors(whole)
    values = torch.linalg.svdvals(whole.model.equilibrium.layers.operators[0].weight)
    assert torch.allclose(values, torch.full_like(values, 0.99), rtol=1e-5)
    with pytest.raises(Interrupted):
        begin(tmp_path / "run", StopAt(8)).fit()
    resumed = begin(tmp_path / "run")
    resumed.fit(resume=True)
    assert_same(expected, tensors(resumed))


def test_tensorboard_gets_the_same_numbers(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    make(tmp_path, tensorboard=True, epochs=1).fit()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert [event.value for event in events.Scalars("step/loss")] == pytest.approx(
        [line["loss"] for line in lines]
    )


def test_batch_must_divide_among_processes():
    data = Blobs().dataset()
    with pytest.raises(
        ValueError, match=r"^train.batch must be a multiple of the 3 processes; got 16\.$"
    ):
        Trainer(
            Small(),
            make_task("auto", data),
            data,
            settings=TrainConfig(batch=16),
            group=Group(world=3),
            progress=SilentProgress(),
        )


def test_model_without_weights_is_refused():
    with pytest.raises(ValueError, match="must have weights to train; got none in Flatten"):
        make(model=nn.Flatten())


def test_checkpoints_hold_nothing_but_tensors_and_json(tmp_path):
    make(tmp_path).fit()
    for path in (tmp_path / "checkpoints").iterdir():
        _, state = read_checkpoint(path)
        assert json.loads(json.dumps(state)) == state
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "model.safetensors",
    ]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_average_includes_complex_weights():
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    average = Average(model, 0.5)
    with torch.no_grad():
        model["w"].fill_(2 - 4j)
    average.update()
    assert torch.allclose(average.values["w"], torch.full((3,), 0.9 * (2 - 4j)))
