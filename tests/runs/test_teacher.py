"""Runs that learn from another run."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise.cli import main
from equipoise.runs import evaluate_run

QUICK = ("train.epochs=2", "data.subset=200", "train.threads=1", "--quiet")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "teacher"
    assert main(["train", "digits", "--output", str(folder), *QUICK, "train.seed=1"]) == 0
    return folder


def teach(teacher: Path | str, folder: Path, *words: str, source: str = "digits") -> int:
    table = f'task.teacher={{ run = "{teacher}", weight = 2 }}'
    return main(["train", source, "--output", str(folder), *QUICK, table, *words])


def test_run_with_a_teacher_needs_it_for_training_alone(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(teacher.parent)
    assert teach("teacher", tmp_path / "taught") == 0
    monkeypatch.chdir(tmp_path)
    config = (tmp_path / "taught" / "config.toml").read_text()
    assert str(teacher) in config  # as it must be to be resumed from another folder
    lines = (tmp_path / "taught" / "metrics.jsonl").read_text().splitlines()
    steps = [each for each in map(json.loads, lines) if each["kind"] == "step"]
    assert all(each["distillation_loss"] > 0 for each in steps)

    hidden = teacher.with_name("hidden")
    teacher.rename(hidden)
    try:
        assert evaluate_run(tmp_path / "taught").samples == 359
    finally:
        hidden.rename(teacher)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("data.mean=[0.5]", "data.std=[0.5]"),
            "saw them with data.mean = (), where it is (0.5,) here",
        ),
        (("data.size=[16,16]",), "saw samples of shape (1, 8, 8), where they have (1, 16, 16)"),
        (("data.classes=[0,1,2]",), "classes of these data, in their order"),
        (("data.classes=[1,0,2,3,4,5,6,7,8,9]",), "classes of these data, in their order"),
    ],
)
def test_teacher_of_other_samples_is_refused(
    teacher: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    sentence: str,
) -> None:
    assert teach(teacher, tmp_path / "taught", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "taught").exists()


def test_table_scaled_otherwise_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("train.epochs=1", "train.threads=1", "--quiet")
    words = ["train", "mlp-breast-cancer", *quick, "data.holdout=0.2", "data.subset=300"]
    assert main([*words, "--output", str(tmp_path / "teacher")]) == 0
    table = f'task.teacher={{ run = "{tmp_path / "teacher"}" }}'
    assert main([*words, "--output", str(tmp_path / "same"), table]) == 0
    other = [*words, "--output", str(tmp_path / "other"), table, "data.subset=200"]
    assert main(other) == 2
    assert "from the same training rows" in " ".join(capsys.readouterr().err.split())


def write_pictures(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for split, number in itertools.product(("train", "val"), range(12)):
        place = folder / split / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")


def write_arrays(folder: Path, scale: float) -> None:
    draw = np.random.default_rng(0)
    folder.mkdir()
    for split in ("train", "test"):
        x = scale * draw.random((12, 3, 8, 8), dtype=np.float32)
        np.savez(folder / f"{split}.npz", x=x, y=np.arange(12) % 2)


SMALL = (
    "model.name=resnet-18",
    'model.options={ stem = "small", width = 4 }',
    "data.augment=none",
    "train.epochs=1",
    "train.threads=1",
)


def train_small(folder: Path, *words: str, quiet: bool = True) -> int:
    cleared = [f"{name}=[]" for name in ("data.mean", "data.std", "train.image_sizes")]
    return main(
        [
            "train",
            "cifar10",
            "--output",
            str(folder),
            *SMALL,
            *cleared,
            *words,
            *["--quiet"] * quiet,
        ]
    )


def test_teacher_whose_images_were_read_at_another_size_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "data")
    words = ("data.name=image-folder", f"data.root={tmp_path / 'data'}")
    assert train_small(tmp_path / "teacher", *words, "data.options.size=[8,8]") == 0
    taught = f"task.teacher.run={tmp_path / 'teacher'}"
    assert train_small(tmp_path / "taught", *words, taught, "data.options.size=[16,16]") == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "saw samples of shape (3, 8, 8), where they have (3, 16, 16) here" in printed
    assert train_small(tmp_path / "taught", *words, taught, "data.options.size=[8,8]") == 0


@pytest.mark.parametrize(("theirs", "own"), [(255.0, 1.0), (1.0, 255.0)])
def test_teacher_of_images_of_another_scale_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: float, own: float
) -> None:
    for name, scale in (("theirs", theirs), ("own", own)):
        write_arrays(tmp_path / name, scale)
    taught = f"task.teacher.run={tmp_path / 'teacher'}"
    source, other = (
        ("data.name=npz", f"data.root={tmp_path / name}") for name in ("theirs", "own")
    )
    assert train_small(tmp_path / "teacher", *source) == 0
    assert train_small(tmp_path / "taught", *other, taught) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "saw images of another scale: here its numbers reach" in printed
    assert train_small(tmp_path / "taught", *source, taught) == 0


def test_teacher_of_other_labels_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        x, y = draw.random((40, 3)), np.arange(40) % 2
        np.savez(tmp_path / "data" / f"{split}.npz", x=x, y=y, other=1 - y)
    words = ["train", "mlp-breast-cancer", "data.name=npz", f"data.root={tmp_path / 'data'}"]
    words += ["train.epochs=1", "train.threads=1", "--quiet", "--output"]
    taught = f"task.teacher.run={tmp_path / 'teacher'}"
    assert main([*words, str(tmp_path / "teacher"), "data.options.labels=y"]) == 0
    assert main([*words, str(tmp_path / "taught"), "data.options.labels=other", taught]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert (
        "saw them with data.options = {'labels': 'y'}, where it is {'labels': 'other'}" in printed
    )
    assert main([*words, str(tmp_path / "taught"), "data.options.labels=y", taught]) == 0
    assert "weight = 4.0" in (tmp_path / "taught" / "config.toml").read_text()


@pytest.mark.filterwarnings("ignore::equipoise.data.bad_sample.BadSampleWarning")
def test_teacher_of_dim_or_unreadable_first_images_is_taken(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    (tmp_path / "dim").mkdir()
    for split in ("train", "test"):
        x = draw.random((12, 3, 8, 8), dtype=np.float32)
        x[:4] *= 0.01
        np.savez(tmp_path / "dim" / f"{split}.npz", x=x, y=np.arange(12) % 2)
    write_pictures(tmp_path / "files")
    for number in (0, 10, 2, 4):  # the first ones, more than are tried out
        (tmp_path / "files" / "train" / "a" / f"{number}.png").write_bytes(b"no image")
    kinds = {
        "dim": ("data.name=npz",),
        "files": ("data.name=image-folder", "data.on_bad_sample=skip"),
    }
    for kind, words in kinds.items():
        source = (*words, f"data.root={tmp_path / kind}")
        teacher = tmp_path / f"{kind}-teacher"
        assert train_small(teacher, *source) == 0
        taught = f"task.teacher.run={teacher}"
        assert train_small(tmp_path / f"{kind}-taught", *source, taught) == 0


def test_what_is_doubtful_of_a_teacher_is_told(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits", "--output", str(tmp_path / "taught"), "train.epochs=1"]
    words += ["train.threads=1", "data.subset=200", f"task.teacher.run={teacher}"]
    summary = teacher / "summary.json"
    kept = summary.read_bytes()
    summary.unlink()
    try:
        assert main([*words, "data.holdout=0.1"]) == 0
    finally:
        summary.write_bytes(kept)
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "learning from the model of" in printed
    assert (
        "which has not finished and may have learnt from samples that are held out here" in printed
    )


def tell_of_samples(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Train a little, and return whether something may know the samples that are held out."""
    capsys.readouterr()
    assert main(["train", "digits", *words, "data.subset=200", "train.epochs=1"]) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    return "may have learnt from samples that are held out here" in printed


