"""Malformed data, configs, runs and inputs: one line each, nothing written, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from malformed_checkpoints import MALFORMED
from malformed_data import ALL, CASES, huge_png, image_bytes, npy, npy_header, npz
from published import WRITERS, Trap

from equipoise.cli import main
from equipoise.engine import read_checkpoint, write_checkpoint

MEGABYTE = 2**20
MODELS = {
    "mnist": "opteq-mnist",
    "svhn": "opteq-cifar10-162k",
    "cifar10": "opteq-cifar10-162k",
    "image-folder": "opteq-cifar10-162k",
    "camvid": "opteq-cityscapes",
    "cityscapes": "opteq-cityscapes",
}


def listing(folder: Path) -> dict[str, object]:
    """All that is in a folder, with the content of files and the time of their last change."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = (
            path.read_bytes() if path.is_file() and state.st_size < MEGABYTE else state.st_size
        )
        found[str(path.relative_to(folder))] = (
            content,
            state.st_mtime_ns if not path.is_dir() else 0,
        )
    return found


@contextmanager
def bounded(*, traced: bool = True) -> Iterator[None]:
    """Check that little memory is used; tracing what Python and NumPy ask for may take long."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if traced:
        tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]  # 0 if it is not traced
    finally:
        tracemalloc.stop()
    assert peak < 50 * MEGABYTE
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 150 * MEGABYTE


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Run a command that must refuse the files in a folder and leave them; return what it said."""
    before = listing(folder)
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    (line,) = err.splitlines()
    assert line.startswith("equipoise: error: ")
    assert line.isprintable()
    assert len(line) < 1000
    assert not re.search("Traceback|This is a bug|object at 0x", line)
    assert listing(folder) == before
    return line.removeprefix("equipoise: error: ")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What is imported late must not count as the memory of a case."""
    import scipy.io  # noqa: F401
    import sklearn.datasets  # noqa: F401
    from PIL import Image

    Image.init()


# Data


@pytest.mark.parametrize(("name", "case"), CASES)
def test_malformed_data_are_refused(
    name: str, case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val" if name in ("image-folder", "cityscapes") else "test"):
        WRITERS[name](tmp_path, split)
    damage, reason = ALL[name][case]
    damage(tmp_path)
    words = (
        "train",
        "digits",
        f"model.name={MODELS.get(name, 'opteq-digits')}",
        f"data.name={name}",
    )
    with bounded():
        line = refused(
            tmp_path,
            capsys,
            *words,
            "--data-root",
            tmp_path,
            "--output",
            tmp_path / "run",
            "--quiet",
        )
    assert line.startswith(str(tmp_path))
    assert re.search(reason, line)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_with_code_are_refused_and_not_run(
    protocol: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    for split in ("train", "test"):
        WRITERS["cifar10"](tmp_path, split)
    (tmp_path / "test_batch.bin").unlink()
    (tmp_path / "test_batch").write_bytes(
        pickle.dumps({"data": Trap(mark), "labels": [1]}, protocol=protocol)
    )
    line = refused(
        tmp_path, capsys, "train", "cifar10", "--data-root", tmp_path, "--output", tmp_path / "run"
    )
    assert line.startswith(str(tmp_path / "test_batch"))
    assert "could run code; it was not run" in line
    assert not mark.exists()


# Configs

DIGITS = '[model]\nname = "opteq-digits"\n[data]\nname = "digits"\n'
CONFIGS: dict[str, tuple[bytes | str, str]] = {
    "syntax": ("[model]\nname = \n", r"must be TOML: .*\(at line 2, column 8\)"),
    "half a table": ("[model\n", "must be TOML.*line 1"),
    "string not closed": ('[model]\nname = "opteq\n', "must be TOML.*line 2"),
    "empty": ("", "model must be given"),
    "no data": ('[model]\nname = "opteq-digits"\n', "data must be given"),
    "binary": (b"\x00\x01\x02\x03" * 50, "must be TOML"),
    "pickle": (b"\x80\x04cos\nsystem\n(S'true'\ntR.", "must be text in UTF-8; byte 0 is not"),
    "not UTF-8": (DIGITS.encode() + b"# \xff\xfe\n", "must be text in UTF-8; byte 55 is not"),
    "UTF-16": (DIGITS.encode("utf-16"), "must be text in UTF-8"),
    "two megabytes": ("#" * 2 * MEGABYTE, "at most 1048576 bytes"),
    "deep lists": ("a = " + "[" * 10_000, "nest lists and tables so deeply"),
    "deep tables": ("a = " + "{a=" * 10_000, "nest lists and tables so deeply"),
    "deep keys": (
        f"[model.options]\n{'a.' * 3000}a = 1",
        "must not nest lists and tables so deeply",
    ),
    "web page": ("<!DOCTYPE html><html>Not found</html>", "must be TOML"),
    "duplicate key": ("[train]\nepochs = 1\nepochs = 2\n", "must be TOML.*line 3"),
    "duplicate section": (f"{DIGITS}[model]\n", "must be TOML.*line 5"),
    "unknown section": (
        f"{DIGITS}[trian]\n",
        "trian must be a section, one of .* Did you mean 'train'",
    ),
    "unknown key": (
        f"{DIGITS}[train]\nepoch = 3\n",
        "train.epoch must be a setting of train, .* Did you mean 'epochs'",
    ),
    "section not a table": (f"train = 3\n{DIGITS}", "train must be a table of settings; got 3"),
    "section a list": (f"{DIGITS}[[train]]\nepochs = 3\n", "train must be a table of settings"),
    "text for a whole number": (
        f'{DIGITS}[train]\nepochs = "three"\n',
        "train.epochs must be a whole number; got 'three'",
    ),
    "part for a whole number": (
        f"{DIGITS}[train]\nepochs = 2.5\n",
        "train.epochs must be a whole number; got 2.5",
    ),
    "true for a whole number": (
        f"{DIGITS}[train]\nepochs = true\n",
        "train.epochs must be a whole number; got True",
    ),
    "text for a number": (
        f'{DIGITS}[optimizer]\nlearning_rate = "1"\n',
        "optimizer.learning_rate must be a number; got '1'",
    ),
    "number for text": (f"{DIGITS}[train]\ndevice = 3\n", "train.device must be text; got 3"),
    "number for yes": (
        f"{DIGITS}[train]\ntensorboard = 1\n",
        "train.tensorboard must be true or false; got 1",
    ),
    "date for a number": (
        f"{DIGITS}[train]\nclip = 2024-01-01\n",
        "train.clip must be a number; got ",
    ),
    "list for a number": (f"{DIGITS}[train]\nclip = [1]\n", "train.clip must be a number; got "),
    "table for a number": (f"{DIGITS}[train.clip]\na = 1\n", "train.clip must be a number; got "),
    "number for a list": (f"{DIGITS}mean = 0.5\n", "data.mean must be a list of numbers; got 0.5"),
    "text in a list": (f'{DIGITS}mean = ["a"]\nstd = [1]\n', "data.mean must be a number; got 'a'"),
    "one of two": (
        f"{DIGITS}[optimizer]\nbetas = [0.9]\n",
        "optimizer.betas must be a list of 2 numbers",
    ),
    "number for a table": (f"{DIGITS}options = 3\n", "data.options must be a table; got 3"),
    "nan": (
        f"{DIGITS}[optimizer]\nlearning_rate = nan\n",
        "optimizer.learning_rate must be a finite number; got nan",
    ),
    "infinity": (
        f"{DIGITS}[train]\ncheckpoint_minutes = inf\n",
        "train.checkpoint_minutes must be a finite number; got inf",
    ),
    "nan in a list": (f"{DIGITS}mean = [nan]\nstd = [1.0]\n", "data.mean must be a finite number"),
    "a number too long": (
        f"{DIGITS}[train]\nclip = {'9' * 400}\n",
        "train.clip must be a finite number; got 9",
    ),
    "a number far too long": (
        f"{DIGITS}[train]\nclip = {'9' * 5000}\n",
        "must be TOML|must be a finite number",
    ),
    "negative": (
        f"{DIGITS}[train]\nbatch = -1\n",
        "train.batch must be a whole number of at least 1; got -1",
    ),
    "zero": (
        f"{DIGITS}[train]\nepochs = 0\n",
        "train.epochs must be a whole number of at least 1; got 0",
    ),
    "seed too large": (
        f"{DIGITS}[train]\nseed = {2**63}\n",
        f"train.seed must be a whole number from 0 to {2**63 - 1}; got {2**63}",
    ),
    "out of range": (f"{DIGITS}holdout = 1.5\n", r"data.holdout must be in \[0, 1\); got 1.5"),
    "falling milestones": (
        f'{DIGITS}[schedule]\nname = "step"\nmilestones = [3, 2]\n',
        "schedule.milestones must increase",
    ),
    "unknown model": (
        '[model]\nname = "opteq-digit"\n[data]\nname = "digits"\n',
        "model.name .* Did you mean 'opteq-digits'",
    ),
    "unknown data": (
        '[model]\nname = "opteq-digits"\n[data]\nname = "digit"\n',
        "data.name .* Did you mean 'digits'",
    ),
    "unknown optimiser": (
        f'{DIGITS}[optimizer]\nname = "adm"\n',
        "optimizer.name .* Did you mean 'adam'",
    ),
    "unknown option": (
        f"{DIGITS}[model.options]\ntolerence = 1\n",
        "model.options.tolerence must be an option of .* Did you mean 'tolerance'",
    ),
    "unknown data option": (f"{DIGITS}[data.options]\na = 1\n", "data.options.a must be left out"),
    "date in options": (
        f"{DIGITS}[model.options]\nalpha = 2024-01-01\n",
        "model.options.alpha must be text, a number",
    ),
    "nan in options": (
        f"{DIGITS}[model.options]\nalpha = nan\n",
        "model.options.alpha must be a finite number",
    ),
    "escapes in a key": (f'{DIGITS}["\\u001b[31m\\n"]\n', r"must be a section, one of"),
    "escapes in a value": (
        f'{DIGITS}[train]\nprecision = "\\u001b]0;x\\u0007\\n\\r\\u202e"\n',
        "train.precision must be one of",
    ),
    "escapes in raw": (f"{DIGITS}\x1b[31m\n", "must be TOML.*line 5"),
    "extends nothing": ('extends = "nothing"\n', "extends must be one of"),
    "extends nothing near": (
        'extends = "digit"\n',
        "extends must be one of .* Did you mean 'digits'",
    ),
    "extends itself": ('extends = "bad.toml"\n', "extends must be one of"),
    "extends elsewhere": ('extends = "../../etc/passwd"\n', "extends must be one of"),
    "extends a number": ("extends = 3\n", "extends must be one of"),
    "extends a list": ('extends = ["digits"]\n', "extends must be one of"),
    "extends a table": ("[extends]\na = 1\n", "extends must be one of"),
    "extends with a wrong type": (
        'extends = "digits"\nmodel = 3\n',
        "model must be a table of settings; got 3",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_malformed_config_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, reason = CONFIGS[case]
    path, run = tmp_path / "bad.toml", tmp_path / "run"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with bounded():
        for words in (
            ("train", path, "--output", run),
            ("config", path),
            ("sweep", path, "--output", run),
        ):
            line = refused(tmp_path, capsys, *words)
            assert line.startswith(f"{path}: ")
            assert re.search(reason, line)


def test_config_that_is_no_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    for path in (
        tmp_path / "pipe.toml",
        tmp_path / "folder.toml",
        tmp_path / "loop.toml",
        tmp_path / "none.toml",
        Path("/dev/zero"),
    ):
        for words in (("train", path, "--output", tmp_path / "run"), ("config", path)):
            with bounded():
                assert refused(tmp_path, capsys, *words).startswith(f"{path}: ")


OPTIONS: dict[str, tuple[str, str]] = {
    "solver": ('model.options.solver = "andersen"', "Did you mean 'anderson'"),
    "gradient": ('model.options.gradient = "implict"', "Did you mean 'implicit'"),
    "activation": ('model.options.activation = "rleu"', "Did you mean 'relu'"),
    "regularizer": ('model.options.regularizer = "decorelation"', "Did you mean 'decorrelation'"),
    "norm": ('model.options.norm = "scael"', "Did you mean 'scale'"),
    "policy": ('model.options.on_failure = "rise"', "Did you mean 'raise'"),
    "solver a number": ("model.options.solver = 3", "solver"),
    "solver a table": ('model.options.solver = {name = "anderson", size = 3}', "solver"),
    "solver a table without a name": ("model.options.solver = {memory = 3}", "solver"),
    "gradient a list": ("model.options.gradient = [1]", "gradient"),
    "activation a number": ("model.options.activation = 1.5", "activation"),
    "activation too many": ('model.options.activation = ["relu", "tanh"]', "activation"),
    "regularizer a number": ("model.options.regularizer = 3", "regularizer"),
    "alpha text": ('model.options.alpha = "big"', "alpha"),
    "alpha a list of text": ('model.options.alpha = ["a"]', "alpha"),
    "alpha too many": ("model.options.alpha = [0.5, 0.5]", "alpha"),
    "alpha too large": ("model.options.alpha = 1.5", "alpha"),
    "learn_alpha text": ('model.options.learn_alpha = "no"', "learn_alpha"),
    "bound negative": ("model.options.bound = -1.0", "bound"),
    "bound text": ('model.options.bound = "x"', "bound"),
    "strength text": ('model.options.strength = "x"', "strength"),
    "tolerance negative": ("model.options.tolerance = -1", "tolerance"),
    "tolerance text": ('model.options.tolerance = "x"', "tolerance"),
    "max_steps part": ("model.options.max_steps = 1.5", "max_steps"),
    "max_steps zero": ("model.options.max_steps = 0", "max_steps"),
    "classes text": ('model.options.num_classes = "x"', "num_classes"),
    "classes none": ("model.options.num_classes = 0", "num_classes"),
    "classes negative": ("model.options.num_classes = -3", "num_classes"),
    "classes too few": (
        "model.options.num_classes = 3",
        "model.options.num_classes must be 10 for these data; got 3",
    ),
    "classes too many": (
        f"model.options.num_classes = {10**7}",
        "num_classes must be 10 for these data; got 10000000",
    ),
    "classes far too many": (
        f"model.options.num_classes = {10**12}",
        "num_classes must be 10 for these data",
    ),
    "classes beyond int64": (
        f"model.options.num_classes = {10**30}",
        "num_classes must be 10 for these data",
    ),
    "layers 10**12": (
        f'model.name = "opteq-imagenet-small"\nmodel.options.layers = {10**12}',
        "does not fit in memory",
    ),
    "layers text": ('model.name = "opteq-imagenet-small"\nmodel.options.layers = "x"', "layers"),
    "device": (
        'train.device = "gpu"',
        "train.device must be a device that torch can use here; got 'gpu'",
    ),
    "device that holds nothing": (
        'train.device = "meta"',
        "train.device must be a device that torch can use here; got 'meta'",
    ),
    "device with escapes": ('train.device = "\\u001b[31m\\n"', "train.device must be a device"),
    "task": ('task.name = "segmentation"', "task"),
    "classes of the data": (
        "data.classes = [3, 99]",
        "data.classes must be numbers from 0 to 9",
    ),
    "subset": ("data.subset = 100000", "data.subset must be at most 1438"),
    "holdout": ("data.holdout = 1e-9", "data.holdout must leave samples on both sides"),
    "mean of three channels": ("data.mean = [0.5, 0.5, 0.5]\ndata.std = [1, 1, 1]", "channels"),
    "size": (f"data.size = [{10**6}, {10**6}]", "data.size must have at most 67108864 pixels"),
    "size beyond int64": (f"data.size = [{10**30}, 8]", "data.size must have at most"),
    "padding": (
        f'data.augment = "pad-crop-flip"\ndata.padding = {10**6}',
        "data.padding must be at most 8",
    ),
    "threads": (f"train.threads = {10**12}", "train.threads"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_settings_that_fit_nothing_are_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, reason = OPTIONS[case]
    path = tmp_path / "bad.toml"
    model = "" if "model.name" in lines else 'model.name = "opteq-digits"\n'
    path.write_text(f'{model}data.name = "digits"\n{lines}\n')
    with bounded():
        line = refused(tmp_path, capsys, "train", path, "--output", tmp_path / "run", "--quiet")
    assert line.startswith(f"{path}: ")
    assert re.search(reason, line)


# Runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 1 and 2, the last."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    few = ("train.epochs=1", "data.subset=32", "train.batch=16", "train.checkpoint_steps=1")
    assert main(["train", "digits", *few, "--output", str(folder), "--quiet"]) == 0
    assert len(list((folder / "checkpoints").iterdir())) == 2
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    picture_file(tmp_path / "8.png", image_bytes(8, 8))
    return tmp_path / "run"


def picture_file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def commands(run: Path) -> dict[str, tuple[str | Path, ...]]:
    return {
        "resume": ("resume", run, "--quiet"),
        "evaluate": ("evaluate", run),
        "predict": ("predict", run, run.parent / "8.png"),
        "certify": ("certify", run),
        "report": ("report", run),
    }


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_checkpoints_are_refused(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = MALFORMED[kind]
    mark = run.parent / "ran"
    places = [run / "model.safetensors", *(run / "checkpoints").iterdir()]
    for path in places:
        path.write_bytes(make(path.read_bytes(), mark))
    for name, words in commands(run).items():
        with bounded(traced=name != "resume" and kind != "a million dimensions"):
            line = refused(run.parent, capsys, *words)
        assert line.startswith(
            str(run / ("checkpoints" if name == "resume" else "model.safetensors"))
        )
        assert re.search(reason, line)
    assert not mark.exists()


@pytest.mark.filterwarnings("default::equipoise.engine.CheckpointWarning")
@pytest.mark.parametrize("kind", ["data cut by one", "web page", "torch.save", "wrong checksum"])
def test_run_is_resumed_without_its_damaged_newest_checkpoint(
    kind: str, run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, mark = run / "checkpoints" / "step-000000002.safetensors", run.parent / "ran"
    newest.write_bytes(MALFORMED[kind][0](newest.read_bytes(), mark))
    assert main(["resume", str(run), "--quiet"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"equipoise: warning: {newest}: ")
    assert line.endswith("resuming from the one before it, step 1.")
    assert not mark.exists()
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


Change = Callable[[dict], object]


def rewritten(change: Change) -> Callable[[Path], None]:
    """Change the state of a checkpoint whose checksum stays right."""

    def damage(path: Path) -> None:
        tensors, state = read_checkpoint(path)
        change(state)
        write_checkpoint(path, tensors, state)

    return damage


STATES: dict[str, Change] = {
    "no data": lambda state: state.pop("data"),
    "data text": lambda state: state.update(data="x"),
    "data null": lambda state: state.update(data=None),
    "no shape": lambda state: state["data"].pop("shape"),
    "shape text": lambda state: state["data"].update(shape="abc"),
    "shape a number": lambda state: state["data"].update(shape=3),
    "shape negative": lambda state: state["data"].update(shape=[-1, 8, 8]),
    "classes a number": lambda state: state["data"].update(classes=3),
    "classes few": lambda state: state["data"].update(classes=["a", "b"]),
    "classes numbers": lambda state: state["data"].update(classes=list(range(10))),
    "task unknown": lambda state: state["data"].update(task="x"),
    "task a list": lambda state: state["data"].update(task=[1]),
    "ignore text": lambda state: state["data"].update(ignore="x"),
}
POSITIONS: dict[str, Change] = {
    "no position": lambda state: state.pop("position"),
    "position a list": lambda state: state.update(position=[1]),
    "position text": lambda state: state.update(position="x"),
    "step text": lambda state: state["position"].update(step="x"),
    "step negative": lambda state: state["position"].update(step=-1),
    "epoch a list": lambda state: state["position"].update(epoch=[]),
    "seconds text": lambda state: state["position"].update(seconds="x"),
    "seconds a list": lambda state: state["position"].update(epoch_seconds=[1]),
    "best text": lambda state: state["position"].update(best="x"),
    "scale a list": lambda state: state["position"].update(scale=[1]),
    "train a number": lambda state: state["position"].update(train=3),
    "test text": lambda state: state["position"].update(test="x"),
    "confusion text": lambda state: state["position"].update(confusion="x"),
    "other run": lambda state: state.update(run={}),
    "no run": lambda state: state.pop("run"),
}


@pytest.mark.parametrize("case", STATES)
def test_kept_weights_with_a_strange_state_are_refused(
    case: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(STATES[case])(run / "model.safetensors")
    for name in ("evaluate", "predict", "certify", "report"):
        assert str(run) in refused(run.parent, capsys, *commands(run)[name]), name


@pytest.mark.parametrize("case", POSITIONS)
def test_checkpoints_with_a_strange_state_are_refused(
    case: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run / "checkpoints").iterdir():
        rewritten(POSITIONS[case])(path)
    assert str(run) in refused(run.parent, capsys, *commands(run)["resume"])


def json_damage(change: Change) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        values = json.loads(content)
        change(values)
        return json.dumps(values).encode()

    return damage


DEEP = b'{"a":' + b"[" * 100_000
RUN_FILES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "summary not JSON": ("summary.json", lambda content: content[:-9], "must be JSON"),
    "summary binary": ("summary.json", lambda _: b"\x00\xff" * 99, "must be JSON"),
    "summary empty": ("summary.json", lambda _: b"", "must be JSON"),
    "summary a list": ("summary.json", lambda _: b"[1]", "must hold a JSON object; got list"),
    "summary deep": ("summary.json", lambda _: DEEP, "must be JSON"),
    "summary long number": (
        "summary.json",
        lambda _: b'{"a": ' + b"9" * 10_000 + b"}",
        "must be JSON",
    ),
    "confusion text": (
        "summary.json",
        json_damage(lambda values: values.update(confusion="x")),
        "confusion",
    ),
    "confusion a number": (
        "summary.json",
        json_damage(lambda values: values.update(confusion=3)),
        "confusion",
    ),
    "confusion ragged": (
        "summary.json",
        json_damage(lambda values: values.update(confusion=[[1, 2], [3]])),
        "confusion",
    ),
    "confusion of text": (
        "summary.json",
        json_damage(lambda values: values.update(confusion=[["a"]])),
        "confusion",
    ),
    "confusion of objects": (
        "summary.json",
        json_damage(lambda values: values.update(confusion=[[{}]])),
        "confusion",
    ),
    "confusion deep": (
        "summary.json",
        lambda _: b'{"confusion":' + b"[" * 60 + b"]" * 60 + b"}",
        "confusion",
    ),
    "confusion too large": (
        "summary.json",
        lambda _: b'{"confusion":[[1' + b"0" * 400 + b"]]}",
        "confusion",
    ),
    "environment not JSON": ("environment.json", lambda content: content[:-9], "must be JSON"),
    "environment a list": (
        "environment.json",
        lambda _: b"[1]",
        "must hold a JSON object; got list",
    ),
    "environment text": ("environment.json", lambda _: b'"x"', "must hold a JSON object; got str"),
    "environment deep": ("environment.json", lambda _: DEEP, "must be JSON"),
    "metrics not JSON": (
        "metrics.jsonl",
        lambda content: content.replace(b"{", b"[", 1),
        "line 1 is not a JSON object",
    ),
    "metrics a list": (
        "metrics.jsonl",
        lambda content: b"[1]".ljust(len(content) - 1) + b"\n",
        "line 1 is not a JSON object",
    ),
    "metrics binary": (
        "metrics.jsonl",
        lambda content: b"\xff" * (len(content) - 1) + b"\n",
        "line 1 is not a JSON object",
    ),
    "metrics deep": (
        "metrics.jsonl",
        lambda content: DEEP + b"\n" + content,
        "line 1 is not a JSON object",
    ),
    "config not TOML": ("config.toml", lambda content: content[:-9], "must be TOML"),
    "config binary": ("config.toml", lambda _: b"\xff" * 99, "must be text in UTF-8"),
    "config empty": ("config.toml", lambda _: b"", "model must be given"),
    "config of another type": (
        "config.toml",
        lambda content: content.replace(b"epochs = 1", b'epochs = "x"'),
        "train.epochs",
    ),
    "config with other options": (
        "config.toml",
        lambda content: content.replace(b"num_classes = 10", b"num_classes = -1"),
        "num_classes",
    ),
    "config of another model": (
        "config.toml",
        lambda content: content.replace(b"-digits", b"-mnist"),
        "of another model|28",
    ),
}
READ_BY = {
    "summary.json": ("report",),
    "environment.json": ("report", "resume"),
    "metrics.jsonl": ("report",),
    "config.toml": ("resume", "evaluate", "predict", "certify", "report"),
}


@pytest.mark.parametrize("case", RUN_FILES)
def test_malformed_files_of_a_run_are_refused(
    case: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage, reason = RUN_FILES[case]
    path = run / name
    path.write_bytes(damage(path.read_bytes()))
    for command in READ_BY[name]:
        with bounded():
            line = refused(run.parent, capsys, *commands(run)[command])
        assert line.startswith(str(run)), command
        assert re.search(reason, line), command


def test_report_leaves_out_what_is_no_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd: list[object] = ["x", None, True, [1], {"a": "x"}, 10**400, {"CONVERGED": "x"}, "<script>"]
    keys = list(json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]))
    lines = [
        {**dict.fromkeys(keys, value), "kind": kind} for value in odd for kind in ("step", "epoch")
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((run / "summary.json").read_text())
    del summary["confusion"]
    for value in ("x", [1], {"a": [{}]}, 10**400):
        (run / "summary.json").write_text(json.dumps(dict.fromkeys(summary, value)))
        (run / "environment.json").write_text(json.dumps({"torch": value}))
        assert main(["report", str(run)]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert "<script" not in (run / "report.html").read_text()


# Inputs of predictions

INPUTS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("a.png", None, "is not there"),
    "empty picture": ("a.png", b"", "is empty"),
    "no picture": ("a.png", b"noise", "is not an image"),
    "web page": ("a.jpg", b"<html>404</html>", "is not an image"),
    "program": ("a.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
    "cut picture": ("a.png", image_bytes(50, 60)[:60], "cannot be read|truncated"),
    "huge picture": ("a.png", huge_png(), "too many pixels"),
    "unknown kind": ("a.exe", b"MZ", "must be an image"),
    "empty array": ("a.npy", b"", "not an array|cannot be read|truncated"),
    "no array": ("a.npy", b"noise", "not an array|cannot be read|truncated"),
    "cut array": ("a.npy", npy(np.zeros((2, 64)))[:200], "truncated"),
    "huge array": ("a.npy", npy_header("(1000000, 64)"), "truncated"),
    "huge array beyond int64": ("a.npy", npy_header(f"({2**62}, {2**62})"), "truncated"),
    "negative array": ("a.npy", npy_header("(-1, 64)"), "truncated|cannot be read"),
    "array with code in its header": ("a.npy", npy_header("os.system('true')"), "cannot be read"),
    "array of objects": ("a.npy", npy_header("(1,)", "|O"), "could run code"),
    "array of text": ("a.npy", npy(["a", "b"]), "must hold numbers"),
    "array of complex numbers": ("a.npy", npy(np.zeros((1, 64), dtype=complex)), "must hold|real"),
    "array of nothing": ("a.npy", npy(np.zeros((0, 64))), "holds no samples"),
    "array of one number": ("a.npy", npy(np.array(3.0)), "holds no samples"),
    "array of another shape": ("a.npy", npy(np.zeros((2, 63))), "samples of shape"),
    "array of large pictures": ("a.npy", npy(np.zeros((1, 1, 9, 8))), "samples of shape"),
    "array with nan": ("a.npy", npy(np.full((1, 64), np.nan)), "not finite"),
    "array beyond float32": ("a.npy", npy(np.full((1, 64), 1e300)), "not finite"),
    "no archive": ("a.npz", b"PK\3\4 noise", "cannot be read"),
    "empty archive": ("a.npz", npz(), "must hold an array 'x'"),
    "archive of several": ("a.npz", npz(a=npy([1]), b=npy([2])), "must hold an array 'x'"),
    "archive that declares more": ("a.npz", npz(x=npy_header("(1000000, 1000000)")), "truncated"),
    "archive of objects": ("a.npz", npz(x=npy_header("(3,)", "|O")), "could run code"),
    "empty table": ("a.csv", b"", "holds no samples"),
    "table of words": ("a.csv", b"a,b\nc,d\n", "is 'c', not a finite number"),
    "table with nan": ("a.csv", b",".join([b"nan"] * 64) + b"\n", "is missing"),
    "ragged table": ("a.csv", b"1,2\n1\n", "1 columns in row 2; 2 expected"),
    "narrow table": ("a.csv", b"1,2\n1,2\n", "samples of shape"),
    "binary table": ("a.csv", b"\xff\xfe\0\0", "holds zero bytes"),
    "folder of nothing": ("folder", None, "is not there|without images"),
    "terminal escapes": ("\x1b[31m\n.png", b"noise", "is not an image"),
}


@pytest.mark.parametrize("case", INPUTS)
def test_malformed_inputs_are_refused(
    case: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, reason = INPUTS[case]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    elif name == "folder":
        path.mkdir()
    with bounded():
        line = refused(tmp_path, capsys, "predict", whole, path, "--out", tmp_path / "found.csv")
    assert line.startswith(str(tmp_path))
    assert re.search(reason, line)


def test_input_with_code_is_refused_and_not_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "ran"
    np.save(tmp_path / "a.npy", np.array([Trap(mark)], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([Trap(mark)], dtype=object))
    for name in ("a.npy", "a.npz"):
        assert "could run code" in refused(tmp_path, capsys, "predict", whole, tmp_path / name)
    assert not mark.exists()
    np.load(tmp_path / "a.npy", allow_pickle=True)
    assert mark.exists(), "the trap must be one that a careless reader falls into"
