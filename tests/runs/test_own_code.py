"""Code of the user's own, named by a config: files, tasks, readers, changes and trust."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

import equipoise
from equipoise.cli import main
from equipoise.core import SourceError, code_trust, named_code
from equipoise.core.named_code import to_absolute_name
from equipoise.runs import Config, load_config, open_run, train_run
from equipoise.runs.own_code import CodeWarning
from equipoise.runs.sweep import sweep

MINE = """
from dataclasses import dataclass

import torch
from torch import nn
from equipoise import Cell, Equilibrium, Model
from equipoise.data import Dataset, Reader
from equipoise.engine import Metric
from equipoise.engine.tasks import BinaryRegression, Classification
from beside import SCALE

print("my code runs")


class Contraction(Cell):
    def __init__(self, width):
        super().__init__()
        self.W = nn.Parameter(SCALE * torch.eye(width))
        self.input = nn.Linear(2, width)

    def inject(self, x):
        return self.input(x)

    def step(self, z, context):
        return torch.tanh(z @ self.W.T + context)


class Network(Model):
    def __init__(self, width, num_classes):
        super().__init__()
        self.equilibrium = Equilibrium(Contraction(width))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.equilibrium(x))


def make(*, width: int = 4, num_classes: int = 2):
    \"\"\"A small network.\"\"\"
    return Network(width, num_classes)


@dataclass(frozen=True)
class Halves(Reader):
    \"\"\"Points left and right.\"\"\"

    distance: float = 1.0

    def read(self, folder, split):
        random = torch.Generator().manual_seed(len(split))
        y = torch.arange(40) % 2
        x = torch.randn(40, 2, generator=random)
        x[:, 0] += self.distance * (2 * y - 1)
        return Dataset("halves", split, "arrays", ("left", "right"), (2,), x, y)


class Careful(Classification):
    pass
"""

CONFIG = """
[model]
name = "mine.py:make"
[data]
name = "mine.py:Halves"
options = { distance = 2.0 }
[task]
name = "mine.py:Careful"
[train]
epochs = 2
batch = 20
[optimizer]
name = "adam"
learning_rate = 0.05
[schedule]
name = "constant"
"""


class Result(NamedTuple):
    stdout: str
    stderr: str


class User:
    """Runs commands as processes of their own would: each has run no code yet."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.patch, self.capsys = folder, patch, capsys

    def __call__(self, place: Path, *words: str, user: str = "me", code: int = 0) -> Result:
        """Run a command in a folder, and return what it printed."""
        with self.patch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("default", CodeWarning)
            patch.chdir(place)
            patch.setenv("XDG_STATE_HOME", str(self.folder / f"state of {user}"))
            patch.setattr(code_trust, "_TRUSTED", set())
            patch.setattr(named_code, "_FILES", {})
            patch.setattr(sys, "path", [*sys.path])
            for name in ("beside", "mine"):
                patch.delitem(sys.modules, name, raising=False)
            got = main([*words])
        printed = self.capsys.readouterr()
        assert got == code, printed.err
        return Result(printed.out, printed.err)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with code and a config, of a user who has trained nothing yet."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "beside.py").write_text("SCALE = 0.3\n")
    (folder / "own.toml").write_text(CONFIG)
    return folder


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> User:
    return User(tmp_path, monkeypatch, capsys)