def test_what_weights_learnt_from_is_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {name: tmp_path / name for name in ("all", "alone", "taught", "begun", "last")}
    held = ["data.holdout=0.2", "train.threads=1", "--output"]
    taught = "task.teacher.run={}".format
    assert not tell_of_samples(["--output", str(runs["all"])], capsys)
    assert not tell_of_samples([*held, str(runs["alone"])], capsys)
    assert tell_of_samples([*held, str(runs["taught"]), taught(runs["all"])], capsys)
    assert tell_of_samples([*held, str(runs["begun"]), f"model.weights={runs['all']}"], capsys)
    for name, tells in {"alone": False, "taught": True, "begun": True}.items():
        student = tmp_path / f"of-{name}"
        assert tell_of_samples([*held, str(student), taught(runs[name])], capsys) is tells
    again = [*held, str(tmp_path / "again"), f"model.weights={runs['alone']}"]
    assert not tell_of_samples(again, capsys)
    other = [*held, str(runs["last"]), taught(runs["alone"]), "data.holdout=0.25"]
    assert tell_of_samples(other, capsys)


def test_files_that_were_added_since_the_teacher_learnt_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pictures(tmp_path / "data")
    words = ("data.name=image-folder", f"data.root={tmp_path / 'data'}", "data.holdout=0.25")
    assert train_small(tmp_path / "teacher", *words) == 0
    taught = f"task.teacher.run={tmp_path / 'teacher'}"
    assert train_small(tmp_path / "same", *words, taught, quiet=False) == 0
    assert "may have learnt" not in " ".join("".join(capsys.readouterr()).split())
    picture = tmp_path / "data" / "train" / "a" / "0.png"
    picture.with_name("00.png").write_bytes(picture.read_bytes())
    assert train_small(tmp_path / "other", *words, taught, quiet=False) == 0
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "may have learnt from samples that are held out" in printed


def test_run_is_resumed_only_with_a_teacher_that_computes_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, folder = tmp_path / "teacher", tmp_path / "taught"
    assert main(["train", "digits", "--output", str(teacher), *QUICK]) == 0
    assert teach(teacher, folder, "schedule.name=constant") == 0
    config = teacher / "config.toml"
    text = config.read_text()
    changed = re.sub(r"(?m)^options = \{", "options = { alpha = 0.3,", text, count=1)
    assert changed != text
    config.write_text(changed)
    assert main(["resume", str(folder), "train.epochs=3"]) == 2
    assert "settings of the teacher have changed since" in " ".join(capsys.readouterr().err.split())
    config.write_text(text)
    assert main(["resume", str(folder), "train.epochs=3"]) == 0


def test_missing_teacher_and_task_without_classes_get_one_sentence(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert teach(tmp_path / "none", tmp_path / "taught") == 2
    assert "task.teacher.run must be the folder of a run" in " ".join(
        capsys.readouterr().err.split()
    )
    assert teach(teacher, tmp_path / "taught", source="denoise-digits") == 2
    assert "left out for the task 'restoration'" in " ".join(capsys.readouterr().err.split())
