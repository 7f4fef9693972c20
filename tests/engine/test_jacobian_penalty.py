"""The norm of the Jacobians in the training loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise import Equilibrium
from equipoise.core import SettingError
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task, read_metrics
from equipoise.engine.jacobian_penalty import JacobianPenalty
from equipoise.engine.progress import SilentProgress
from equipoise.families.relu_implicit import ReluImplicitCell

LAYER = {"tolerance": 1e-6, "solver": "fixed_point"}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Equilibrium(ReluImplicitCell(4, 12, 0.4), **LAYER), nn.Linear(12, 2))


def make_data() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=draw), torch.arange(16) % 2
    return Dataset("made up", "train", "arrays", ("a", "b"), (4,), x, y)


def make_trainer(weight: float, folder: Path | None = None, **settings: object) -> Trainer:
    data = make_data()
    return Trainer(
        make_model(),
        make_task("classification", data),
        data,
        settings=TrainConfig(**{"epochs": 3, "batch": 16, "log_every": 1, **settings}),  # type: ignore[arg-type]
        optimizer=OptimizerConfig("sgd", learning_rate=0.5, momentum=0.0),
        folder=folder,
        progress=SilentProgress(),
        jacobian_penalty=weight,
    )


def test_penalty_averages_to_the_norm_of_the_exact_jacobian() -> None:
    model, x = make_model(), make_data().x
    assert x is not None
    penalty = JacobianPenalty(model, 0.1)
    with penalty.watching(x):
        model(x)
    layer = model[0]
    z = layer(x).detach()
    exact = torch.stack(
        [
            torch.autograd.functional.jacobian(layer.map(x[i : i + 1]), z[i : i + 1]).square().sum()
            for i in range(len(x))
        ]
    ).mean()
    found = []
    for _ in range(400):
        with penalty.watching(x):
            model(x)
        found.append(penalty.estimate(torch.sum, x).detach())
    assert float(torch.stack(found).mean()) == pytest.approx(float(exact) / 12, rel=0.05)


def test_gradient_of_a_step_has_that_of_the_penalty_by_hand() -> None:
    data = make_data()
    grads = []
    for weight in (0.0, 2.0):
        trainer = make_trainer(weight, accumulate=1)
        torch.manual_seed(3)
        x, y = data.gather(range(16))
        trainer.stepper.compute(x, y, 0.1)
        grads.append(trainer.model[0].cell.A.grad.clone())  # type: ignore[union-attr,index]
    cell = make_model()[0].cell
    A = cell.A.detach().requires_grad_()
    z = make_model()[0](x).detach()
    active = (z > 0).float()
    torch.manual_seed(3)
    v = torch.randn(16, 12)
    # J = (gamma/sqrt(m)) D A at the equilibrium, so that J^T v = (gamma/sqrt(m)) A^T D v.
    penalty = ((active * v) @ A * cell.scale).square().sum(1).mean() / 12
    (expected,) = torch.autograd.grad(penalty, A)
    torch.testing.assert_close(grads[1] - grads[0], 2 * expected, rtol=1e-3, atol=1e-6)


def test_penalty_is_logged_beside_the_loss(tmp_path: Path) -> None:
    for weight in (0.0, 0.1):
        make_trainer(weight, tmp_path / str(weight)).fit()
    free, held = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("0.0", "0.1"))
    steps = [line for line in held if line["kind"] == "step"]
    assert all(line["jacobian_penalty"] > 0 for line in steps)
    assert "jacobian_penalty" not in free[0]
    # The loss in the log is that of the task alone.
    assert held[0]["loss"] == pytest.approx(free[0]["loss"], rel=1e-6)


def test_penalty_of_a_model_without_equilibria_is_refused() -> None:
    with pytest.raises(SettingError, match=r"task.jacobian_penalty must be 0 for a model without"):
        JacobianPenalty(nn.Linear(2, 2), 0.1)
