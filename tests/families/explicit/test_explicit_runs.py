"""Networks without an equilibrium train from the terminal, by their presets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from published import write_camvid

from equipoise.cli import main
from equipoise.runs import load_config


def test_fcn_preset_differs_from_its_rival_in_the_model_alone() -> None:
    own, rival = load_config("fcn-camvid"), load_config("camvid")
    assert own.model.name == "fcn-cityscapes"
    assert dataclasses.replace(own, model=rival.model) == rival


def test_fcn_preset_trains_on_street_scenes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val", "test"):
        write_camvid(tmp_path / "data", split)
    command = ["train", "fcn-camvid", "data.size=[16,24]", "train.epochs=1", "train.batch=2"]
    run = str(tmp_path / "run")
    assert main([*command, "--data-root", str(tmp_path / "data"), "--output", run]) == 0
    assert "mIoU" in capsys.readouterr().out
    image = str(tmp_path / "data" / "test" / "0.png")
    assert main(["predict", run, image, "--out", str(tmp_path / "answers")]) == 0


@pytest.mark.parametrize("stem", ["large", "small"])
def test_resnet_trains_on_grey_digits(tmp_path: Path, stem: str) -> None:
    command = ["train", "digits", "model.name=resnet-18", f'model.options={{stem="{stem}"}}']
    command += ["data.subset=16", "train.epochs=1", "train.batch=8", "train.evaluate_samples=8"]
    assert main([*command, "--quiet", "--output", str(tmp_path / "run")]) == 0
