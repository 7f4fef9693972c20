"""Learning from another model."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import ScaledCell
from pixel_run import StopAt
from scipy.special import softmax
from scipy.stats import entropy
from torch import Tensor, nn

from equipoise import ConvergenceWarning, Equilibrium, OptEq
from equipoise.core import Interrupted, SettingError, SourceError
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task, read_metrics
from equipoise.engine.distillation import Distillation, DistillationLoss
from equipoise.engine.progress import SilentProgress
from equipoise.engine.step import Stepper, Verdict
from equipoise.engine.tasks import Classification, Regression


class Shapes(list[tuple[int, ...]]):
    """The shapes that a module and its copies have seen."""

    def __deepcopy__(self, memo: object) -> Shapes:
        return self


class Teacher(nn.Module):
    """A network with dropout and batch normalisation, which evaluation mode must still."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
        )
        self.seen = Shapes()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        found: Tensor = self.layers(x)
        return found


class Student(nn.Module):
    """Takes images of every even size."""

    size_multiple = 2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(3, 3)
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        found: Tensor = self.head(x.mean((2, 3)))
        return found


def make_data() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 4, 4, generator=draw), torch.arange(16) % 3
    return Dataset("made up", "train", "classification", ("a", "b", "c"), (3, 4, 4), x, y)