def test_file_is_trained_resumed_evaluated_predicted_certified_reported_and_swept(
    run: User, home: Path, tmp_path: Path
) -> None:
    first = run(home, "train", "own.toml", "--output", "../run")
    assert "mine.py:make with" in first.stderr
    config = (tmp_path / "run" / "config.toml").read_text()
    for name in ("make", "Halves", "Careful"):
        assert f'name = "{home / "mine.py"}:{name}"' in config
    files = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert {section: list(hashes) for section, hashes in files.items()} == {
        section: ["beside.py", "mine.py"] for section in ("model", "data", "task")
    }
    # From another folder, without being asked, since this user has trained with the code.
    assert "after 3 epochs" in run(tmp_path, "resume", "run", "train.epochs=3", "--quiet").stdout
    assert "accuracy" in run(tmp_path, "evaluate", "run").stdout
    (tmp_path / "new.csv").write_text("-4,0\n4,0\n")
    assert "left" in run(tmp_path, "predict", "run", "new.csv").stdout
    assert "equilibrium" in run(tmp_path, "certify", "run").stdout
    run(tmp_path, "report", "run")
    assert "mine.py:make on mine.py:Halves" in (tmp_path / "run" / "report.html").read_text()
    swept = run(home, "sweep", "own.toml", "--output", "../sweep")
    assert "failed" not in swept.stdout
    assert "1/1" in swept.stdout


def test_change_of_code_stops_a_resumption_and_is_told_by_an_evaluation(
    run: User, home: Path, tmp_path: Path
) -> None:
    run(home, "train", "own.toml", "--output", "../run", "--quiet")
    (home / "beside.py").write_text("SCALE = 0.4\n")
    told = run(tmp_path, "evaluate", "run")
    assert "accuracy" in told.stdout
    sentence = "beside.py has changed since run was trained, so that what it computes may differ"
    assert told.stderr.splitlines() == [f"equipoise: warning: {sentence}"]
    more = ("resume", "run", "train.epochs=3", "--quiet")
    refused = run(tmp_path, *more, code=2)
    assert "beside.py has changed since this run began" in refused.stderr
    assert "--trust" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "after 3 epochs" in run(tmp_path, *more, "--trust").stdout
    assert not run(tmp_path, "evaluate", "run").stderr  # the weights are those of the new code
    (home / "mine.py").unlink()
    gone = run(tmp_path, "evaluate", "run", code=2)
    assert "must name a file that can be read" in gone.stderr
    assert len(gone.stderr.splitlines()) == 1


COMMANDS = [
    ("resume", "run"),
    ("evaluate", "run"),
    ("predict", "run", "new.csv"),
    ("certify", "run"),
    ("report", "run"),
    ("config", "run"),
    ("train", "run", "--output", "again"),
    ("sweep", "run", "train.seed=0,1", "--output", "again"),
]


def test_code_that_only_a_run_names_is_not_run_without_trust(
    run: User, home: Path, tmp_path: Path
) -> None:
    run(home, "train", "own.toml", "--output", "../run", "--quiet", user="author")
    (tmp_path / "new.csv").write_text("-4,0\n")
    for words in COMMANDS:
        refused = run(tmp_path, *words, code=2)
        assert "my code runs" not in refused.stdout
        assert f"'{home / 'mine.py'}:make'" in refused.stderr
        assert "--trust" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "again").exists()
    with pytest.raises(SourceError, match="trust=True"):
        open_run(tmp_path / "run")
    assert "accuracy" in run(tmp_path, "evaluate", "run", "--trust").stdout
    run(tmp_path, "evaluate", "run", code=2)  # it was trusted once, and not for good


