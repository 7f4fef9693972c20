"""The documentation says what is true: its code and commands run, and print what it shows.

The blocks of a page run in order, in one namespace and in one empty folder:

- `python` runs here; a `text` block right after it is what it prints,
- `console` runs each line that begins with `$ `, and the lines below it are what it prints,
- `python` and `toml` with a `title` are files, written under that name.

In what is printed, `...` stands for anything, and decimal fractions need only be close. Blocks of
other kinds (`bash`) are only shown.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from equipoise import GRADIENTS, SOLVERS
from equipoise.cli import main
from equipoise.data import DATASETS
from equipoise.engine import TASKS, progress
from equipoise.prox import ACTIVATIONS, REGULARIZERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
DECIMAL = r"-?\d+\.\d+(?:e[+-]?\d+)?"
MAX_COLUMNS = 100
MAX_PICTURE_BYTES = 200_000


class Block(NamedTuple):
    kind: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = []
    for _, kind, rest, text in FENCE.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Block(kind, title[1] if title else "", textwrap.dedent(text)))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def assert_printed(expected: str, printed: str) -> None:
    """Compare, with `...` for anything, decimal fractions to 30 % and whitespace alike."""
    shown: list[float] = []
    pattern = ""
    for piece in re.split(rf"(\.\.\.|{DECIMAL})", " ".join(expected.split())):
        if piece == "...":
            pattern += ".*?"
        elif re.fullmatch(DECIMAL, piece):
            shown.append(float(piece))
            pattern += f"({DECIMAL})"
        else:
            pattern += re.escape(piece)
    found = re.fullmatch(pattern, " ".join(printed.split()), re.DOTALL)
    # Other processors round otherwise, and a solve may end a step later.
    assert found is not None, f"the page shows\n{expected}\nbut this was printed:\n{printed}"
    assert [float(number) for number in found.groups()] == pytest.approx(shown, rel=0.3)


def run_command(command: str, folder: Path) -> str:
    """Return what a command prints; ours runs here, since starting Python takes seconds."""
    name, *words = shlex.split(command)
    if name == "equipoise" and not {">", "|", "&&"} & {*words}:
        stream = io.StringIO()
        with (
            redirect_stdout(stream),
            redirect_stderr(stream),
            warnings.catch_warnings(),
            pytest.MonkeyPatch.context() as patch,
        ):
            warnings.simplefilter("default")
            patch.setenv("COLUMNS", "100")
            patch.setattr(progress, "PAUSE", math.inf)  # on a busy machine an epoch has more lines
            code = main(words)
        assert code == 0, f"{command} ended with {code}:\n{stream.getvalue()}"
        return stream.getvalue()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_console(text: str, folder: Path) -> None:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = re.sub(r"\\\n\s*", "", part).partition("\n")
        printed = run_command(command, folder)
        if expected.strip():
            assert_printed(expected, printed)


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch):
    """What a page registers is forgotten after it."""
    for registry in (ACTIVATIONS, DATASETS, GRADIENTS, REGULARIZERS, SOLVERS, TASKS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if {"python", "console"} & {block.kind for block in blocks_of(page)}],
    ids=name_of,
)
def test_documentation_code_runs_and_prints_what_is_shown(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    before = ""
    for block in blocks_of(page):
        printed = capsys.readouterr().out
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.kind == "python":
            with warnings.catch_warnings():
                exec(compile(block.text, str(page), "exec"), module.__dict__)
        elif block.kind == "console":
            run_console(block.text, tmp_path)
        elif block.kind == "text" and before == "python":
            assert_printed(block.text, printed)
        before = block.kind


def test_documentation_links_lead_somewhere():
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#:]+)\)|(?:src|href)=\"([^\":#]+)\"", text):
            path = page.parent / (target[0] or target[1])
            assert path.exists(), f"{name_of(page)} links to {path}"


def test_documentation_lines_are_short_enough_to_read():
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            # A row of a table and a link cannot be broken.
            if len(line) > MAX_COLUMNS and not line.lstrip().startswith("|") and "](" not in line:
                raise AssertionError(f"{name_of(page)}:{number} has {len(line)} columns: {line}")


def test_documentation_pictures_are_small_and_shown_somewhere():
    texts = "".join(page.read_text() for page in PAGES)
    for picture in (ROOT / "docs" / "pictures").glob("*.png"):
        assert picture.stat().st_size <= MAX_PICTURE_BYTES, picture.name
        assert picture.name in texts, f"no page shows {picture.name}"


def test_documentation_names_tests_that_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    errata = (ROOT / "docs" / "explain" / "errata.md").read_text()
    for name in re.findall(r"`(test_\w+)`", errata):
        assert f"def {name}(" in tests, f"the errata name {name}"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", errata):
        assert (ROOT / path).exists(), f"the errata name {path}"
