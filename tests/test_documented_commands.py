"""Every command line that a page shows in a `bash` block is run, in a folder with small data.

`console` blocks are run by `test_documentation.py`, as they stand. What stands here in bash is what
a reader would run on data of their own: the test has little of it, and trains for an epoch.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from published import write_cifar
from test_documentation import PAGES, blocks_of, name_of

from equipoise.cli import main

# Begins of commands that are not run here, and why.
ELSEWHERE = {
    "equipoise demo": "docs/learn/mnist_terminal.md runs it in a console block",
    "torchrun": "tests/engine/test_torchrun.py starts groups of processes",
    "equipoise sweep digits optimizer.learning_rate=1e-3,1e-2 --output sweeps/rate --ray": (
        "needs Ray, which is not installed for tests"
    ),
    "pip install": "needs a network",
    "equipoise evaluate runs/from-a-friend": "tests/runs/test_own_code.py trusts a copied run",
}


def commands_of(page: Path) -> list[str]:
    """The command lines of a page, without comments, in one line each."""
    text = "\n".join(block.text for block in blocks_of(page) if block.kind == "bash")
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [command for line in lines if (command := re.sub(r"\s+#.*|^#.*", "", line).strip())]


def is_elsewhere(command: str) -> bool:
    return any(command == begin or command.startswith(f"{begin} ") for begin in ELSEWHERE)


def made_small(words: list[str]) -> list[str]:
    """A command that trains or looks, on few samples and for an epoch; of a grid, its first run."""
    if words[0] == "look":
        few = ["--points", "3", "--processes", "1"] if words[1] == "landscape" else []
        return [*words, "--samples", "3", *few]
    if words[0] not in ("train", "sweep"):
        return words
    if words[0] == "sweep":
        words = [re.sub(r"(=[^,]*),.*", r"\1", word) for word in words]
    given = {word.partition("=")[0] for word in words}
    small = ["data.samples_per_class=0", "data.subset=20", "train.epochs=1"]
    if not any(word.startswith("model.name=resnet") for word in words):
        small += ["model.options.tolerance=0.1"]
    return words + [setting for setting in small if setting.partition("=")[0] not in given]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the commands name: MNIST in DIR and where it is looked for, CIFAR-10, and pictures."""
    random = np.random.default_rng(0)
    for root in (tmp_path / "DIR", tmp_path / "data" / "mnist"):
        root.mkdir(parents=True)
        for split in ("train", "t10k"):
            images = random.integers(0, 256, (20, 28, 28), dtype=np.uint8)
            for kind, array in (("images-idx3", images), ("labels-idx1", np.arange(20) % 10)):
                header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
                content = header + array.astype(np.uint8).tobytes()
                (root / f"{split}-{kind}-ubyte").write_bytes(content)
    (tmp_path / "data" / "cifar10").mkdir()
    for split, rows in (("train", 4), ("test", 20)):
        write_cifar(tmp_path / "data" / "cifar10", split, rows)
    (tmp_path / "folder-of-images").mkdir()
    for name in ("digit.png", "folder-of-images/a.png"):
        Image.fromarray(random.integers(0, 256, (28, 28), dtype=np.uint8)).save(tmp_path / name)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHOWN = [page for page in PAGES if any(not is_elsewhere(each) for each in commands_of(page))]
# A page may show a command of another one again.
FIRST = {command: page for page in reversed(SHOWN) for command in commands_of(page)}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", sorted({*FIRST.values()}), ids=name_of)
def test_documented_commands_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(page):
        if is_elsewhere(command) or FIRST[command] != page:
            continue
        words, _, target = command.partition(" > ")
        name, *rest = shlex.split(words)
        assert name == "equipoise", f"{name_of(page)} shows a command that no test runs: {command}"
        code = main(made_small(rest))
        printed = capsys.readouterr()
        assert code == 0, f"{command}: {printed.err}"
        if target:
            Path(target).write_text(printed.out)


def test_documented_commands_of_every_page_are_known() -> None:
    found = {command for page in PAGES for command in commands_of(page)}
    assert len(found) >= 19
    for begin in ELSEWHERE:
        assert any(each == begin or each.startswith(f"{begin} ") for each in found), begin
