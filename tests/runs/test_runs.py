import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from equipoise import ConvergenceError, ConvergenceWarning
from equipoise.cli import main
from equipoise.data import (
    Dataset,
    Degrade,
    Normalize,
    PadCropFlip,
    RandomResizedCrop,
    Resize,
    load_data,
)
from equipoise.engine import CheckpointError, make_task, read_checkpoint, read_metrics
from equipoise.models import Model
from equipoise.runs import (
    DataConfig,
    evaluate_run,
    load_config,
    open_run,
    report_run,
    resume_run,
    train_run,
)
from equipoise.runs import run as run_module
from equipoise.runs import survey as survey_module
from equipoise.runs.build import make_transforms, resolve, try_out
from equipoise.runs.closeup import Trained
from equipoise.runs.environment import describe_environment
from equipoise.runs.run import ReportWarning
from equipoise.runs.samples import load_part, load_samples
from equipoise.runs.survey import survey_samples

SMALL = ["train.epochs=1", "data.subset=128", "train.batch=32"]
FILES = [
    "checkpoints",
    "config.toml",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "report.html",
    "summary.json",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    summary = train_run(load_config("digits", SMALL), folder, quiet=True)
    return folder, summary


def test_run_keeps_everything_and_no_more(run):
    folder, summary = run
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert json.loads((folder / "summary.json").read_text())["test"] == summary.test
    assert summary.test["samples"] == 359
    assert (
        load_config(folder).model.options["num_classes"] == 10
    )  # what the data decided is written down
    assert load_config(folder).task.name == "classification"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["processes"] == 1


def test_run_evaluates_to_what_training_found(run):
    folder, summary = run
    scores = evaluate_run(folder)
    assert scores.to_dict() == summary.test
    assert evaluate_run(folder, split="train").samples == 128  # what it learnt from


def test_run_opens_without_its_data_and_predicts_the_same(run):
    folder, summary = run
    opened = open_run(folder)
    assert opened.classes == tuple("0123456789")
    assert not opened.model.training
    test = load_data("digits", "test")
    with torch.no_grad():
        right = (opened.model(test.x).argmax(1) == test.y).float().mean().item()
    assert right == pytest.approx(summary.test["accuracy"])


def test_run_of_the_same_config_gives_the_same_bits(run, tmp_path):
    folder, _ = run
    train_run(load_config(folder), tmp_path / "again", quiet=True)
    first, second = (
        read_checkpoint(place / "model.safetensors")[0] for place in (folder, tmp_path / "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_gives_other_weights(run, tmp_path):
    folder, _ = run
    config = load_config(folder)
    train_run(replace(config, train=replace(config.train, seed=1)), tmp_path / "again", quiet=True)
    first, second = (
        read_checkpoint(place / "model.safetensors")[0] for place in (folder, tmp_path / "again")
    )
    assert not torch.equal(first["head.classifier.weight"], second["head.classifier.weight"])


def test_folder_that_holds_a_run_or_other_files_is_refused_and_left_alone(run, tmp_path):
    folder, _ = run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(
        ValueError,
        match=f"already holds a run. Resume it with: equipoise resume {re.escape(str(folder))}",
    ):
        train_run(load_config("digits", SMALL), folder, quiet=True)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be new or empty; it holds other files"):
        train_run(load_config("digits", SMALL), tmp_path, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_resume_with_another_config_is_refused(run):
    folder, _ = run
    with pytest.raises(ValueError, match="holds a run with another config"):
        train_run(
            load_config("digits", [*SMALL, "optimizer.learning_rate=0.5"]),
            folder,
            resume=True,
            quiet=True,
        )


def test_resume_of_a_finished_run_changes_nothing_that_counts(run, tmp_path):
    folder, summary = run
    copy = shutil.copytree(folder, tmp_path / "copy")
    again = resume_run(copy, quiet=True)
    assert again.test == summary.test
    assert read_metrics(copy / "metrics.jsonl") == read_metrics(folder / "metrics.jsonl")
    assert (copy / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


CONSTANT = [*SMALL, "schedule.name=constant", "train.checkpoint_keep=1"]


def test_resume_with_more_epochs_equals_a_run_that_had_them_from_the_start(tmp_path):
    long, short = tmp_path / "long", tmp_path / "short"
    train_run(load_config("digits", [*CONSTANT, "train.epochs=2"]), long, quiet=True)
    train_run(load_config("digits", CONSTANT), short, quiet=True)
    summary = resume_run(short, ["train.epochs=2", "train.evaluate_batch=100"], quiet=True)
    assert summary.epochs == load_config(short).train.epochs == 2
    assert load_config(short).train.evaluate_batch == 100
    weights = [read_checkpoint(folder / "model.safetensors")[0] for folder in (long, short)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    steps = [
        [line["step"] for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (long, short)
    ]
    assert steps[0] == steps[1]
    assert [path.name for path in (short / "checkpoints").iterdir()] == [
        "step-000000008.safetensors"
    ]
    with pytest.raises(ValueError, match=r"train\.epochs must be at least 2 as before; got 1"):
        resume_run(short, ["train.epochs=1"], quiet=True)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            "train.epochs=2",
            "train.epochs must stay 1 when the run is resumed, since the learning rates of the "
            "schedule 'one-cycle' depend on it; got 2. Go on in another run with: equipoise train",
        ),
        ("optimizer.learning_rate=1", "optimizer.learning_rate must stay 0."),
        ("data.subset=64", "data.subset must stay 128 when the run is resumed; got 64"),
    ],
)
def test_resume_with_what_must_not_change_is_refused(run, setting, reason):
    folder = run[0]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=re.escape(reason)):
        resume_run(folder, [setting], quiet=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "classes",
    [[], ["data.classes=[0, 1, 2]"], ["data.classes=[1, 0, 2, 3, 4, 5, 6, 7, 8, 9]"]],
    ids=["same", "fewer", "reordered"],
)
def test_run_starts_from_the_weights_of_another(run, tmp_path, monkeypatch, capsys, classes):
    begun: list[dict[str, torch.Tensor]] = []

    def begin(trainer, **_):
        begun.append(trainer.model.state_dict())
        raise KeyboardInterrupt

    source, folder = run[0], tmp_path / "run"
    monkeypatch.setattr(run_module.Trainer, "fit", begin)
    words = ["train", str(source), "train.epochs=2", *classes, "--output", str(folder)]
    assert main([*words, "--from-weights"]) == 130
    assert main(["resume", str(folder)]) == 130  # before there is a checkpoint
    weights, _ = read_checkpoint(source / "model.safetensors")
    new = ["head.classifier.weight", "head.classifier.bias"] if classes else []
    for started in begun:
        assert [name for name in started if not torch.equal(started[name], weights[name])] == new
    config = load_config(folder)
    assert config.model.options["num_classes"] == (3 if "2]" in str(classes) else 10)
    assert config.train.epochs == 2
    rest = f"; new are {', '.join(new)}, since the classes differ" if new else ""
    told = f"starting from the weights of {source}{rest}"
    assert capsys.readouterr().err.count(told + "\n") == 2


def test_weights_to_start_from_must_be_there_and_of_this_model(run, tmp_path, capsys):
    for words, reason in (
        (["digits"], "digits: must be the folder of a run with weights to start from"),
        ([str(run[0]), "model.options.channels=3"], "weights of another model|channels"),
    ):
        folder = tmp_path / "new"
        assert main(["train", *words, "--output", str(folder), "--from-weights"]) == 2
        assert re.search(reason, capsys.readouterr().err)
        assert not folder.exists()


LANGUAGE_MODEL = """
import torch
from equipoise.models import Model


class Net(Model):
    def __init__(self, *, num_classes=4):
        super().__init__()
        self.name = "net"
        self.first = torch.nn.Embedding(num_classes, 4)
        self.last = torch.nn.Linear(4, num_classes)

    def forward(self, x):
        return self.last(self.first(x))
"""


def test_weights_for_another_vocabulary_are_refused(tmp_path, capsys):
    (tmp_path / "own.py").write_text(LANGUAGE_MODEL)
    for name, letters in (("before", "abc"), ("after", "xyz")):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.txt").write_text(letters * 30)
    config = tmp_path / "c.toml"
    config.write_text(
        f'[model]\nname = "{tmp_path}/own.py:Net"\n[data]\nname = "text"\n'
        'options = { length = 5, tokens = "characters" }\n[train]\nepochs = 1\n'
    )
    words = ["train", "--quiet", "--data-root"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert main([*words, str(tmp_path / "before"), str(config), "--output", first]) == 0
    capsys.readouterr()
    after = [*words, str(tmp_path / "after"), first, "--output", second, "--from-weights"]
    assert main([*after, "--trust"]) == 2
    told = capsys.readouterr().err
    assert "The vocabulary of the text must be that of" in told
    assert "got 4 tokens, of which 1 are among its 4." in told


def test_data_that_have_moved_are_asked_for_by_their_folder(tmp_path, capsys):
    data, folder = tmp_path / "data", str(tmp_path / "run")
    data.mkdir()
    for split in ("train", "test"):
        np.savez(data / f"{split}.npz", x=np.eye(4, dtype=np.float32), y=np.arange(4) % 2)
    (tmp_path / "own.py").write_text(
        LANGUAGE_MODEL.replace("Embedding(num_classes, 4)", "Linear(4, 4)")
    )
    (tmp_path / "c.toml").write_text(
        f'[model]\nname = "{tmp_path}/own.py:Net"\n[data]\nname = "npz"\nroot = "{data}"\n'
        "[train]\nepochs = 1\n"
    )
    assert main(["train", str(tmp_path / "c.toml"), "--output", folder, "--quiet"]) == 0
    data.rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["evaluate", folder]) == 2
    told = capsys.readouterr().err
    assert f"{data}: does not exist; say where the files of 'npz' are: --data-root DIR" in told
    assert main(["evaluate", folder, "--data-root", str(tmp_path / "moved")]) == 0


def test_run_without_weights_says_so(run, tmp_path):
    folder, _ = run
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"must hold model\.safetensors, which is written after the first epoch"
    ):
        open_run(copy)


def test_weights_of_another_model_are_refused(run, tmp_path):
    folder, _ = run
    copy = shutil.copytree(folder, tmp_path / "copy")
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("opteq-digits", "opteq-mnist"))
    with pytest.raises(CheckpointError, match="weights of another model"):
        open_run(copy)


def test_report_of_an_unfinished_run_can_be_written(run, tmp_path):
    folder, _ = run
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name in ("summary.json", "model.safetensors", "report.html"):
        (copy / name).unlink()
    page = report_run(copy).read_text()
    assert "opteq-digits on digits" in page
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(
        lines[0] + lines[1][:20]
    )  # as it is while a line is written
    assert "opteq-digits on digits" in report_run(copy).read_text()


def test_report_shows_the_problem_that_the_layer_solves(run):
    page = (run[0] / "report.html").read_text()
    assert "The equilibrium minimises phi(z)" in page
    assert "Lipschitz constant at most" in page
    assert "Confusion matrix" in page


def test_report_shows_the_mistakes_that_predictions_make(run):
    """The samples on the page are wrong by the model itself, as many as its scores say."""
    folder, summary = run
    opened, test = open_run(folder), load_data("digits", "test")
    trained = Trained(opened.model, opened.task, opened.classes, opened.transform, batch=100)
    found = survey_samples(trained, test)
    assert (found.samples, found.total, found.split) == (359, 359, "test")
    assert found.wrong == round(359 * (1 - summary.test["accuracy"]))
    with torch.no_grad():
        probability = opened.model(test.x).softmax(1)
    for mistake in found.mistakes:
        row = probability[mistake.number]
        assert mistake.truth == str(test.y[mistake.number].item())
        assert mistake.prediction == str(row.argmax().item()) != mistake.truth
        assert mistake.confidence == pytest.approx(row.max().item(), abs=1e-4)
    confidence = [mistake.confidence for mistake in found.mistakes]
    assert confidence == sorted(confidence, reverse=True)
    (spread,) = found.solves
    assert len(spread.steps) == len(spread.residual) == 359
    assert sum(spread.steps) / 359 == pytest.approx(summary.test["forward_steps"])
    page = (folder / "report.html").read_text()
    assert f"prediction {found.mistakes[0].prediction}, " in page
    assert "of 359 test samples" in page
    assert "drawn by fixed_point" in page
    assert "The model itself takes" in page
    assert f"truth {test.y[0].item()}<" in page


def test_report_looks_at_few_samples_of_many_and_leaves_out_bad_ones(run, monkeypatch):
    opened, test = open_run(run[0]), load_data("digits", "test")
    trained = Trained(opened.model, opened.task, opened.classes, opened.transform, batch=7)
    monkeypatch.setattr(survey_module, "MAX_NUMBERS", 20 * 64)
    found = survey_samples(trained, test)
    assert (found.samples, found.total) == (20, 359)
    assert len(found.solves[0].steps) == 20
    gather = Dataset.gather

    def lose_the_first(self, indices, **options):
        return gather(self, [k for k in indices if k], **options)

    monkeypatch.setattr(Dataset, "gather", lose_the_first)
    assert survey_samples(trained, test).samples == 19


def test_report_says_when_and_on_which_data(run, tmp_path):
    copy = shutil.copytree(run[0], tmp_path / "copy")
    environment = json.loads((copy / "environment.json").read_text())
    environment["started"] = "2026-11-06T15:49:10+00:00"
    (copy / "environment.json").write_text(json.dumps(environment))
    assert '<p class="lead">6 November 2026, 15:49 UTC</p>' in report_run(copy).read_text()
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace('root = ""', 'root = "/data/mine"'))
    del environment["started"]
    (copy / "environment.json").write_text(json.dumps(environment))
    assert '<p class="lead">data in /data/mine</p>' in report_run(copy).read_text()