def test_code_in_the_current_folder_is_not_the_code_that_was_trained_with(
    run: User, home: Path, tmp_path: Path
) -> None:
    names = (("model", "make"), ("data", "Halves"), ("task", "Careful"))
    settings = [f"{section}.name=mine:{name}" for section, name in names]
    run(home, "train", "own.toml", *settings, "--output", "../run", "--quiet")
    assert "accuracy" in run(home, "evaluate", "../run").stdout
    # Somebody's run with the module in it, and one that is called like an optional package.
    for name in ("mine.py", "beside.py"):
        shutil.copy(home / name, tmp_path / "run")
    (tmp_path / "run" / "rich.py").write_text("print('my code runs')\n")
    (tmp_path / "run" / "safetensors.py").write_text("print('my code runs')\n")
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "evaluate", "."],
        cwd=tmp_path / "run",
        env={
            **os.environ,
            "PYTHONPATH": str(Path(equipoise.__file__).parents[1]),
            "XDG_STATE_HOME": str(tmp_path / "state of me"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert not done.stdout
    assert f"'mine:make' in {tmp_path / 'run' / 'mine.py'}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_config_names_other_code_on_the_command_line(run: User, home: Path, tmp_path: Path) -> None:
    run(home, "train", "own.toml", "--output", "../run", "--quiet", user="author")
    shutil.copy(home / "mine.py", tmp_path / "read.py")
    code = {"model": "make", "data": "Halves", "task": "Careful"}
    names = [f"{section}.name=read.py:{name}" for section, name in code.items()]
    shutil.copy(home / "beside.py", tmp_path / "beside.py")
    assert 'name = "read.py:make"' in run(tmp_path, "config", "run", *names).stdout
    refused = run(tmp_path, "config", "run", *names[:2], code=2)
    assert "my code runs" not in refused.stdout
    assert "task.name" in refused.stderr


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model.name=mine.py:mak", "Did you mean 'mine.py:make'?"),
        ("model.name=mine.py:", "be written as package.module:name or file.py:name"),
        ("model.name=yours.py:make", "name a file that can be read; got 'yours.py:make' (No such"),
        ("model.name=broken.py:make", "be run; got 'broken.py:make' (NameError: name 'nothing' is"),
        ("model.name=leaves.py:make", "can be run; got 'leaves.py:make' (SystemExit: 0, line 1)"),
        ("data.name=mine.py:make", "name a class that derives from Reader"),
        ("data.name=mine.py:Reader", "name a class that defines read; got"),
        ("task.name=mine.py:Halves", "name a class that derives from Task"),
        ("data.options.noise=1", "mine.py:Halves', one of distance"),
    ],
)
def test_file_that_does_not_hold_what_is_named_is_told_in_one_sentence(
    home: Path, monkeypatch: pytest.MonkeyPatch, setting: str, sentence: str
) -> None:
    (home / "broken.py").write_text("x = 1\nnothing\n")
    (home / "leaves.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match="must") as caught:
        load_config("own.toml", [setting])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_relative_data_folder_is_made_absolute_for_sweeps_and_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Config] = []

    def stop(config: Config, *_: object, **__: object) -> None:
        asked.append(config)
        raise SourceError(tmp_path, "far enough")

    monkeypatch.setattr("equipoise.runs.run.prepare", stop)
    with pytest.raises(SourceError, match="far enough"):
        train_run(load_config("digits", ["data.root=mine"]), Path("run"))
    assert asked[0].data.root == str(tmp_path / "mine")
    monkeypatch.setattr(
        "equipoise.runs.sweep._run_local",
        lambda calls, _: asked.extend(call[0] for call in calls) or iter(()),
    )
    monkeypatch.setattr("equipoise.runs.sweep.report_sweep", lambda _: None)
    sweep("digits", [], {"train.seed": ["0"]}, Path("s"), root="yours")
    assert asked[1].data.root == str(tmp_path / "yours")


def test_folder_that_holds_a_run_is_refused_before_data_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(SourceError, match="already holds a run"):
        train_run(load_config("mnist", ["data.root=/nowhere"]), tmp_path, quiet=True)


def test_code_in_a_config_file_is_beside_it_and_in_a_setting_in_the_current_folder(
    tmp_path, monkeypatch
):
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "net.py").write_text("def make(): ...\n")
    (beside / "c.toml").write_text('[model]\nname = "net.py:make"\n[data]\nname = "digits"\n')
    monkeypatch.chdir(here)
    assert load_config("../beside/c.toml").model.name == f"{beside}/net.py:make"
    again = load_config("../beside/c.toml", ["model.name=net.py:make"])
    assert to_absolute_name(again.model.name) == f"{here}/net.py:make"
    (beside / "net.py").unlink()
    with pytest.raises(ValueError, match=f"{beside}/net.py:make.* .No such file"):
        load_config("../beside/c.toml")
