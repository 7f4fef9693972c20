"""Numbers to predict: losses, scores, and a run on a table from the terminal."""

import csv
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from torch.nn import functional

from equipoise.cli import main
from equipoise.data import Dataset
from equipoise.engine import ScoreWarning, evaluate, make_task
from equipoise.engine.tasks import Regression
from equipoise.runs import load_config, open_run

MODULE = '''
import torch
from torch import nn
from equipoise import Cell, Equilibrium, Model


class TableCell(Cell):
    def __init__(self, inputs, width):
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.randn(width, width) / width**0.5)
        self.input = nn.Linear(inputs, width)

    def inject(self, x):
        return self.input(x)

    def step(self, z, context):
        return torch.tanh(z @ self.W.T + context)


class TableModel(Model):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.equilibrium = Equilibrium(TableCell(inputs, 16))
        self.head = nn.Linear(16, outputs)

    def forward(self, x):
        return self.head(self.equilibrium(x))


def make(*, input_shape: tuple = (2,), num_classes: int = 1):
    """A table of numbers in, numbers out."""
    return TableModel(input_shape[0], num_classes)
'''


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table with two numbers that follow from three, and a model for it."""
    random = np.random.default_rng(0)
    folder = tmp_path / "table"
    folder.mkdir()
    for split, count in (("train", 200), ("test", 50)):
        x = random.uniform(-1, 1, (count, 3))
        y = np.stack([x[:, 0] - 2 * x[:, 1], x[:, 1] * x[:, 2]], 1)
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["a", "b", "c", "sum", "product"])
            writer.writerows(np.concatenate([x, y], 1).tolist())
    (tmp_path / "table_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_regression_losses_are_those_of_torch():
    output, target = torch.randn(7, 2), 3 * torch.randn(7, 2)
    losses = {"square": functional.mse_loss, "absolute": functional.l1_loss}
    for kind, loss in losses.items():
        assert Regression(2, kind=kind).loss(output, target) == loss(output, target)
    huber = Regression(2, kind="huber", delta=0.5).loss(output, target)
    assert huber == functional.huber_loss(output, target, delta=0.5)
    one = Regression().loss(output[:, 0], target[:, :1])  # one number may lack its dimension
    assert one == functional.mse_loss(output[:, 0], target[:, 0])


@pytest.mark.parametrize("numbers", [1, 3])
def test_regression_scores_are_those_of_scikit_learn(numbers):
    random = np.random.default_rng(numbers)
    y = 1e3 + random.normal(size=(40, numbers))
    output = y + 0.3 * random.normal(size=y.shape)
    score = Regression(numbers).score()
    for rows in (slice(0, 25), slice(25, None)):
        score.update(torch.from_numpy(output[rows]), torch.from_numpy(y[rows]))
    found = score.compute()
    assert found["r2"] == pytest.approx(r2_score(y, output), abs=1e-6)
    assert found["mae"] == pytest.approx(mean_absolute_error(y, output))
    assert found["rmse"] == pytest.approx(math.sqrt(mean_squared_error(y, output)))
    score = Regression().score()
    score.update(torch.zeros(3, 1), torch.full((3, 1), 0.1))
    assert math.isnan(score.compute()["r2"])


def test_regression_refuses_what_does_not_fit():
    numbers = Dataset(
        "t", "train", "regression", ("y",), (2,), torch.zeros(3, 2), torch.zeros(3, 1)
    )
    labels = Dataset(
        "t", "train", "arrays", ("a", "b"), (2,), torch.zeros(3, 2), torch.zeros(3).long()
    )
    assert make_task("auto", numbers, loss="huber", delta=2.0) == Regression(
        kind="huber", delta=2.0
    )
    for name, data, options, reason in (
        ("regression", labels, {}, "must have numbers as targets"),
        ("classification", numbers, {}, "must have one label for each sample"),
        ("auto", labels, {"loss": "huber"}, "loss must be 'auto' for task 'classification'"),
        ("auto", numbers, {"loss": "hubert"}, "Did you mean 'huber'"),
        ("auto", numbers, {"delta": 0.0}, "delta must be"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_task(name, data, **options)
    with pytest.raises(
        ValueError, match=r"must have 1 numbers for each sample; got shape \(3, 2\)"
    ):
        Regression().check(torch.zeros(3, 2), torch.zeros(3, 1))


def test_regression_is_trained_scored_and_predicted_from_the_terminal(table, tmp_path, capsys):
    words = [
        "data.name=csv",
        'data.options.targets=["sum", "product"]',
        "model.name=table_model:make",
        "model.options={}",
        "task.loss=huber",
        "train.epochs=8",
        "train.batch=20",
        "optimizer.learning_rate=0.02",
    ]
    run = str(tmp_path / "run")
    assert (
        main(["train", "digits", *words, "--data-root", str(table), "--output", run, "--quiet"])
        == 0
    )
    assert "test R2 0." in capsys.readouterr().out
    config = load_config(run)
    assert (config.task.name, config.task.loss) == ("regression", "huber")
    assert open_run(tmp_path / "run").task == Regression(2, kind="huber")
    assert main(["evaluate", run]) == 0
    scores = capsys.readouterr().out
    assert "R2 0." in scores
    assert "MAE 0." in scores
    assert main(["predict", run, str(table / "test.csv")]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    truth = list(csv.DictReader((table / "test.csv").read_text().splitlines()))
    assert list(rows[0]) == ["file", "sum", "product", "converged"]
    errors = [float(row["sum"]) - float(true["sum"]) for row, true in zip(rows, truth, strict=True)]
    assert np.mean(np.square(errors)) < 0.3
    assert "Coefficient of determination" in (tmp_path / "run" / "report.html").read_text()


def test_bundled_model_on_a_table_says_what_would_take_it(table, tmp_path, capsys):
    words = ["data.name=csv", 'data.options.targets=["sum"]', "--data-root", str(table)]
    assert main(["train", "digits", *words, "--output", str(tmp_path / "run")]) == 2
    line = capsys.readouterr().err
    assert "model.name must take samples of shape (4,) from 'csv'; got 'opteq-digits'." in line
    assert "model.name = 'package.module:function'" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "targets", "reason"),
    [
        ("regression", [[2.0]], "there is only one sample to score"),
        ("regression", [[2.0], [2.0]], "those are equal in all 2 samples"),
        (
            "regression",
            [[2.0, 1.0], [2.0, 3.0]],
            "those of number 1 to predict are equal in all 2 samples",
        ),
        ("classification", [1, 1, 1], "AUC is not known, since .* all 3 to score are of one"),
    ],
)
def test_score_that_is_not_known_is_told_with_its_reason(kind, targets, reason):
    y = torch.tensor(targets)
    x, outputs = torch.randn(len(y), 3), 2 if kind == "classification" else y.shape[1]
    task = "arrays" if kind == "classification" else kind
    names = tuple("ab"[:outputs])
    dataset = Dataset("table", "test", task, names, (3,), x, y)
    with pytest.warns(ScoreWarning, match=f"^table test: .*{reason}"):
        found = evaluate(torch.nn.Linear(3, outputs), make_task("auto", dataset), dataset)
    assert math.isnan(found.metrics["auc" if kind == "classification" else "r2"])
