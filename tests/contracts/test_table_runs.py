"""Families with a prescribed bound train tables from the terminal, and keep it."""

import csv

import pytest
import torch

from equipoise.cli import main


@pytest.fixture
def table(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    path = tmp_path / "points.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "d", "side"])
        writer.writerows([*row, int(row[0] > row[1])] for row in x.tolist())
    return path


CASES = {
    "lipschitz-table": (["model.options.gamma=0.7"], "with the constant gamma number: 0.7"),
    "well-posed-table": (
        ["model.options.norm=project", "model.options.condition=perron-frobenius"],
        "proved: the Perron-Frobenius eigenvalue of |A| is below 1",
    ),
}


def train(name, table, *words):
    command = ["train", "digits", f"model.name={name}", "data.name=csv", "data.holdout=0.2"]
    where = ["--data-root", str(table), "--output", str(table.parent / "run"), "--quiet"]
    return main([*command, "train.epochs=2", "optimizer.learning_rate=0.1", *words, *where])


@pytest.mark.parametrize("name", CASES)
def test_run_on_a_table_is_certified_after_training(name, table, capsys):
    options, sentence = CASES[name]
    assert train(name, table, *options) == 0
    assert main(["certify", str(table.parent / "run")]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("lipschitz-table", "model.options.gamma=0", "gamma must be a positive number; got 0."),
        ("well-posed-table", "model.options.kappa=1", "kappa must be in (0, 1); got 1."),
    ],
)
def test_bound_that_is_none_is_refused_and_nothing_is_written(name, word, sentence, table, capsys):
    assert train(name, table, word) != 0
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (table.parent / "run").exists()
