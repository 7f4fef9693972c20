"""Images to predict for, on the scale of the training images or on another one."""

import numpy as np
import pytest
from PIL import Image

from equipoise.cli import main

SETTINGS = ["data.name=npz", "train.epochs=1", "train.batch=8"]


def train(folder, pixels):
    for split in ("train", "test"):
        np.savez(folder / f"{split}.npz", x=pixels, y=np.arange(len(pixels)) % 10)
    words = [*SETTINGS, f"data.root={folder}", "--output", str(folder / "run"), "--quiet"]
    assert main(["train", "digits", *words]) == 0


@pytest.mark.filterwarnings("default::equipoise.data.image_depth.ImageWarning")
@pytest.mark.parametrize(
    ("scale", "told"),
    [
        ("bytes", {"large.npy": "its numbers reach 255"}),
        ("0 to 1", {"large.npy": "its numbers reach 255"}),
        (
            "0 to 255",
            {"a.png": "its bytes become numbers from 0 to 1", "small.npy": "its numbers reach 1,"},
        ),
        ("-1 to 1", {"a.png": "its bytes become", "large.npy": "its numbers reach 255"}),
    ],
)
def test_images_on_another_scale_than_those_of_training_are_told(tmp_path, capsys, scale, told):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 1, 8, 8), dtype=np.uint8)
    pixels[:, 0, 0, :2] = 0, 255
    floats = pixels.astype(np.float32)
    scaled = {"0 to 1": floats / 255, "0 to 255": floats, "-1 to 1": floats / 127.5 - 1}
    train(tmp_path, scaled.get(scale, pixels))
    Image.fromarray(pixels[0, 0]).save(tmp_path / "a.png")
    np.save(tmp_path / "small.npy", floats[0] / 255)
    np.save(tmp_path / "large.npy", floats[0])
    for name in ("a.png", "small.npy", "large.npy"):
        capsys.readouterr()
        assert main(["predict", str(tmp_path / "run"), str(tmp_path / name)]) == 0
        where = "[0]" if name.endswith("npy") else ""
        answer = capsys.readouterr().err
        if name in told:
            assert f"{name}{where}: {told[name]}" in answer
            assert "but the model was trained on images of numbers from" in answer
        else:
            assert answer == ""