def test_report_calls_classes_by_their_names(tmp_path):
    folder = tmp_path / "run"
    train_run(
        load_config("digits", ["data.classes=[8, 3]", "train.epochs=1", "train.batch=64"]),
        folder,
        quiet=True,
    )
    heads = re.findall(
        r'<th scope="row">([^<]*)</th>',
        (folder / "report.html").read_text().partition("Confusion matrix")[2],
    )
    assert heads[:2] == ["8", "3"]


def test_held_out_samples_are_watched_and_the_test_is_scored_once(tmp_path):
    config = load_config(
        "digits", [*SMALL, "data.holdout=0.25", "train.epochs=3", "train.patience=1"]
    )
    summary = train_run(config, tmp_path / "run", quiet=True)
    lines = [
        line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "epoch"
    ]
    assert all(line["validation"]["samples"] == 32 and "test" not in line for line in lines)
    assert summary.validation["samples"] == 32
    assert summary.test["samples"] == 359
    assert evaluate_run(tmp_path / "run").to_dict() == summary.test


def test_parts_of_the_training_data_do_not_overlap():
    plain = load_data("digits", "train")
    plain = replace(plain, y=torch.arange(len(plain)))
    for subset, holdout in ((0, 0.1), (100, 0.25), (100, 0.0)):
        data = DataConfig("digits", subset=subset, holdout=holdout)
        samples = load_samples(data)
        count = subset or 1438
        held = round(count * holdout)
        assert len(samples.train) == count - held
        assert len(samples.watched) == (held or 359)
        pictures = {bytes(x.numpy().tobytes()) for x in samples.train.x}
        if held:
            assert not pictures & {bytes(x.numpy().tobytes()) for x in samples.watched.x}
    assert len(load_samples(DataConfig("digits", subset=1438)).train) == 1438


