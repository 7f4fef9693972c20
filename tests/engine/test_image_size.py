"""Small images first: which side each step has, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise import create_model
from equipoise.core import SettingError
from equipoise.data import Dataset
from equipoise.engine import TrainConfig, Trainer, make_task
from equipoise.engine.image_size import ImageSizes
from equipoise.engine.progress import SilentProgress


def trainer(folder: Path | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    x, y = torch.rand(60, 1, 8, 8), torch.arange(60) % 10
    data = Dataset("noise", "train", "classification", tuple("0123456789"), (1, 8, 8), x, y)
    return Trainer(
        create_model("opteq-digits"),
        make_task("auto", data),
        data,
        settings=TrainConfig(batch=10, **settings),
        folder=folder,
        progress=SilentProgress(),
    )


def test_image_sizes_divide_the_run_into_equal_parts() -> None:
    model = create_model("opteq-digits")
    x, y = torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    sizes = ImageSizes([4, 6, 8], model, x, y)
    assert [sizes(x, step, 7).shape[2] for step in range(7)] == [4, 4, 4, 6, 6, 8, 8]
    assert sizes(x, 6, 7) is x
    assert sizes.pixels == pytest.approx((16 + 36 + 64) / 3 / 64)
    flat = torch.full((1, 1, 8, 8), 3.0)
    torch.testing.assert_close(sizes(flat, 0, 7), torch.full((1, 1, 4, 4), 3.0))


def test_training_steps_see_images_of_their_size() -> None:
    run = trainer(epochs=2, image_sizes=(4, 8))
    seen: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training:
            seen.append(inputs[0].shape[2])

    run.model.register_forward_pre_hook(note)
    run.fit()
    assert seen == [4] * 6 + [8] * 6


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        ((4, 6), r"train.image_sizes must end with 8, the side of the images; got \[4, 6\]"),
        ((16, 8), r"train.image_sizes must be at most 8"),
        ((0, 8), r"train.image_sizes must be"),
        ((8, 2, 8), r"sizes must be sides that the network takes \(.* for an image of 2 x 2\.\)"),
    ],
)
def test_image_sizes_that_do_not_fit_are_refused(sides: tuple[int, ...], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        trainer(image_sizes=sides)


def test_image_sizes_are_refused_with_warm_starts_and_networks_of_one_size() -> None:
    with pytest.raises(SettingError, match=r"train.warm_start must be false with"):
        TrainConfig(image_sizes=(4, 8), warm_start=True)
    model = create_model("opteq-digits")
    model.size_multiple = None
    x, y = torch.rand(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    with pytest.raises(SettingError, match=r"which takes images of one size"):
        ImageSizes([4, 8], model, x, y)
    with pytest.raises(SettingError, match=r"where each pixel has a target"):
        ImageSizes([4, 8], create_model("opteq-digits"), x, torch.zeros(2, 8, 8))
