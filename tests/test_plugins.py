"""Models, readers and tasks that installed packages add by entry points."""

import subprocess
import sys
from pathlib import Path

import pytest

from equipoise import create_model, list_models
from equipoise.cli import main
from equipoise.data import load_data
from equipoise.engine import TASKS
from equipoise.runs import load_config
from equipoise.runs.own_code import find_changed_code, keep_sources

CODE = """
import torch
from torch import nn
from equipoise import Model
from equipoise.data import Dataset, Reader
from equipoise.engine.tasks import Classification


class Network(Model):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(2, width)

    def forward(self, x):
        return self.head(x)


def make(*, width: int = 3):
    \"\"\"A plugged network.\"\"\"
    return Network(width)


class Points(Reader):
    name = "points"
    summary = "Points, plugged."

    def read(self, folder, split):
        y = torch.arange(4) % 2
        return Dataset("points", split, "arrays", ("a", "b"), (2,), torch.zeros(4, 2), y)


class Plugged(Classification):
    \"\"\"A plugged task.\"\"\"

    name = "plugged-task"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with installed packages, on Python's path."""
    (tmp_path / "plugged_code.py").write_text(CODE)
    install(
        tmp_path,
        "plugged",
        models={"plugged-net": "plugged_code:make", "opteq-digits": "plugged_code:make"},
        data={"points": "plugged_code:Points"},
        tasks={"plugged-task": "plugged_code:Plugged"},
    )
    install(
        tmp_path,
        "broken",
        models={"broken-net": "not_there:make"},
        data={"broken-data": "plugged_code:make"},
    )
    install(tmp_path, "one", models={"twice": "plugged_code:make"})
    install(tmp_path, "two", models={"twice": "plugged_code:make"})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(TASKS, "_outside", {})
    yield tmp_path
    sys.modules.pop("plugged_code", None)


def install(site: Path, name: str, **groups: dict[str, str]) -> None:
    folder = site / f"{name}-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text(
        "".join(
            f"[equipoise.{group}]\n" + "".join(f"{key} = {code}\n" for key, code in entries.items())
            for group, entries in groups.items()
        )
    )


@pytest.mark.usefixtures("site")
def test_plugins_are_loaded_by_name_when_they_are_asked_for() -> None:
    assert "plugged-net" in list_models()
    assert "plugged_code" not in sys.modules
    assert create_model("plugged-net", width=5).name == "plugged-net"
    assert type(create_model("opteq-digits")).__module__.startswith("equipoise.")
    assert len(load_data("points", "train")) == 4
    config = load_config(
        "digits", ["model={name='plugged-net'}", "data.name=points", "task.name=plugged-task"]
    )
    assert config.task.make(load_data("points")).name == "plugged-task"


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            "model.name=broken-net",
            "name a plug-in that can be loaded; got 'broken-net' of broken 1",
        ),
        ("model.name=twice", "'twice', which is in one 1.5 and two 1.5. Name the code itself"),
        ("data.name=broken-data", "name a class that derives from Reader"),
        ("model.name=pluged-net", "Did you mean 'plugged-net'?"),
    ],
)
def test_plugin_that_is_broken_or_there_twice_is_told_in_one_sentence(
    setting: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        load_config("digits", [setting, "model.options={}"])
    assert sentence in str(caught.value)


@pytest.mark.usefixtures("site")
def test_list_names_plugins_with_their_packages_and_survives_broken_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["list", "models"]) == 0
    printed = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert rows["plugged-net"] == "A plugged network. (plugged 1.5)"
    assert rows["broken-net"].startswith("cannot be used: model must name a plug-in that can be")
    assert "one 1.5 and two 1.5" in rows["twice"]
    assert "plugged" not in rows["opteq-digits"]
    assert "'opteq-digits' of plugged 1.5 is hidden" in printed.err
    assert main(["list", "data"]) == 0
    assert "Points, plugged. (plugged 1.5)" in capsys.readouterr().out
    assert main(["list", "tasks"]) == 0
    assert "A plugged task. (plugged 1.5)" in capsys.readouterr().out


def test_run_knows_a_plugin_by_its_source(site: Path, tmp_path: Path) -> None:
    config = load_config("digits", ["model={name='plugged-net'}"])
    run = tmp_path / "run"
    run.mkdir()
    keep_sources(run, config)
    assert find_changed_code(run, config) == []
    (site / "plugged_code.py").write_text(CODE + "\n")
    assert find_changed_code(run, config) == ["plugged_code.py"]


def test_help_and_list_of_presets_do_not_import_torch() -> None:
    code = """
import sys
from equipoise.cli import main
for words in (["--help"], ["list"], ["list", "presets"], ["list", "presets", "--json"]):
    assert main(words) == 0, words
    assert not {"torch", "numpy"} & set(sys.modules), words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
