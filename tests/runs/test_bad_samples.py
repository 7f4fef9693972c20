"""Files that cannot be read: a run stops at them, or goes on without them, the same each time."""

import json
import multiprocessing
import os
import signal
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise.cli import main
from equipoise.core import Interrupted
from equipoise.data import (
    BadSampleError,
    BadSamples,
    BadSampleWarning,
    DataError,
    Dataset,
    batches,
    load_data,
    loader,
    read_bad_samples,
)
from equipoise.engine import Trainer, read_checkpoint
from equipoise.runs import load_config, resume_run, train_run
from equipoise.runs import run as run_module

SETTINGS = [
    "data.name=image-folder",
    "data.greyscale=true",
    "data.options.size=[8, 8]",
    "train.epochs=2",
    "train.batch=4",
    "train.checkpoint_steps=1",
    "train.evaluate_batch=2",
    "data.on_bad_sample=skip",
]


def write_images(folder, count=6):
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ape", "bee"):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 256, (12, 10, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{i}.jpg")


def damage(path):
    path.write_bytes(path.read_bytes()[:200])


@pytest.fixture
def images(tmp_path):
    """Data with two bad samples in training and a whole bad batch among those that are scored."""
    folder = tmp_path / "images"
    write_images(folder)
    bad = ["train/ape/0.jpg", "train/bee/5.jpg", "val/ape/0.jpg", "val/ape/1.jpg"]
    for name in bad:
        damage(folder / name)
    return folder, [str(folder / name) for name in bad]


def config(folder, *more):
    return load_config("digits", [*SETTINGS, f"data.root={folder}", *more])


def test_bad_sample_is_replaced_in_training_and_left_out_of_scores(images):
    folder, bad = images
    notes = BadSamples()
    train, val = (
        load_data("image-folder", split, folder, size=(8, 8)) for split in ("train", "val")
    )
    with pytest.raises(BadSampleError, match=r"0.jpg: "):
        train.gather([0])
    train, val = replace(train, bad=notes), replace(val, bad=notes)
    with pytest.warns(BadSampleWarning, match=r"jpg: .*; it is skipped"):
        first = [x for x, _ in batches(train, 5, seed=3)]
    assert [len(x) for x in first] == [5, 5, 2]
    assert all(
        (one == two).all()
        for one, two in zip(first, [x for x, _ in batches(train, 5, seed=3)], strict=True)
    )
    assert (train.gather([0], replace_bad=True)[0] == train.gather([1])[0]).all()
    assert (train.gather([11], replace_bad=True)[0] == train.gather([1])[0]).all()  # 0 is bad too
    with pytest.warns(BadSampleWarning):
        scored = [len(x) for x, _ in batches(val, 2, shuffle=False)]
    assert scored == [0, 2, 2, 2, 2, 2]
    assert sorted(notes.reasons) == sorted(bad)


def test_bad_sample_is_not_one_whose_disk_fails():
    def sample(_):
        raise DataError("a.png", "cannot be read") from OSError(5, "Input/output error")

    dataset = Dataset(
        "x", "train", "classification", ("a",), (1,), sample=sample, count=3, bad=BadSamples()
    )
    with pytest.raises(DataError, match=r"a.png"):
        dataset.gather([0])
    none = Dataset(
        "x",
        "train",
        "classification",
        ("a",),
        (1,),
        sample=lambda i: (_ for _ in ()).throw(DataError(f"{i}.png", "is not an image")),
        count=3,
        bad=BadSamples(),
    )
    with pytest.warns(BadSampleWarning), pytest.raises(DataError, match=r"1.png: is not an image"):
        none.gather([1], replace_bad=True)


def test_run_skips_bad_samples_and_lists_them(images, tmp_path):
    folder, bad = images
    with pytest.warns(BadSampleWarning):
        summary = train_run(config(folder), tmp_path / "run", quiet=True)
    assert summary.bad_samples == 4
    assert summary.test["samples"] == 10
    assert summary.steps == 6
    lines = [
        json.loads(line) for line in (tmp_path / "run/bad_samples.jsonl").read_text().splitlines()
    ]
    assert sorted(line["file"] for line in lines) == sorted(bad)
    page = (tmp_path / "run/report.html").read_text()
    assert "4 samples skipped" in page
    assert "ape/0.jpg" in page