def make_trainer(
    teacher: nn.Module | None,
    folder: Path | None = None,
    progress: SilentProgress | None = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Trainer:
    data = make_data()
    task = make_task("classification", data)
    return Trainer(
        model or Student(),
        task,
        data,
        settings=TrainConfig(**{"epochs": 3, "batch": 8, "log_every": 1, **settings}),
        optimizer=OptimizerConfig("sgd", learning_rate=0.1, momentum=0.0),
        folder=folder,
        progress=progress or SilentProgress(),
        distillation=teacher and DistillationLoss(teacher, task, 2.0, 3.0),
    )


def compute_step(trainer: Trainer) -> Any:
    stepper: Stepper = trainer.stepper
    return stepper.compute(*make_data().gather(range(16)), 0.1)


def test_term_is_the_divergence_that_scipy_finds() -> None:
    teacher = Teacher()
    step = compute_step(make_trainer(teacher, batch=16))
    x = make_data().x
    with torch.no_grad():
        wanted, found = teacher.eval()(x).double().numpy(), Student()(x).double().numpy()
    each = entropy(softmax(wanted / 3, axis=1), softmax(found / 3, axis=1), axis=1)
    assert float(step.terms["distillation_loss"]) == pytest.approx(9 * np.mean(each), rel=1e-5)


def test_gradient_is_that_of_the_loss_by_hand() -> None:
    trainer, teacher = make_trainer(Teacher(), batch=16), Teacher().eval()
    compute_step(trainer)
    x, y = make_data().gather(range(16))
    student = Student()
    output = student(x)
    p, q = (teacher(x) / 3).softmax(1).detach(), (output / 3).softmax(1)
    total = nn.functional.cross_entropy(output, y) + 2 * 9 * (p * (p / q).log()).sum(1).mean()
    expected = torch.autograd.grad(total, [*student.parameters()])
    for own, other in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(own.grad, other, rtol=1e-4, atol=1e-6)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    whole = compute_step(trainer := make_trainer(Teacher(), batch=16))
    parts = compute_step(other := make_trainer(Teacher(), batch=16, accumulate=3))
    term = "distillation_loss"
    assert float(parts.terms[term]) == pytest.approx(float(whole.terms[term]), rel=1e-5)
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    for own, others in pairs:
        torch.testing.assert_close(own.grad, others.grad, rtol=1e-4, atol=1e-6)


def test_parts_count_by_their_samples_where_targets_are_left_out() -> None:
    data = replace(make_data(), y=torch.tensor([3, 0, 3, 3, 1, 2, 0, 3, 3, 3, 3, 1, 0, 2, 1, 3]))
    gradients = []
    for accumulate in (1, 3, 5):
        task = Classification(3, ignore=3)
        trainer = Trainer(
            Student(),
            task,
            data,
            settings=TrainConfig(batch=16, accumulate=accumulate),
            progress=SilentProgress(),
            distillation=DistillationLoss(Teacher(), task, 2.0, 3.0),
        )
        step = trainer.stepper.compute(*data.gather(range(16)), 0.1)
        (term,) = step.terms.values()
        each = (own.grad.flatten() for own in trainer.model.parameters())
        gradients.append(torch.cat([*each, term.flatten()]))
    for parts in gradients[1:]:
        torch.testing.assert_close(parts, gradients[0], rtol=1e-5, atol=1e-6)


def test_task_that_cannot_be_taught_is_refused_by_the_trainer_too() -> None:
    taught = DistillationLoss(Teacher(), make_task("classification", make_data()), 1.0, 1.0)
    x, y = torch.randn(8, 4), torch.randn(8, 3)
    data = Dataset("numbers", "train", "regression", (), (4,), x, y)
    with pytest.raises(SettingError, match="left out for the task 'regression'"):
        Trainer(nn.Linear(4, 3), Regression(3), data, distillation=taught)


def test_teacher_stays_as_it_was_and_sees_images_at_their_own_size() -> None:
    teacher = Teacher()
    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    trainer = make_trainer(teacher, image_sizes=(2, 4))
    trainer.fit()
    assert all(torch.equal(before[name], each) for name, each in teacher.state_dict().items())
    assert all(each.grad is None for each in teacher.parameters())
    assert set(teacher.seen) == {(8, 3, 4, 4)}
    student: Any = trainer.model
    assert (8, 3, 2, 2) in student.seen


def test_taught_run_resumes_bit_for_bit_with_its_own_teacher_alone(tmp_path: Path) -> None:
    whole = make_trainer(Teacher(), tmp_path / "whole")
    whole.fit()
    with pytest.raises(Interrupted):
        make_trainer(Teacher(), tmp_path / "parts", StopAt(3)).fit()
    for other, became in ((Teacher(seed=2), "have changed since"), (None, "are missing")):
        with pytest.raises(SourceError, match=f"settings of the teacher {became}"):
            make_trainer(other, tmp_path / "parts").fit(resume=True)
    parts = make_trainer(Teacher(), tmp_path / "parts")
    parts.fit(resume=True)
    for own, others in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(own, others)
    lines = [
        line
        for line in read_metrics(tmp_path / "parts" / "metrics.jsonl")
        if line["kind"] == "step"
    ]
    assert all(line["distillation_loss"] > 0 for line in lines)


def test_taught_student_comes_close_to_its_teacher() -> None:
    """With a weight that leaves the labels no say, outputs become the teacher's up to a shift."""
    data, teacher = make_data(), Student()
    task = make_task("classification", data)
    torch.manual_seed(5)
    nn.init.normal_(teacher.head.weight)
    student = Student()
    Trainer(
        student,
        task,
        data,
        settings=TrainConfig(epochs=600, batch=16),
        optimizer=OptimizerConfig("adam", learning_rate=0.05),
        progress=SilentProgress(),
        distillation=DistillationLoss(teacher, task, 1e4, 1.0),
    ).fit()
    with torch.no_grad():
        own, others = student(data.x).softmax(1), teacher(data.x).softmax(1)
    torch.testing.assert_close(own, others, atol=2e-3, rtol=0)


@pytest.mark.parametrize("temperature", [0.01, 1.0, 1000.0])
def test_term_is_exact_at_every_temperature(temperature: float) -> None:
    draw = torch.Generator().manual_seed(0)
    wanted, found = torch.randn(2, 16, 3, generator=draw)
    task = make_task("classification", make_data())
    term = DistillationLoss(nn.Identity(), task, 1.0, temperature)
    with term.watching(wanted):
        pass
    own = term.estimate(lambda output: output.sum(), found)
    p, q = (softmax(each.double().numpy() / temperature, axis=1) for each in (wanted, found))
    expected = temperature**2 * np.mean(entropy(p, q, axis=1))
    assert float(own) == pytest.approx(expected, rel=1e-8)


def test_step_whose_teacher_has_no_finite_outputs_is_skipped() -> None:
    teacher = Teacher()
    nn.init.constant_(teacher.layers[4].bias, float("nan"))
    trainer = make_trainer(teacher, batch=16, accumulate=2)
    step = compute_step(trainer)
    assert trainer.stepper.verdict(step) is Verdict.SKIP
    assert "outputs of the teacher were not finite" in trainer.stepper.skip_reason
    nn.init.zeros_(trainer.stepper.terms[0].teacher.layers[4].bias)
    assert trainer.stepper.verdict(compute_step(trainer)) is Verdict.APPLY


def test_teacher_and_not_the_backward_solve_is_the_reason_of_a_skipped_step() -> None:
    teacher = Teacher()
    nn.init.constant_(teacher.layers[4].bias, float("nan"))
    model = nn.Sequential(nn.Flatten(), OptEq(48, 3, 6))
    trainer = make_trainer(teacher, model=model, batch=16)
    with trainer.solves.listening(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        step = compute_step(trainer)
    assert trainer.solves.failure  # of the gradient's NaN
    assert trainer.stepper.verdict(step) is Verdict.SKIP
    assert "outputs of the teacher were not finite" in trainer.stepper.skip_reason


def test_teacher_that_writes_to_its_input_leaves_the_samples_of_the_model() -> None:
    teachers = (
        nn.Sequential(nn.ReLU(inplace=writes), nn.Flatten(), nn.Linear(48, 3))
        for writes in (False, True)
    )
    losses = []
    for teacher in teachers:
        with torch.no_grad():
            teacher[2].weight.fill_(0.1)
            teacher[2].bias.zero_()
        step = compute_step(make_trainer(teacher, batch=16))
        losses.append((float(step.loss), float(step.terms["distillation_loss"])))
    assert losses[0] == losses[1]


def test_teacher_in_training_mode_that_two_runs_share_stays_as_it_was() -> None:
    teacher = Teacher().train()
    before = {name: each.clone() for name, each in teacher.state_dict().items()}
    runs = [threading.Thread(target=make_trainer(teacher, epochs=5).fit) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert all(torch.equal(before[name], each) for name, each in teacher.state_dict().items())
    assert all(part.training for part in teacher.modules())


def test_teacher_that_shares_a_layer_with_the_model_is_counted_apart() -> None:
    layer = OptEq(48, 3, 6)
    model, teacher = (nn.Sequential(nn.Flatten(), layer) for _ in range(2))
    trainer = make_trainer(teacher, model=model, batch=16)
    with trainer.solves.listening():
        compute_step(trainer)
    assert trainer.solves.forward.sums[1:].sum() == 16


def test_solves_of_the_teacher_that_miss_their_tolerance_are_told_and_counted(
    tmp_path: Path,
) -> None:
    layer = OptEq(48, 3, 6, max_steps=1, tolerance=1e-7, on_failure="ignore", solver="fixed_point")
    trainer = make_trainer(nn.Sequential(nn.Flatten(), layer), tmp_path / "run")
    with pytest.warns(ConvergenceWarning, match=r"^The teacher's equilibrium: 8 of 8 samples did"):
        compute_step(trainer)
    trainer = make_trainer(nn.Sequential(nn.Flatten(), layer), tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        trainer.fit()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    missed = [line["distillation_loss_missed"] for line in lines if line["kind"] == "step"]
    assert missed == [8] * 6


class DivergingTeacher(nn.Module):
    """Doubles a state of three numbers for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Equilibrium(ScaledCell(), "fixed_point", max_steps=400)

    def forward(self, x: Tensor) -> Tensor:
        features = x.mean((2, 3))
        found: Tensor = self.layer(torch.cat([features, features.new_full((len(x), 1), 2.0)], 1))
        return found


@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
def test_step_whose_teacher_diverges_is_skipped() -> None:
    trainer = make_trainer(DivergingTeacher(), batch=16)
    step = compute_step(trainer)
    assert trainer.stepper.verdict(step) is Verdict.SKIP
    assert trainer.stepper.skip_reason.startswith("the teacher's forward solve: ")


def test_teacher_that_is_no_module_is_refused() -> None:
    task = make_task("classification", make_data())
    with pytest.raises(SettingError, match=r"teacher must be a module"):
        DistillationLoss(lambda x: x, task, 1.0, 1.0)


def test_outputs_of_pixels_are_refused() -> None:
    task = make_task("classification", make_data())
    term = DistillationLoss(nn.Identity(), task, 1.0, 1.0)
    pixels = torch.zeros(2, 3, 4, 4)
    with term.watching(pixels):
        pass
    with pytest.raises(SettingError, match=r"output for each class of a sample; got outputs \(2"):
        term.estimate(lambda output: output.sum(), pixels)


def test_teacher_with_several_outputs_is_refused() -> None:
    with pytest.raises(SettingError, match=r"output of the teacher must be a tensor; got tuple"):
        make_trainer(Pair()).fit()


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_teacher_with_other_outputs_is_refused() -> None:
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
    with pytest.raises(
        SettingError, match=r"outputs of shape \(8, 3\), as the model; got \(8, 4\)"
    ):
        make_trainer(teacher).fit()


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({}, r"task\.teacher\.run must be the folder of a run; got nothing"),
        ({"run": 3}, r"task\.teacher\.run must be the folder of a run"),
        ({"run": "r", "weight": 0}, r"task\.teacher\.weight must be"),
        ({"run": "r", "temperature": -1}, r"task\.teacher\.temperature must be"),
        (
            {"run": "r", "temperature": 1e200},
            r"temperature must be from 0\.01 to 1000; got 1e\+200",
        ),
        ({"run": "r", "temperature": 1e-40}, r"temperature must be from 0\.01 to 1000; got 1e-40"),
        ({"run": "r", "wieght": 1}, r"Did you mean 'weight'"),
    ],
)
def test_odd_settings_get_one_sentence(table: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        Distillation.from_table(table)


def test_task_without_classes_is_refused() -> None:
    y = torch.randn(16, 1)
    data = Dataset("made up", "train", "regression", ("y",), (3,), torch.randn(16, 3), y)
    with pytest.raises(SettingError, match=r"left out for the task 'regression'"):
        DistillationLoss(nn.Linear(3, 1), make_task("regression", data), 1.0, 1.0)
