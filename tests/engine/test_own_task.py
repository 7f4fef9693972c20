"""A task from outside of the package: it trains, predicts and has its page without an edit here."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equipoise.cli import main
from equipoise.data import Dataset
from equipoise.engine import TASKS, Metric, Task, find_metric
from equipoise.engine.tasks import Answer, Mean, RowAnswer, Score
from equipoise.runs.sweep import _sorted


@dataclass(frozen=True)
class Number(RowAnswer):
    """A number."""

    columns = ("number", "rounded")

    value: float

    def cells(self) -> tuple[str, ...]:
        return f"{self.value:.4f}", str(round(self.value))


@dataclass(frozen=True)
class Age(Task):
    """The label as a number, by the square loss; scored by the mean absolute error in years."""

    name = "age"
    metrics = (Metric("error", "Mean absolute error", "a", higher_is_better=False, label="MAE"),)
    answer_type = Number
    shown_samples = 2

    @classmethod
    def for_dataset(cls, dataset: Dataset, label_smoothing: float) -> Self:
        if not dataset.classes or label_smoothing:
            raise ValueError("The data of task 'age' must have labels, which are not smoothed.")
        return cls()

    def outputs(self, dataset: Dataset) -> int | None:
        return 1

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output[:, 0], target.to(output))

    def score(self) -> Score:
        return Mean("error", lambda x, y: (x[:, 0] - y).abs(), lambda mean: mean)

    def check(self, output: Tensor, target: Tensor) -> None:
        if output.shape != (len(target), 1):
            raise self.mismatch("output", "have one number for each sample", tuple(output.shape))

    def answer(self, output: Tensor, classes: Sequence[str]) -> list[Answer]:
        return [Number(float(value)) for value in output[:, 0]]

    def illustrate(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        shade = torch.full((1, 8, 8), float(output[0]) / 10)
        return {"brighter if older": shade, "class": torch.full((8, 8), int(target))}


@pytest.fixture
def age() -> Iterator[None]:
    TASKS.register("age")(Age)
    yield
    del TASKS._entries["age"]


@pytest.mark.usefixtures("age")
def test_own_task_trains_predicts_and_reports_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = [
        "task.name=age",
        "train.epochs=6",
        "data.subset=600",
        "optimizer.learning_rate=0.01",
    ]
    code = main(["train", "digits", *settings, "--output", str(run), "--quiet"])
    out = capsys.readouterr()
    assert code == 0, out.err
    line = next(line for line in out.out.splitlines() if line.startswith("test "))
    assert line.startswith("test MAE ")
    assert line.endswith(" a")
    assert float(line.split()[2]) < 2  # guessing the mean is 2.5 off

    assert main(["evaluate", str(run)]) == 0
    assert line.removeprefix("test ") in capsys.readouterr().out

    table = tmp_path / "new.csv"
    table.write_text(
        ",".join(str(pixel / 63) for pixel in range(64)) + "\n" + ",".join(["0"] * 64) + "\n"
    )
    assert main(["predict", str(run), str(table)]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["file", "number", "rounded", "converged"]
    assert [row[2] for row in rows[1:]] == [str(round(float(row[1]))) for row in rows[1:]]
    assert len(rows) == 3

    page = (run / "report.html").read_text()
    assert "Mean absolute error" in page
    assert page.count("brighter if older") >= 2 * Age.shown_samples  # as caption and as words
    assert main(["report", str(run)]) == 0


@pytest.mark.usefixtures("age")
def test_own_task_says_that_less_is_better() -> None:
    assert find_metric("error").describe(3.14159) == "MAE 3.14 a"
    assert find_metric("error").format_value(math.nan) == "nan"
    rows = [{"run": str(k), "metric": "error", "score": score} for k, score in enumerate((2, 1))]
    assert [row["score"] for row in _sorted(rows)] == [1, 2]


def test_own_task_cannot_give_the_name_of_a_metric_another_meaning() -> None:
    class Reach(Age):
        metrics = (Metric("accuracy", "Distance", "mm", higher_is_better=False),)

    with pytest.raises(ValueError, match="have names that no other metric has; 'accuracy' is"):
        TASKS.register("reach")(Reach)
    assert "reach" not in TASKS
    assert find_metric("accuracy").unit == "%"


def test_unknown_metric_is_shown_by_its_name() -> None:
    assert find_metric("own_score") == Metric("own_score", "Own score")
    assert find_metric("own_score").describe(None) == "own_score nan"