def test_run_with_bad_samples_resumes_to_the_same_bits(images, tmp_path, monkeypatch):
    folder, bad = images
    with pytest.warns(BadSampleWarning):
        train_run(config(folder), tmp_path / "whole", quiet=True)
    count, step = 0, Dataset.gather

    def stop_later(self, *arguments, **options):
        nonlocal count
        count += 1
        if count == 9:  # in the second epoch, after the evaluation of the first
            raise KeyboardInterrupt
        return step(self, *arguments, **options)

    monkeypatch.setattr(Dataset, "gather", stop_later)
    with pytest.warns(BadSampleWarning), pytest.raises(KeyboardInterrupt):
        train_run(config(folder), tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    with (tmp_path / "parts/bad_samples.jsonl").open("a") as file:
        file.write('{"file": "cut o')  # as a kill leaves it
    with pytest.warns(BadSampleWarning):
        resume_run(tmp_path / "parts", quiet=True)
    one, other = (
        read_checkpoint(tmp_path / name / "model.safetensors")[0] for name in ("whole", "parts")
    )
    assert all((one[name] == other[name]).all() for name in one)
    assert sorted(read_bad_samples(tmp_path / "parts/bad_samples.jsonl")) == sorted(bad)


def test_train_stops_at_a_bad_sample_and_says_how_to_go_on(images, tmp_path, capsys):
    folder, _ = images
    words = [*SETTINGS[:-1], f"data.root={folder}", "--output", str(tmp_path / "run"), "--quiet"]
    assert main(["train", "digits", *words]) == 2
    assert "0.jpg: cannot be read (Truncated File Read). Train without" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for file in (*(folder / "val/ape").iterdir(), folder / "train/ape/0.jpg"):
        file.write_bytes((folder / "train/ape/1.jpg").read_bytes())
    assert main(["train", "digits", *words]) == 2
    line = capsys.readouterr().err
    assert "bee/5.jpg: cannot be read" in line
    assert line.endswith(f"equipoise resume {tmp_path / 'run'} data.on_bad_sample=skip\n")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["resume", str(tmp_path / "run"), "data.on_bad_sample=skip", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "1 sample skipped, because it could not be read" in out
    assert "equipoise: warning:" in err
    assert "bee/5.jpg: cannot be read (Truncated File Read); it is skipped" in err


def test_predict_reports_bad_files_and_goes_on(tmp_path, capsys, images):
    folder, _ = images
    with pytest.warns(BadSampleWarning):
        train_run(config(folder, "train.epochs=1"), tmp_path / "run", quiet=True)
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(folder / "val"), "none.png"]) == 2
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 11
    told = err.splitlines()
    assert [str(folder / "val/ape/0.jpg") in line for line in told[:2]] == [True, False]
    assert told[2] == "equipoise: error: none.png: is not there"
    assert told[3] == "equipoise: error: 3 files could not be read"


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")
def test_run_with_workers_is_the_same_and_resumes_after_a_signal(
    images, tmp_path, monkeypatch, capfd
):
    folder, _ = images
    monkeypatch.setattr(loader, "MIN_FORKED", 1)
    monkeypatch.setattr(loader, "_cores", lambda: 2)
    monkeypatch.setattr(run_module, "report_run", lambda _folder: None)
    step, seen = Trainer._step, []

    def stop(trainer, *batch):
        seen.append(len(multiprocessing.active_children()))
        if len(seen) == 2:  # to all processes, as from a terminal
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *batch)

    alone, run = tmp_path / "alone", tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BadSampleWarning)
        train_run(config(folder, "data.workers=0", "data.memory=0"), alone, quiet=True)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_step", stop)
            with pytest.raises(Interrupted, match="interrupted"):
                train_run(config(folder, "data.workers=2"), run, quiet=True)
        assert seen == [2, 2]
        assert not multiprocessing.active_children()
        resume_run(run, ["data.workers=1"], quiet=True)
    weights = [read_checkpoint(each / "model.safetensors")[0] for each in (alone, run)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    err = capfd.readouterr().err
    assert err == "equipoise: stopping ... (a second signal stops at once)\n"