def test_equally_many_samples_of_each_class_are_always_the_same() -> None:
    config = DataConfig("digits", classes=(3, 7), samples_per_class=20)
    first, second = load_samples(config).train, load_samples(config).train
    assert torch.bincount(first.y).tolist() == [20, 20]
    assert torch.equal(first.x, second.x)
    fewer = load_samples(replace(config, samples_per_class=5)).train
    kept = {x.numpy().tobytes() for x in first.x}
    assert len(fewer) == 10
    assert {x.numpy().tobytes() for x in fewer.x} < kept
    assert not torch.equal(first.y, first.y.sort().values)  # shuffled
    assert len(load_part(config, "train", None)) == 40


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            DataConfig("digits", classes=(3, 7), samples_per_class=500),
            "data.samples_per_class must be at most 146, the training samples of class '3'; got "
            "500.",
        ),
        (
            DataConfig("diabetes", samples_per_class=5),
            "data.samples_per_class must be for data with one class for each sample, known before "
            "they are read; got 'diabetes', regression.",
        ),
        (
            DataConfig("digits", subset=5000),
            "data.subset must be at most 1438, the number of training samples; got 5000.",
        ),
        (
            DataConfig("digits", subset=3, holdout=0.1),
            "data.holdout must leave samples on both sides; got 0.1 of 3 samples.",
        ),
        (
            DataConfig("digits", classes=(3, 3)),
            "data.classes must be different classes; got [3, 3].",
        ),
        (
            DataConfig("digits", classes=(10,)),
            "data.classes must be numbers from 0 to 9, or names; got 10.",
        ),
    ],
    ids=range(6),
)
def test_parts_that_do_not_exist_are_refused(data, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load_samples(data)


def test_two_classes_are_enough_for_a_binary_regression(tmp_path):
    settings = [
        "data.classes=[3, 8]",
        "task.name=binary-regression",
        "train.epochs=3",
        "train.batch=32",
    ]
    summary = train_run(load_config("digits", settings), tmp_path / "run", quiet=True)
    assert summary.classes == ("3", "8")
    assert summary.test["accuracy"] > 0.9
    assert load_config(tmp_path / "run").model.options["num_classes"] == 1


def test_a_model_that_does_not_fit_the_data_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"The input of opteq-cifar10-162k must have shape \(batch, 3, height, width\)",
    ):
        train_run(
            load_config("digits", ["model.name=opteq-cifar10-162k"]), tmp_path / "run", quiet=True
        )
    with pytest.raises(ValueError, match="num_classes"):
        train_run(
            load_config("digits", ["model.options.num_classes=-3"]), tmp_path / "run", quiet=True
        )
    assert not (tmp_path / "run").exists()


