"""The door is open: a family in a user's own folder does all that a family of the package does.

It has a cell with a certificate, a problem and a projection, a model that takes tables and one that
takes sequences. Nothing is registered, and the package is not touched.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_family

import equipoise
from equipoise.cli import main
from equipoise.engine import TASKS, read_metrics

TABLE = """
[model]
name = "toy_family:table"

[data]
name = "csv"
root = "rings"

[train]
epochs = 12
batch = 50

[optimizer]
name = "adam"
learning_rate = 2e-2
"""

TEXT = """
[model]
name = "toy_family:sequence"

[data]
name = "text"
root = "rhyme"
options = { length = 12 }

[train]
epochs = 12
batch = 8

[optimizer]
name = "adam"
learning_rate = 2e-2
"""

RHYME = "one two buckle my shoe\nthree four knock at the door\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: the family, its data and its configs, and we in it."""
    shutil.copy(toy_family.__file__, tmp_path / "toy_family.py")
    random = torch.Generator().manual_seed(0)
    (tmp_path / "rings").mkdir()
    for split, count in (("train", 300), ("test", 150)):
        label = torch.arange(count) % 3
        angle = 2 * torch.pi * torch.rand(count, generator=random)
        radius = 1 + label + 0.1 * torch.randn(count, generator=random)
        rows = zip(radius * angle.cos(), radius * angle.sin(), label, strict=True)
        text = "".join(f"{x:.4f},{y:.4f},{int(kind)}\n" for x, y, kind in rows)
        (tmp_path / "rings" / f"{split}.csv").write_text(text)
    (tmp_path / "rhyme").mkdir()
    for name, count in (("train", 60), ("valid", 10), ("test", 10)):
        (tmp_path / "rhyme" / f"ptb.{name}.txt").write_text(count * RHYME)
    (tmp_path / "table.toml").write_text(TABLE)
    (tmp_path / "text.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must succeed, and return what it printed."""
    code = main(list(words))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def norms(run: str) -> list[dict[str, float]]:
    lines = read_metrics(Path(run) / "metrics.jsonl")
    return [line["operator_norms"] for line in lines if line["kind"] == "epoch"]


def test_outside_family_of_tables_does_everything_by_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As a user has it: in a process of its own, which finds the module in the current folder though
    # Python itself (-P) would not look there, as it does not for an installed script.
    source = str(Path(equipoise.__file__).parents[1])
    trained = subprocess.run(
        [sys.executable, "-P", "-m", "equipoise", "train", "table.toml", "--output", "run"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert "toy_family:table" in trained.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["test"]["accuracy"] > 0.8  # chance is a third
    assert f"test accuracy {100 * summary['test']['accuracy']:.1f} %" in trained.stdout
    # This process has imported the module from another file, which it has not trained with.
    config = equipoise.runs.load_config(folder / "run", trust=True)
    assert config.model.options == {"input_shape": (2,), "num_classes": 3}

    # The weight, which began with norm 3, was projected after each step.
    assert len(norms("run")) == 12
    assert all(0.5 < epoch["balance.W"] <= toy_family.BOUND for epoch in norms("run"))

    again = ask(capsys, "train", "table.toml", "--output", "run", "--resume", "--quiet")
    assert "finished after 12 epochs" in again

    found = json.loads(ask(capsys, "evaluate", "run", "--json"))
    assert found["accuracy"] == summary["test"]["accuracy"]
    assert found["missed"] == 0

    Path("new.csv").write_text("1,0\n0,2\n-3,0\n")
    rows = list(csv.DictReader(ask(capsys, "predict", "run", "new.csv").splitlines()))
    assert [row["label"] for row in rows] == ["0", "1", "2"]
    assert all(row["converged"] == "true" for row in rows)

    said = ask(capsys, "certify", "run")
    assert said.startswith("balance\n")
    assert "proved: the toy is stable\n    number: 0.89" in said
    assert "by: Toy, Theorem 1" in said
    assert "refuted" not in said
    assert "not proved" not in said

    path = ask(capsys, "report", "run").strip()
    page = Path(path).read_text()
    assert "The toy cell balances a spring against a toy force." in page
    assert "the toy is stable: proved" in page
    assert "toy_family:table" in page


@pytest.mark.usefixtures("folder")
def test_outside_family_that_is_not_projected_is_not_certified(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask(capsys, "train", "table.toml", "model.options.project=false", "train.epochs=1")
    run = next(Path("runs").iterdir())
    assert norms(str(run))[0]["balance.W"] > 2
    assert "refuted: the toy is stable" in ask(capsys, "certify", str(run))
    assert "the toy is stable: refuted" in (run / "report.html").read_text()


def test_outside_family_of_sequences_does_everything_by_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ask(capsys, "train", "text.toml", "--output", "run", "--quiet")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["metric"] == "perplexity"
    assert summary["test"]["perplexity"] < 1.2  # chance is 13 words
    assert "test perplexity 1." in out
    assert set(summary["parameters"]) == {"embedding", "total"}
    assert all(
        0 < bound <= toy_family.BOUND
        for epoch in norms("run")
        for bound in (epoch["first.W"], epoch["second.W"])
    )

    assert "perplexity 1." in ask(capsys, "evaluate", "run")

    Path("begin.txt").write_text("three four")
    rows = list(csv.DictReader(ask(capsys, "predict", "run", "begin.txt").splitlines(True)))
    text = rows[0]["text"]
    assert text.startswith("three four knock at the door\none two buckle my shoe\nthree four")
    assert rows[0]["converged"] == "true"

    said = ask(capsys, "certify", "run")
    heads = [line for line in said.splitlines() if not line.startswith(" ")]
    assert heads == ["first", "second", "network"]
    assert said.count("  proved: the toy is stable") == 2

    page = Path(ask(capsys, "report", "run").strip()).read_text()
    assert "The equilibrium of one sample: first" in page
    assert "The equilibrium of one sample: second" in page
    assert page.count("the toy is stable: proved") == 2


@pytest.mark.usefixtures("folder")
def test_model_without_an_equilibrium_does_everything_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask(capsys, "train", "table.toml", "model.name=toy_family:plain", "--output", "run", "--quiet")
    assert "accuracy" in ask(capsys, "evaluate", "run")
    Path("new.csv").write_text("0,1\n3,0\n")
    rows = list(csv.DictReader(ask(capsys, "predict", "run", "new.csv").splitlines()))
    assert [row["label"] for row in rows] == ["0", "2"]
    assert main(["certify", "run"]) == 2
    assert "must be asked of a model with an equilibrium" in capsys.readouterr().err
    page = Path(ask(capsys, "report", "run").strip()).read_text()
    assert "Accuracy" in page
    assert "The equilibrium of one sample" not in page


@pytest.mark.usefixtures("folder")
def test_outside_family_that_cannot_be_found_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for change, sentence in (
        ("model.name=toy_famly:table", "model.name must name a module that can be imported"),
        ("model.name=toy_family:tabel", "Did you mean 'toy_family:table'?"),
        ("model.options.depth=3", "an option of 'toy_family:table'"),
    ):
        assert main(["train", "table.toml", change, "--output", "run"]) == 2
        printed = capsys.readouterr()
        assert sentence in printed.err
        assert len(printed.err.splitlines()) == 1
    assert not Path("run").exists()


def write_tables(train: str, test: str, classes: int = 3) -> None:
    """Write two tables whose first column is the class, with these names, and then its features."""
    for split, names, count in (("train", train, 3), ("test", test, classes)):
        rows = "".join(f"{k % count},{k % count + 1}.0,0.0\n" for k in range(60))
        Path("rings", f"{split}.csv").write_text(f"{names}\n{rows}")


LABELLED = ("data.options={label='kind'}", "model.name=toy_family:plain", "--quiet")


@pytest.mark.usefixtures("folder")
def test_prediction_leaves_out_the_label_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    write_tables("kind,a,b", "kind,a,b")
    ask(capsys, "train", "table.toml", *LABELLED, "--output", "run")
    Path("bare.csv").write_text("a,b\n1,0\n2,0\n3,0\n")
    Path("labelled.csv").write_text("kind,a,b\n2,1,0\n0,2,0\n1,3,0\n")
    answers = [
        [row["label"], row["probability"]]
        for name in ("bare.csv", "labelled.csv")
        for row in csv.DictReader(ask(capsys, "predict", "run", name).splitlines())
    ]
    assert answers[:3] == answers[3:]
    Path("nameless.csv").write_text("2,1,0\n")
    assert main(["predict", "run", "nameless.csv"]) == 2
    printed = capsys.readouterr()
    assert "it cannot be told which one is the label" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.usefixtures("folder")
def test_columns_are_found_by_name_and_others_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tables("kind,a,b", "kind,a,b")
    ask(capsys, "train", "table.toml", *LABELLED, "train.epochs=1", "--output", "run")
    scores = ask(capsys, "evaluate", "run")
    rows = list(csv.reader(Path("rings/test.csv").read_text().splitlines()))
    Path("rings/test.csv").write_text("".join(f"{b},{kind},{a}\n" for kind, a, b in rows))
    assert ask(capsys, "evaluate", "run") == scores
    write_tables("kind,a,b", "kind,a,c")
    for command in (["evaluate", "run"], ["train", "table.toml", *LABELLED, "--output", "more"]):
        assert main(command) == 2
        assert "has no column 'b'; its columns are kind, a, c" in capsys.readouterr().err
    assert not Path("more").exists()


@pytest.mark.usefixtures("folder")
def test_test_table_may_lack_classes_but_have_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    write_tables("kind,a,b", "kind,a,b", classes=2)
    ask(capsys, "train", "table.toml", *LABELLED, "train.epochs=1", "--output", "run")
    assert "accuracy" in ask(capsys, "evaluate", "run")
    write_tables("kind,a,b", "kind,a,b", classes=4)
    for command in (["evaluate", "run"], ["train", "table.toml", *LABELLED, "--output", "more"]):
        assert main(command) == 2
        sentence = "column 'kind' is '3', a label that the training file does not have"
        assert sentence in capsys.readouterr().err


OWN_TASK = """
from equipoise.engine import TASKS
from equipoise.engine.tasks import BinaryRegression
from toy_family import plain  # the model


@TASKS.register("own-signs")
class OwnSigns(BinaryRegression):
    name = "own-signs"
"""


@pytest.mark.usefixtures("folder")
def test_sweep_imports_the_module_of_the_model_that_registers_the_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own_signs.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    write_tables("kind,a,b", "kind,a,b")
    settings = ("model.name=own_signs:plain", "task.name=own-signs", "data.classes=[0,1]")
    try:
        ask(
            capsys,
            "sweep",
            "table.toml",
            *settings,
            *LABELLED[:1],
            "train.epochs=1",
            "--output",
            "s",
        )
    finally:
        TASKS._entries.pop("own-signs", None)
    rows = list(csv.DictReader(Path("s", "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["finished"], rows
