"""Mixtures of images and random operations, by their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats
from torch import Tensor
from torch.nn import functional

from equipoise.core import SettingError
from equipoise.data import CutMix, Mixup, RandAugment
from equipoise.data import rand_augment as operations
from equipoise.engine.tasks import Classification
from equipoise.runs import load_config, train_run

CLASSES = 64


def constant_images(side: int = 8) -> tuple[Tensor, Tensor]:
    """Images full of their own number, each of a class of its own."""
    y = torch.arange(CLASSES)
    return y.float().reshape(-1, 1, 1, 1).expand(-1, 2, side, side + 2).clone(), y


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", [Mixup, CutMix])
def test_mixture_has_the_classes_that_are_in_the_image_by_their_weights(kind):
    x, y = constant_images()
    mixed, target = kind(CLASSES)(x, y, generator=draw())
    # The mean of an image is that of the numbers of its classes, by the weights of the target.
    assert torch.allclose(target.sum(1), torch.ones(CLASSES))
    assert torch.allclose(mixed.mean((1, 2, 3)), target @ torch.arange(CLASSES).float(), atol=1e-4)
    assert int((target > 0).sum(1).max()) == 2
    again = kind(CLASSES)(x, y, generator=draw())
    assert torch.equal(mixed, again[0])
    assert torch.equal(target, again[1])
    assert not torch.equal(mixed, kind(CLASSES)(x, y, generator=draw(1))[0])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixup_weights_follow_the_beta_distribution(alpha):
    x, y = torch.zeros(4000, 1, 1, 1), torch.arange(4000)
    target = Mixup(4000, alpha)(x, y, generator=draw())[1]
    weights = target.diagonal().double().numpy()
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_cutmix_box_is_a_rectangle_of_the_drawn_area_unless_it_is_clipped():
    x, other = torch.zeros(500, 1, 20, 30), torch.ones(500, 1, 20, 30)
    weight = torch.linspace(0, 1, 500, dtype=torch.float64)
    mixed, kept = CutMix(2).mix(x, other, weight, draw())
    box = mixed[:, 0].bool()
    assert torch.equal(kept, 1 - box.double().mean((1, 2)))
    height, width = box.any(2).sum(1), box.any(1).sum(1)
    assert torch.equal(height * width, box.sum((1, 2)))  # it is full
    sides = [(side * (1 - weight).sqrt()).long() for side in (20, 30)]
    assert (height <= sides[0]).all()
    assert (width <= sides[1]).all()
    edges = box[:, 0].any(1) | box[:, -1].any(1) | box[:, :, 0].any(1) | box[:, :, -1].any(1)
    whole = ~edges & (height > 0)
    assert int(whole.sum()) > 50
    assert torch.equal(height[whole], sides[0][whole])
    assert torch.equal(width[whole], sides[1][whole])


def test_classification_learns_from_mixed_targets():
    task = Classification(3, label_smoothing=0.1)
    torch.manual_seed(0)
    output, one, two = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1] * 5)
    target = 0.7 * functional.one_hot(one, 3) + 0.3 * functional.one_hot(two, 3)
    task.check(output, target)
    expected = 0.7 * task.loss(output, one) + 0.3 * task.loss(output, two)
    assert torch.allclose(task.loss(output, target), expected)
    assert task.weight(target) == 5
    score, plain = task.score(), task.score()
    score.update(output, target)
    plain.update(output, one)  # the larger weight
    assert score.compute() == plain.compute()
    for wrong in (2 * target, target[:, :2], -target):
        with pytest.raises(SettingError, match="weights that add up to 1"):
            task.check(output, wrong)


def test_mixtures_and_operations_refuse_what_they_cannot_do():
    x, y = constant_images()
    for target in (y.float(), torch.zeros(CLASSES, 8, 10, dtype=torch.int64)):
        with pytest.raises(SettingError, match=r"Mixup\.y must be one class for each image"):
            Mixup(CLASSES)(x, target, generator=draw())
    with pytest.raises(SettingError, match=r"CutMix\.y must be classes from 0 to 9; got 0 to 63"):
        CutMix(10)(x, y, generator=draw())
    with pytest.raises(SettingError, match=r"Mixup\.generator must be"):
        Mixup(CLASSES)(x, y)
    with pytest.raises(SettingError, match=r"RandAugment\.x must hold floats"):
        RandAugment()(x.byte(), y, generator=draw())
    with pytest.raises(SettingError, match=r"RandAugment\.strength"):
        RandAugment(strength=1.5)


def colours() -> tuple[Tensor, Image.Image]:
    pixels = np.random.default_rng(0).integers(20, 230, (9, 12, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255, Image.fromarray(pixels)


@pytest.mark.parametrize("signed", [-0.5, 0.5])
def test_operations_on_colours_agree_with_pillow(signed):
    x, image = colours()
    factor = 1 + 0.9 * signed
    expected = {
        "brightness": ImageEnhance.Brightness(image).enhance(factor),
        "contrast": ImageEnhance.Contrast(image).enhance(factor),
        "saturation": ImageEnhance.Color(image).enhance(factor),
        "solarize": ImageOps.solarize(image, 128),
        "autocontrast": ImageOps.autocontrast(image),
    }
    for name, wanted in expected.items():
        found = operations.COLOURS[name](x, torch.full((1, 1, 1, 1), signed)).clamp(0, 1)
        difference = 255 * found[0].permute(1, 2, 0).numpy() - np.asarray(wanted, dtype=float)
        assert abs(difference).max() < 2.1, name
    levels = operations.COLOURS["posterize"](x, torch.ones(1, 1, 1, 1)).unique()
    assert len(levels) <= 16


def test_rotation_turns_pixels_by_the_angle_of_pillow_and_masks_along():
    pixels = np.zeros((41, 61), dtype=np.uint8)
    pixels[8:33, 25:36] = 255
    x = torch.from_numpy(pixels)[None, None] / 255
    signed = torch.tensor([0.5])
    grid = operations._grid(operations.MOVES["rotate"](signed), x)
    found = operations._sample(x, grid, "nearest")[0, 0] > 0.5
    turned = np.asarray(Image.fromarray(pixels).rotate(15)) > 128
    back = np.asarray(Image.fromarray(pixels).rotate(-15)) > 128
    agree = max((found.numpy() == each).mean() for each in (turned, back))
    assert agree > 0.995
    assert math.isclose(operations.MAX_ANGLE * 0.5, math.radians(15))
    y = (x[:, 0] > 0.5).long()
    many = RandAugment(3, 1.0, ignore=7)
    moved, mask = many(x.expand(200, -1, -1, -1), y.expand(200, -1, -1), generator=draw())
    assert mask.dtype == torch.int64
    assert set(mask.unique().tolist()) == {0, 1, 7}
    assert ((mask != y).flatten(1).any(1)).float().mean() > 0.4
    assert moved.min() >= 0
    assert moved.max() <= 1


def test_run_with_augmentations_trains_and_refuses_other_tasks(tmp_path, monkeypatch):
    monkeypatch.setattr("equipoise.runs.run.report_run", lambda _folder: None)
    asked = ["data.rand_augment=2", "data.subset=40", "train.epochs=1", "train.evaluate_samples=8"]
    for mix in ("mixup", "cutmix"):
        config = load_config("digits", [*asked, f"data.mix={mix}"])
        summary = train_run(config, tmp_path / mix, quiet=True)
        assert 0 <= summary.train["accuracy"] <= 1
    config = load_config("digits", [*asked, "data.mix=mixup", "task.name=restoration"])
    with pytest.raises(SettingError, match=r"data\.mix must be 'none' for the task 'restoration'"):
        train_run(config, tmp_path / "other", quiet=True)