def test_transforms_are_what_the_config_says():
    pictures = load_data("digits", "test")
    train, plain = make_transforms(
        DataConfig("digits", augment="pad-crop-flip", padding=2, flip=0.0, mean=(0.3,), std=(0.5,)),
        pictures,
    )
    assert [
        type(part) for part in train.transforms if isinstance(part, PadCropFlip | Normalize)
    ] == [PadCropFlip, Normalize]
    assert not any(isinstance(part, PadCropFlip) for part in plain.transforms)
    train, plain = make_transforms(
        DataConfig("digits", augment="random-resized-crop", size=(4, 4), noise=0.1), pictures
    )
    assert type(train.transforms[0]) is RandomResizedCrop
    assert type(plain.transforms[0]) is Resize
    assert isinstance(plain.transforms[-1], Degrade)
    x, y = plain(pictures.x[:2], pictures.y[:2], generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (2, 1, 4, 4)


def test_transforms_of_images_are_refused_for_tables(tmp_path):
    rows = np.random.default_rng(0).random((6, 64)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=rows, y=np.arange(6) % 2)
    np.savez(tmp_path / "test.npz", x=rows, y=np.arange(6) % 2)
    data = DataConfig("npz", root=str(tmp_path))
    samples = load_samples(data)
    assert make_transforms(data, samples.train) == (None, None)
    with pytest.raises(
        ValueError,
        match=r"data\.size must be left out, since it is for images and 'npz' holds none",
    ):
        make_transforms(replace(data, size=(8, 8)), samples.train)
    config = load_config(
        "digits", ["data.name=npz", f"data.root={tmp_path}", "train.batch=2", "train.epochs=1"]
    )
    assert resolve(config, samples.train).model.options["num_classes"] == 2
    assert train_run(config, tmp_path / "run", quiet=True).test["samples"] == 6


def test_parts_of_a_run_are_those_that_it_used(tmp_path):
    summary = train_run(
        load_config("digits", [*SMALL, "data.holdout=0.25"]), tmp_path / "run", quiet=True
    )
    held = evaluate_run(tmp_path / "run", split="val")
    assert held.to_dict() == summary.validation
    assert evaluate_run(tmp_path / "run", split="train").samples == 96


def test_one_class_is_nothing_to_learn(tmp_path):
    with pytest.raises(
        ValueError, match=r"data must have two classes to tell apart; got only '\S+' in 'digits'\.$"
    ):
        train_run(load_config("digits", ["data.classes=[4]"]), tmp_path / "run", quiet=True)


def test_run_that_fails_leaves_a_page_to_look_at(tmp_path):
    wild = [
        "optimizer.name=sgd",
        "optimizer.learning_rate=1e30",
        "schedule.name=constant",
        "data.subset=200",
        "train.batch=10",
    ]
    with (
        pytest.warns(ConvergenceWarning),
        pytest.raises(ConvergenceError, match="10 steps in a row were skipped, up to step 11"),
    ):
        train_run(load_config("digits", wild), tmp_path / "run", quiet=True)
    assert "opteq-digits on digits" in (tmp_path / "run" / "report.html").read_text()
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("kind", [ArithmeticError, KeyError, AttributeError])
def test_report_that_cannot_be_made_fails_no_run(tmp_path, monkeypatch, kind):
    def fail(_):
        raise kind("no picture")

    monkeypatch.setattr(run_module, "report_run", fail)
    with pytest.warns(
        ReportWarning,
        match=rf"the report could not be made \({kind.__name__}: .?no picture.?\); "
        "try again with: equipoise report",
    ):
        summary = train_run(load_config("digits", SMALL), tmp_path / "run", quiet=True)
    assert summary.stopped == "finished"
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/somewhere/equipoise/__main__.py", "equipoise train digits"),
        ("/somewhere/bin/equipoise", "equipoise train digits"),
        ("study.py", "study.py train digits"),
    ],
)
def test_environment_names_the_command_as_it_can_be_repeated(monkeypatch, program, expected):
    monkeypatch.setattr("sys.argv", [program, "train", "digits"])
    assert describe_environment(1)["command"] == expected


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (lambda x: {"other": x}["key"], r"it raised KeyError: 'key'\.$"),
        (lambda x: x.missing, r"it raised AttributeError: .*missing.*\.$"),
        (
            lambda x: {"logits": x},
            r"^The output of model 'own' must be a tensor of floats; got dict",
        ),
        (lambda x: x * 1j, r"^The output of model 'own' must be .*; got torch\.complex64\.$"),
    ],
    ids=["KeyError", "AttributeError", "dict", "complex"],
)
def test_model_that_fails_on_a_sample_is_told_in_one_sentence(output, sentence):
    class Own(Model):
        name = "own"

        def forward(self, x):
            return output(x)

    data = load_data("digits", "test")
    task = make_task("auto", data)
    with pytest.raises(ValueError, match=sentence) as caught:
        try_out(Own(), task, data, make_transforms(DataConfig("digits"), data)[1])
    assert "\n" not in str(caught.value)


def test_folder_with_the_end_of_a_line_in_its_name_is_told_in_one_line(tmp_path, capsys):
    folder = tmp_path / "a\nfinished\x1b[1m"
    assert main(["train", "digits", *SMALL, "--output", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr()
    assert f"report: {tmp_path}/a\\nfinished\\x1b[1m/report.html\n" in printed.out
    assert printed.out.endswith(f"\n{tmp_path}/a\\nfinished\\x1b[1m/report.html\n")
    assert "a\n" not in printed.err
    assert "a\\nfinished\\x1b[1m" in printed.err
