"""Multiscale DEQs train from the terminal, by their presets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equipoise.cli import main


def test_multiscale_preset_trains_resumes_bit_for_bit_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    command = ["train", "multiscale-digits", "data.subset=20", "data.holdout=0.2", "train.batch=8"]
    command += ["schedule.name=constant", "model.options.tolerance=0.1"]
    command += ["model.options.dropout=0.2", "--quiet", "--output"]  # whose masks are drawn anew
    assert main([*command, whole, "train.epochs=2"]) == 0
    assert main([*command, parts, "train.epochs=1"]) == 0
    assert main(["resume", parts, "train.epochs=2", "--quiet"]) == 0
    one, other = ((Path(folder) / "model.safetensors").read_bytes() for folder in (whole, parts))
    assert one == other
    image = tmp_path / "digit.png"
    Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(image)
    capsys.readouterr()
    assert main(["predict", whole, str(image)]) == 0
    assert "digit.png" in capsys.readouterr().out
    assert main(["certify", whole]) == 0
    assert "nothing is proved" in capsys.readouterr().out
    assert main(["report", whole]) == 0


def test_multiscale_segmentation_preset_trains_on_street_scenes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for name in (part, f"{part}annot"):
            (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(2):
            pixels = random.integers(0, 255, (32, 48, 3), dtype=np.uint8)
            labels = random.integers(0, 12, (32, 48), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / part / f"{number}.png")
            Image.fromarray(labels).save(tmp_path / "data" / f"{part}annot" / f"{number}.png")
    command = ["train", "multiscale-camvid", "train.epochs=1", "train.batch=2"]
    command += ["--data-root", str(tmp_path / "data"), "--output"]
    odd = [*command, str(tmp_path / "odd"), "data.size=[30,48]"]
    assert main(odd) != 0
    assert (
        "model.options.input_shape must have sides that are multiples of 16, for 3 resolutions; "
        "got (3, 30, 48). Set data.size."
    ) in " ".join(capsys.readouterr().err.split())
    run = str(tmp_path / "run")
    assert main([*command, run, "data.size=[32,48]"]) == 0
    assert "mIoU" in capsys.readouterr().out
    image = str(tmp_path / "data" / "test" / "0.png")
    assert main(["predict", run, image, "--out", str(tmp_path / "answers")]) == 0
