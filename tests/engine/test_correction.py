"""The loss of the task at iterates of a solve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pixel_run import StopAt
from torch import Tensor, nn
from torch.nn import functional

from equipoise import Equilibrium
from equipoise.core import Interrupted, SettingError
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task, read_metrics
from equipoise.engine.correction import Correction, CorrectionLoss
from equipoise.engine.progress import SilentProgress
from equipoise.families.relu_implicit import ReluImplicitCell
from equipoise.runs.sections import TaskConfig

CORRECTION = Correction((1, 3), weight=0.5, decay=0.8)


class Network(nn.Module):
    """An equilibrium between parts that have buffers, beside a shortcut from the input."""

    def __init__(self, *, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        cell = ReluImplicitCell(4, 12, 0.4)
        self.layer = Equilibrium(cell, "fixed_point", tolerance=1e-6)
        self.after = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 2))
        self.shortcut = nn.Linear(4, 2)
        self.calls, self.seen = calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        h = self.before(x)
        for _ in range(self.calls):
            z = self.layer(h)
        return self.after(z) + self.shortcut(h)


def make_data() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=draw), torch.arange(16) % 2
    return Dataset("made up", "train", "arrays", ("a", "b"), (4,), x, y)


def make_trainer(
    correction: Correction | None,
    folder: Path | None = None,
    progress: SilentProgress | None = None,
    **settings: object,
) -> Trainer:
    data = make_data()
    chosen = {"epochs": 3, "batch": 8, "log_every": 1, **settings}
    return Trainer(
        Network(),
        make_task("classification", data),
        data,
        settings=TrainConfig(**chosen),  # type: ignore[arg-type]
        optimizer=OptimizerConfig("sgd", learning_rate=0.1, momentum=0.0),
        folder=folder,
        progress=progress or SilentProgress(),
        correction=correction,
    )


def test_gradient_of_a_step_has_that_of_the_losses_by_hand() -> None:
    x, y = make_data().gather(range(16))
    trainer = make_trainer(CORRECTION, batch=16)
    step = trainer.stepper.compute(x, y, 0.1)
    found = [each.grad for each in trainer.model.parameters()]

    net = Network()
    h = net.before(x)
    layer, after, shortcut = net.layer, net.after, net.shortcut
    with torch.no_grad():
        z, kept = torch.zeros(16, 12), []
        for _ in range(3):  # plain iteration
            z = layer.map(h)(z)
            kept.append(z)
    losses = [
        functional.cross_entropy(after(state) + shortcut(h), y)
        for state in (layer(h), layer.map(h)(kept[0]), layer.map(h)(kept[2]))
    ]
    total = losses[0] + 0.5 * (0.8 * losses[1] + losses[2])
    expected = torch.autograd.grad(total, [*net.parameters()])
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)
    assert float(step.loss) == pytest.approx(float(losses[0].detach()), rel=1e-5)
    by_hand = float((0.8 * losses[1] + losses[2]).detach())
    assert float(step.terms["correction_loss"]) == pytest.approx(by_hand, rel=1e-5)


def test_averages_of_batch_normalisation_see_the_equilibrium_alone() -> None:
    x, y = make_data().gather(range(16))
    buffers = []
    for correction in (None, CORRECTION):
        trainer = make_trainer(correction, batch=16)
        held = [*trainer.model.buffers()]
        trainer.stepper.compute(x, y, 0.1)
        assert all(a is b for a, b in zip(held, trainer.model.buffers(), strict=True))
        buffers.append([each.clone() for each in held])
    for plain, corrected in zip(*buffers, strict=True):
        assert torch.equal(plain, corrected)
    assert "forward" not in vars(trainer.model.layer)


def test_run_with_correction_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = make_trainer(CORRECTION, tmp_path / "whole")
    whole.fit()
    with pytest.raises(Interrupted):
        make_trainer(CORRECTION, tmp_path / "parts", StopAt(3)).fit()
    parts = make_trainer(CORRECTION, tmp_path / "parts")
    parts.fit(resume=True)
    for own, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(own, other)
    lines = list(read_metrics(tmp_path / "whole" / "metrics.jsonl"))
    assert all(line["correction_loss"] > 0 for line in lines if line["kind"] == "step")


def test_correction_is_refused_where_it_does_not_apply() -> None:
    with pytest.raises(SettingError, match=r"task.correction must .* without equilibrium layers"):
        CorrectionLoss(nn.Linear(2, 2), CORRECTION)
    with pytest.raises(SettingError, match=r"task.correction must .* with 2 equilibrium layers"):
        CorrectionLoss(nn.Sequential(Network(), Network()), CORRECTION)
    with pytest.raises(SettingError, match=r"task.correction.steps must be at most 100"):
        CorrectionLoss(Network(), Correction((1, 101)))
    twice = Network(calls=2)
    term = CorrectionLoss(twice, CORRECTION)
    x, _ = make_data().gather(range(4))
    with pytest.raises(SettingError, match=r"more than once in a pass"), term.watching(x):
        twice(x)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"weight": 1.0}, r"task.correction.steps must name steps of the solver, rising; got \[\]"),
        ({"steps": [4, 2]}, r"task.correction.steps must name steps of the solver, rising"),
        ({"steps": 3}, r"task.correction.steps must be a list of steps"),
        ({"steps": [2], "weight": 0}, r"task.correction.weight must be"),
        ({"steps": [2], "decay": 2.0}, r"task.correction.decay must be"),
        ({"step": [2]}, r"task.correction must have only the settings .* mean 'steps'"),
    ],
)
def test_config_refuses_a_correction_that_makes_no_sense(
    table: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        TaskConfig(correction=table)
