import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

import equipoise
from equipoise import certify, runs
from equipoise.analysis import NetworkBound
from equipoise.cli import list as list_command
from equipoise.cli import main
from equipoise.cli.entry import COMMANDS, make_parser
from equipoise.core import ConvergenceError, ConvergenceWarning, Interrupted
from equipoise.engine import read_checkpoint, write_checkpoint
from equipoise.layers import Bound, Certificate, Statement
from equipoise.models import model_options
from equipoise.runs import CertifiedRun

SMALL = ["train.epochs=1", "data.subset=100", "train.batch=50"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert main(["train", "digits", "--output", str(folder), *SMALL, "--quiet"]) == 0
    return folder


def told(capsys):
    """The one line on stderr, after nothing on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    (line,) = err.splitlines()
    return line


def python(*words, folder=None):
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["--version"], [], ["trian"], ["list", "modles"], ["list"]],
    ids=" ".join,
)
def test_command_line_explains_itself_without_torch(words):
    script = (
        f"import sys; from equipoise.cli import main; code = main({words}); "
        "sys.exit(code if 'torch' not in sys.modules else 9)"
    )
    done = python("-c", script)
    explained = "--help" in words or words in (["--version"], ["list"])
    assert done.returncode == (0 if explained else 2)
    if "trian" in words or "modles" in words:
        assert "Did you mean" in done.stderr
        return
    if words == ["list"]:
        assert "presets" in done.stdout
        return
    assert (equipoise.__version__ if words == ["--version"] else "usage: equipoise") in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_a_sentence_and_an_example_that_parses(name, capsys):
    example = COMMANDS[name].example
    assert COMMANDS[name].sentence.endswith(".")
    assert main([name, "--help"]) == 0
    assert example in capsys.readouterr().out
    words = example.partition(" > ")[0].replace("'", "").split()[1:]
    assert not any(word.startswith("-") for word in make_parser().parse_known_args(words)[1])


def test_module_runs_as_a_command():
    done = python("-m", "equipoise", "trian")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("equipoise: error: command must be one of certify, config, ")
    assert done.stderr.endswith("got 'trian'. Did you mean 'train'?\n")


def test_config_names_a_model_in_a_module_beside_the_user(tmp_path):
    (tmp_path / "own.py").write_text(
        "from equipoise import create_model\n"
        "def make(*, num_classes=10):\n"
        "    return create_model('opteq-digits', num_classes=num_classes)\n"
    )
    (tmp_path / "numpy.py").write_text("raise SystemExit('a file here was taken for numpy')")
    script = "import sys; from equipoise.cli import main; sys.exit(main())"
    # -P leaves the current folder out of the path, as the installed command does.
    done = python("-P", "-c", script, "config", "digits", "model.name=own:make", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'name = "own:make"' in done.stdout
    done = python("-P", "-c", script, "config", "digits", "model.name=other:make", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("equipoise: error: model.name=other:make: model.name must name a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume"], "the following arguments are required: RUN.*; see equipoise resume --help"),
        (["list", "modles"], "list.kind must be one of .* Did you mean 'models'?"),
        (["list", "models", "nothing"], "list.pattern must match one of the models; got 'nothing'"),
        (["list", "models", "a", "b"], "list: there is no such option: b"),
        (["list", "models", "--foo"], "list: there is no such option: --foo"),
        (["--foo", "list", "models"], "there is no such option: --foo"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "digit"], "Did you mean 'digits'?"),
        (
            ["train", "digits", "train.epoch=3"],
            "^equipoise: error: train.epoch=3: train.epoch must be a setting of train, .* Did you "
            "mean 'epochs'?",
        ),
        (
            ["train", "digits", "train.epochs"],
            "^equipoise: error: train.epochs: an override must have the form key=value",
        ),
        (["train", "digits", "--outptu", "x"], "there is no such option: --outptu"),
        (
            ["config", "digits", "model.name=\x1b[31m\nx"],
            r"model.name=\\x1b\[31m x: model.name must be one of",
        ),
        (["resume", "nowhere"], "nowhere: there is no such file or folder"),
        (["evaluate", "nowhere"], "nowhere"),
        (["evaluate", "nowhere", "--split", "all"], "invalid choice: 'all'"),
        (["certify", "nowhere"], "nowhere: must be the folder of a run, a preset or a model"),
        (
            ["certify", "resnet-18"],
            "certify must be asked of a model with an equilibrium",
        ),
        (["certify", "digits", "--radii", "0"], "--radii must be a positive number; got 0.0"),
        (["certify", "opteq-mnist", "--radii", "1"], "since a model alone has no data"),
        (["report", "nowhere"], "nowhere"),
        (["predict", "nowhere", "x.png"], "nowhere"),
        (["predict", "nowhere"], "nowhere: must be the folder of a run"),
        (["sweep", "digits", "train.seed=1,2"], "the following arguments are required: --output"),
        (
            ["sweep", "digits", "train.seed=1,x", "--output", "s"],
            "train.seed=x: train.seed must be a whole number",
        ),
        (
            ["sweep", "digits", "--jobs", "0", "--output", "s"],
            "sweep.jobs must be a whole number of at least 1",
        ),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, list) else "",
)
def test_mistake_is_told_in_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    line = told(capsys)
    assert line.startswith("equipoise: error: ")
    assert line.isprintable()
    assert re.search(message, line)
    assert not list(tmp_path.iterdir())


def test_train_keeps_a_run_that_other_commands_can_use(run, capsys, tmp_path):
    capsys.readouterr()
    assert main(["train", "digits", *SMALL, "--output", str(run)]) == 2
    assert f"equipoise resume {run}" in told(capsys)

    assert main(["evaluate", str(run)]) == 0
    loss, accuracy, _, missed, *_ = capsys.readouterr().out.splitlines()
    assert loss.startswith("loss ")
    assert accuracy.endswith(" %")
    assert missed.endswith("of 359 samples did not reach the solver's tolerance")
    assert main(["evaluate", str(run), "--json", "--split", "train"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["samples"] == 100  # what it learnt from

    assert main(["resume", str(run), "--quiet"]) == 0
    assert "test accuracy " in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert main(["config", str(run), "train.epochs=7"]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert runs.load_config(tmp_path / "again.toml") == runs.load_config(run, ["train.epochs=7"])


def test_predict_takes_files_on_both_sides_of_an_option(run, capsys, tmp_path):
    images, _ = load_digits(return_X_y=True)
    files = [str(tmp_path / f"{i}.png") for i in range(3)]
    for file, image in zip(files, images, strict=False):
        Image.fromarray((image.reshape(8, 8) * 15).astype(np.uint8)).resize((50, 40)).save(file)
    capsys.readouterr()
    assert (
        main(["predict", str(run), files[0], "--out", str(tmp_path / "out.csv"), *files[1:]]) == 0
    )
    assert capsys.readouterr().out == ""
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[0] == "file,label,probability,converged"
    assert [line.split(",")[0] for line in lines[1:]] == files
    assert main(["predict", str(run), files[0], "--top", "3"]) == 0
    titles, row = capsys.readouterr().out.splitlines()
    assert titles == "file,label,probability,label_2,probability_2,label_3,probability_3,converged"
    first, second, third = (float(row.split(",")[i]) for i in (2, 4, 6))
    assert 1 >= first >= second >= third
    assert main(["predict", str(run), files[0], "--top", "99"]) == 0  # all ten of them
    assert capsys.readouterr().out.count("label") == 10
    assert main(["predict", str(run), files[0], "--top", "0"]) == 2
    assert "--top must be" in told(capsys)
    assert main(["predict", str(run), str(tmp_path / "none.png")]) == 2
    assert "none.png: is not there" in told(capsys)


def test_evaluate_shows_the_scores_of_each_class(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("top-5 accuracy ")
    assert lines[4].split() == ["class", "precision", "recall", "F1", "samples"]
    assert [line.split()[0] for line in lines[5:]] == list("0123456789")
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(each["count"] for each in found["classes"].values()) == found["samples"]


@pytest.mark.parametrize("kind", list_command.KINDS)
def test_list_names_each_thing_with_a_line(kind, capsys):
    assert main(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 4
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(found)
    if kind == "models":
        assert found["opteq-digits"].pop("parameters") == 10_106
        assert found["opteq-digits"] == {
            "family": "opteq",
            "summary": "Grey images of 8 x 8, such as scikit-learn's digits: one layer, a convex "
            "problem.",
        }
        assert all(about["family"] in lines[n] for n, about in enumerate(found.values()))
        found = {name: about["summary"] for name, about in found.items()}
    assert all(line.endswith(text) for line, text in zip(lines, found.values(), strict=True))
    assert (
        len({len(line) - len(text) for line, text in zip(lines, found.values(), strict=True)}) == 1
    )


def test_list_without_a_kind_names_the_kinds(capsys):
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(list_command.KINDS)


def test_list_shows_the_options_of_a_model_and_of_data(capsys):
    assert main(["list", "models", "opteq-digits"]) == 0
    out = capsys.readouterr().out
    for name in model_options("opteq-digits"):
        assert re.search(rf"^  {name} +[A-Z`].* \(.+\)$", out, re.MULTILINE), name
    assert "  num_classes   Number of classes. (whole number; default 10)\n" in out
    assert main(["list", "data", "csv"]) == 0
    assert "by default all others. (list of texts; default [])" in capsys.readouterr().out
    assert main(["list", "data", "digits"]) == 0
    assert capsys.readouterr().out.endswith("It has no options.\n")
    assert main(["list", "data", "npz", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["options"]) == [
        "classes",
        "targets",
        "features",
        "labels",
    ]


def test_config_with_comments_explains_every_setting(capsys, tmp_path):
    assert main(["config", "mnist", "data.name=csv", "--comments"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    settings = [i for i, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    assert len(settings) > 40
    for i in settings:
        assert re.match(r"#( |   \w+: )[A-Z`].+ \(.+\)$", lines[i - 1]), lines[i]
    assert "#   targets: Names of columns of numbers to predict" in text
    (tmp_path / "mine.toml").write_text(text)
    assert runs.load_config(tmp_path / "mine.toml") == runs.load_config("mnist", ["data.name=csv"])


@pytest.mark.parametrize(
    ("pattern", "names"), [("teq-mn", ["opteq-mnist"]), ("opteq-d*s", ["opteq-digits"])]
)
def test_list_takes_part_of_a_name_or_a_pattern(pattern, names, capsys):
    assert main(["list", "models", pattern]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names


@pytest.fixture
def trained(monkeypatch, run):
    """What the commands ask `train_run` for, which gives the summary of a run or raises."""
    asked = []
    summary = runs.resume_run(run, quiet=True)

    def train(config, folder, **options):
        asked.append((config, folder, options))
        if isinstance(train.failure, BaseException):
            raise train.failure
        return summary

    train.failure = None
    train.asked = asked
    monkeypatch.setattr(runs, "train_run", train)
    return train


def test_train_passes_on_what_it_was_told(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "--debug",
                "train",
                "mnist",
                "--data-root",
                "data",
                "train.seed=3",
                "--download",
                "train.batch=7",
            ]
        )
        == 0
    )
    config, folder, options = trained.asked[0]
    assert (config.train.seed, config.train.batch, config.data.download) == (3, 7, True)
    assert config.data.root == "data"
    assert folder.parts[0] == "runs"
    assert folder.name.startswith("mnist-20")
    assert options == {"resume": False, "trust": False, "quiet": False}
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "resume"), [("", False), ("0", False), ("2", True)])
def test_train_resumes_when_torchrun_starts_it_again(
    count, resume, trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "digits", "--output", str(tmp_path / "r")]) == 0
    assert trained.asked[0][2]["resume"] is resume
    assert capsys.readouterr().out == ""  # the first process tells
    assert main(["train", "digits"]) == 2
    assert "--output must be given" in told(capsys)


def test_demo_takes_a_new_folder_each_time(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "equipoise-demo").mkdir()
    assert main(["demo", "--seed", "5"]) == 0
    config, folder, _ = trained.asked[0]
    assert (config.data.name, config.train.seed, folder.name) == ("digits", 5, "equipoise-demo-2")
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "code"), [("diverged", 3), ("failed", 2), ("early", 0)])
def test_sweep_separates_what_varies(status, code, monkeypatch, capsys, tmp_path):
    asked = []

    def sweep(*words, **options):
        asked.append((words, options))
        return [{"run": "000", "status": status}]

    monkeypatch.setattr("equipoise.runs.sweep.sweep", sweep)
    assert (
        main(
            [
                "sweep",
                "digits",
                "train.seed=1,2",
                "--output",
                str(tmp_path),
                "train.epochs=3",
                "--jobs",
                "2",
            ]
        )
        == code
    )
    assert asked == [
        (
            ("digits", ["train.epochs=3"], {"train.seed": ["1", "2"]}, tmp_path),
            {"jobs": 2, "pool": "local", "root": None, "trust": False},
        )
    ]
    assert capsys.readouterr().out == f"run  status\n000  {status}\n"


MEMORY = (
    "not enough memory: raise train.accumulate, or lower train.batch or train.evaluate_batch "
    "(DefaultCPUAllocator: not enough memory: you tried)"
)


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (ConvergenceError("10 steps\nin a row"), 3, "error: 10 steps in a row"),
        (ValueError("data.root must\x1b be"), 2, "error: digits: data.root must\\x1b be"),
        (PermissionError(13, "Permission denied", "x/y"), 2, "error: x/y: Permission denied"),
        (ImportError("Images need Pillow."), 2, "error: Images need Pillow."),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried\nto"),
            2,
            f"error: {MEMORY}",
        ),
        (
            KeyError("x"),
            1,
            "error: KeyError: 'x'. This is a bug; run again with --debug to see where.",
        ),
        (Interrupted("at step 3"), 130, "interrupted; there is no checkpoint yet"),
        (KeyboardInterrupt(), 130, "interrupted; there is no checkpoint yet"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_has_its_exit_code_and_one_line(failure, code, message, trained, capsys, tmp_path):
    trained.failure = failure
    assert main(["train", "digits", "--output", str(tmp_path / "r")]) == code
    assert told(capsys) == f"equipoise: {message}"
    for words in (["--debug", "train"], ["train", "--debug"]):
        assert main([*words, "digits", "--output", str(tmp_path / "r")]) == code
        assert capsys.readouterr().err.startswith("Traceback")


def test_evaluate_of_ruined_weights_is_a_numerical_failure(run, capsys, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    weights, state = read_checkpoint(copy / "model.safetensors")
    ruined = {
        name: value * math.nan if value.is_floating_point() else value
        for name, value in weights.items()
    }
    write_checkpoint(copy / "model.safetensors", ruined, state)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["evaluate", str(copy)]) == 3
    out, err = capsys.readouterr()
    assert out.splitlines()[:4] == [
        "loss nan",
        "accuracy 0.0 %",
        "top-5 accuracy 0.0 %",
        "359 of 359 samples did not reach the solver's tolerance",
    ]
    assert err.endswith("359 solves met NaN or infinity; such samples count as wrong\n")
    assert main(["certify", str(copy)]) == 2
    assert re.search(r"model.safetensors: .* must have finite weights", told(capsys))


def test_certify_says_what_is_proved(run, capsys):
    capsys.readouterr()
    assert main(["certify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    name, claim, number, basis = lines[:4]
    assert name == "equilibrium"
    assert "network" in lines
    assert any(line.startswith("  Lipschitz constant: at most ") for line in lines)
    assert any(line.startswith("    head.classifier ") for line in lines)
    assert claim.startswith("  proved: the step is a contraction")
    assert basis.startswith("    by: Banach's fixed-point theorem")
    assert main(["certify", str(run), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    found = whole["equilibria"]["equilibrium"]
    certificate = certify(runs.open_run(run).model.equilibria()["equilibrium"])
    assert found["holds"] is True
    assert 0 < whole["lipschitz"] < math.inf
    assert found["lipschitz"] == certificate.lipschitz < 1
    assert number == (
        f"    number: {certificate.lipschitz:.6g}, margin {1 - certificate.lipschitz:.3g}"
    )
    assert [
        (each["statement"], each["verdict"])
        for each in whole["statements"]
        if each["about"] == "equilibrium"
    ] == [(each.claim, "holds") for each in certificate.statements]


def test_certify_states_radii_attacks_them_and_the_page_shows_it(run, capsys, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    words = ["--radii", "0.01", "1e3", "--samples", "60", "--attack", "10"]
    few = ["--attack-steps", "5", "--attack-restarts", "2"]
    capsys.readouterr()
    assert main(["certify", str(copy), *words, *few]) == 0
    said = capsys.readouterr().out
    assert "certified radii of 60 test samples" in said
    assert "  0 certificates broken" in said
    assert "Normalize" in said or "extractor.0" in said
    kept = json.loads((copy / "certificate.json").read_text())
    assert 0 < kept["radii"]["certified"]["0.01"] <= kept["radii"]["accuracy"]
    assert kept["radii"]["certified"]["1000"] == 0
    assert (kept["attack"]["samples"] > 0, kept["attack"]["broken"]) == (True, 0)
    assert main(["report", str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "What is proved of the network" in page
    assert "Lipschitz constant of each part" in page
    # It is about these weights alone.
    weights, state = read_checkpoint(copy / "model.safetensors")
    name = next(name for name, value in weights.items() if value.is_floating_point())
    write_checkpoint(copy / "model.safetensors", {**weights, name: 2 * weights[name]}, state)
    assert main(["report", str(copy)]) == 0
    assert "What is proved of the network" not in (copy / "report.html").read_text()


def test_certify_reads_released_weights(capsys, tmp_path):
    torch.manual_seed(0)
    tensors = {
        "mon.linear_module.U.weight": torch.randn(5, 784) / 28,
        "mon.linear_module.U.bias": torch.randn(5),
        "mon.linear_module.A.weight": torch.randn(5, 5),
        "mon.linear_module.B.weight": torch.randn(5, 5),
        "Wout.weight": torch.randn(10, 5),
        "Wout.bias": torch.randn(10),
    }
    path = tmp_path / "released.pt"
    torch.save(tensors, path)
    setting = f"model.options.weights={path}"
    assert main(["certify", "monotone-mnist", setting, "model.options.margin=2.0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    U, W = (tensors[name] for name in ("mon.linear_module.U.weight", "Wout.weight"))
    norms = [float(torch.linalg.matrix_norm(each, 2)) for each in (U, W)]
    assert 0 < found["lipschitz"] <= norms[0] * norms[1] / 2.0 * (1 + 1e-5)
    for write in (lambda: path.write_bytes(b"nothing"), lambda: torch.save(torch.nn.Tanh(), path)):
        write()
        assert main(["certify", "monotone-mnist", setting]) == 2
        assert "writes them: it holds something else." in told(capsys)
    torch.save({**tensors, "Wout.bias": torch.full((10,), torch.nan)}, path)
    assert main(["certify", "monotone-mnist", setting]) == 2
    assert "the network must have finite weights; got NaN or infinity in head.bias" in told(capsys)


def test_certify_says_that_nothing_is_proved(run, capsys, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    config = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(
        config.replace("options = { num", 'options = { norm = "none", num')
    )
    weights, state = read_checkpoint(copy / "model.safetensors")
    larger = {name: value * 10 for name, value in weights.items() if value.is_floating_point()}
    write_checkpoint(copy / "model.safetensors", weights | larger, state)
    capsys.readouterr()
    assert main(["certify", str(copy)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  not proved: the step is a contraction")
    assert "margin -" in lines[2]
    assert "  nothing is proved of this equilibrium at these weights" in lines
    assert lines[lines.index("network") - 1].startswith("  remedy: ")
    assert main(["certify", str(copy), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    found = whole["equilibria"]["equilibrium"]
    assert (found["holds"], whole["statements"][0]["verdict"]) == (False, "unknown")
    assert found["lipschitz"] > 1
    assert any(each["statement"].startswith("measured spectral") for each in whole["statements"])


def test_certify_tells_several_equilibria_apart(monkeypatch, capsys):
    proved, refuted = Statement("a", True, theorem="b", unique=True), Statement("c", False)
    found = {
        "first": Certificate(further=(proved, refuted), remedy="Do d."),
        "second": Certificate(further=(proved,)),
    }
    bound = NetworkBound(math.inf, (Bound("part", math.inf, "why"),), None, ())
    whole = CertifiedRun("somewhere", found, bound)
    monkeypatch.setattr(runs, "certify_run", lambda *_, **__: whole)
    assert main(["certify", "somewhere"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "first",
        "  proved: a",
        "    by: b",
        "  refuted: c",
        "  1 of 2 statements proved",
        "  remedy: Do d.",
        "second",
        "  proved: a",
        "    by: b",
        "network",
        "  Lipschitz constant: unknown",
        "    part     unknown  why",
    ]


def test_lost_process_is_not_called_a_bug(trained, capsys, monkeypatch, tmp_path):
    trained.failure = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "digits", "--output", str(tmp_path / "r")]) == 1
    assert told(capsys).startswith(
        "equipoise: error: another process was lost or cannot be reached: torchrun --max-restarts 3"
    )


def test_interrupted_run_says_how_to_resume(trained, run, capsys):
    trained.failure = Interrupted()
    assert main(["train", "digits", "--output", str(run)]) == 130
    assert told(capsys) == f"equipoise: interrupted; resume with: equipoise resume {run}"


def test_warnings_of_the_library_are_plain_lines(monkeypatch, capsys):
    def warn(kind):
        warnings.simplefilter("always")
        for count in (3, 2, 4):
            text = f"{count} of 4 samples\ndid not converge"
            warnings.warn(text, ConvergenceWarning, stacklevel=1)
        warnings.warn("other", UserWarning, stacklevel=1)
        return {kind: ""}

    monkeypatch.setattr(list_command, "describe", warn)
    before = warnings.showwarning
    assert main(["list", "solvers"]) == 0
    first, *other, last = capsys.readouterr().err.splitlines()
    assert first == "equipoise: warning: 3 of 4 samples did not converge"
    assert "test_cli.py" in other[0]
    assert last == (
        "equipoise: warning: 4 of 4 samples did not converge (2 more warnings like the first)"
    )
    assert warnings.showwarning is before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_pipe_that_nobody_reads_is_no_error(unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "list", "presets"],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


def test_package_gives_its_names_when_they_are_asked_for():
    script = (
        "import sys, equipoise; assert 'torch' not in sys.modules; equipoise.solvers.SOLVERS; "
        "from equipoise import OptEq; "
        "import equipoise.data; assert set(equipoise.__all__) < set(dir(equipoise)); "
        "from equipoise import *; print(solve is equipoise.solve)"
    )
    done = python("-c", script)
    assert (done.stdout, done.stderr) == ("True\n", "")
    for name in equipoise.__all__:
        assert getattr(equipoise, name) is not None
    with pytest.raises(AttributeError, match="module 'equipoise' has no attribute 'nothing'"):
        _ = equipoise.nothing
