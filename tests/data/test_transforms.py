from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equipoise.data import (
    Compose,
    Degrade,
    Greyscale,
    Normalize,
    PadCropFlip,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transform,
)
from equipoise.operators import Mask

ALL = [
    ToFloat(),
    Greyscale(3),
    Resize((5, 9)),
    PadCropFlip(2),
    RandomResizedCrop((6, 5)),
    Compose(PadCropFlip(1), Resize((4, 4)), ToFloat(), Normalize((0.5, 0.4, 0.3), 0.2)),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 7, height: int = 8, width: int = 10) -> tuple[Tensor, Tensor]:
    """Images whose third channel tells the class of the mask, and the masks."""
    x = torch.randint(0, 256, (count, 3, height, width), generator=seeded(1)).to(torch.uint8)
    mask = torch.randint(0, 5, (count, height, width), generator=seeded(2))
    return x, mask


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_transform_repeats_with_the_generator_and_with_nothing_else(transform: Transform) -> None:
    x, y = images()
    kept = x.clone()
    first = transform(x, y, generator=seeded(3))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    second = transform(x, y, generator=seeded(3))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_transform_leaves_labels_alone_and_masks_keep_their_classes(transform: Transform) -> None:
    x, mask = images()
    labels = torch.arange(7)
    out, same = transform(x, labels, generator=seeded())
    assert torch.equal(same, labels)
    moved, masks = transform(x, mask, generator=seeded())
    assert torch.equal(moved, out)
    assert masks.shape == (7, *moved.shape[2:])
    assert set(masks.flatten().tolist()) <= {0, 1, 2, 3, 4, 255}


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_transform_takes_floats_as_it_takes_bytes(transform: Transform) -> None:
    x, y = images()
    first, _ = Compose(transform, ToFloat())(x, y, generator=seeded())
    second, _ = transform(x / 255, y, generator=seeded())
    assert torch.allclose(first.float(), second, atol=0.6 / 255 / 0.2)


@pytest.mark.parametrize(
    "transform",
    [PadCropFlip(), RandomResizedCrop((4, 4)), Compose(ToFloat(), PadCropFlip())],
    ids=repr,
)
def test_random_transform_needs_a_generator(transform: Transform) -> None:
    with pytest.raises(
        ValueError,
        match=r"generator must be a torch.Generator, so that the run can be repeated; got None",
    ):
        transform(*images())


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_transform_refuses_wrong_shapes(transform: Transform) -> None:
    x, y = images()
    with pytest.raises(ValueError, match="must have shape"):
        transform(x[0], y, generator=seeded())
    with pytest.raises(ValueError, match="target or a mask for each image"):
        transform(x, y[:, :-1], generator=seeded())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Normalize(0, 0), "Normalize.std must be a positive number"),
        (lambda: Normalize(math.nan, 1), "Normalize.mean must be in"),
        (lambda: Resize(4), "Resize.size must be a pair"),  # type: ignore[arg-type]
        (lambda: Resize((0, 4)), "Resize.size must be a whole number"),
        (lambda: PadCropFlip(-1), "PadCropFlip.padding must be"),
        (lambda: PadCropFlip(flip=2), "PadCropFlip.flip must be in"),
        (lambda: RandomResizedCrop((4, 4), scale=(0.5, 0.1)), "RandomResizedCrop.scale must rise"),
        (lambda: RandomResizedCrop((4, 4), scale=(0.5, 1.5)), "RandomResizedCrop.scale must be in"),
        (
            lambda: RandomResizedCrop((4, 4), ratio=(0, 1)),
            "RandomResizedCrop.ratio must be a positive",
        ),
        (lambda: Greyscale(0), "Greyscale.channels must be"),
        (lambda: Degrade(-1), "Degrade.sigma must be zero or a positive number"),
        (lambda: Degrade(math.inf), "Degrade.sigma must be zero or a positive number"),
        (lambda: Compose(torch.relu), "Compose.transforms must be transforms"),  # type: ignore[arg-type]
    ],
)
def test_transform_refuses_wrong_settings(make: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()  # type: ignore[operator]


def test_normalize_makes_mean_zero_and_deviation_one() -> None:
    x = images(50)[0] / 255
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    out, _ = Normalize(tuple(mean.tolist()), tuple(std.tolist()))(x, torch.zeros(50))
    assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(3), atol=1e-6)
    assert torch.allclose(out.std((0, 2, 3)), torch.ones(3), atol=1e-6)
    with pytest.raises(
        ValueError, match=r"must hold floats; got torch.uint8. Apply ToFloat\(\) first"
    ):
        Normalize(0.5, 1)(*images())
    with pytest.raises(ValueError, match="one number for each of 3 channels; got 2"):
        Normalize((0.5, 0.4), 1)(x, torch.zeros(50))


def test_greyscale_agrees_with_pillow() -> None:
    from PIL import Image

    x, y = images(1, 64, 64)
    expected = np.asarray(Image.fromarray(x[0].permute(1, 2, 0).numpy()).convert("L"))
    found, _ = Greyscale()(x, y)
    assert np.abs(found[0, 0].numpy().astype(int) - expected.astype(int)).max() <= 1


def test_greyscale_takes_images_that_are_grey_already() -> None:
    grey, y = Greyscale()(*images())
    again, _ = Greyscale(3)(grey, y)
    assert torch.equal(again, grey.expand(-1, 3, -1, -1))
    with pytest.raises(ValueError, match=r"Greyscale.x must have 3 channels, or 1; got 2"):
        Greyscale()(grey.expand(-1, 2, -1, -1), y)


@pytest.mark.parametrize("size", [(4, 5), (16, 20), (5, 30), (8, 10)])
def test_resize_agrees_with_pillow(size: tuple[int, int]) -> None:
    from PIL import Image

    x, mask = images(1)
    found, masks = Resize(size)(x, mask)
    image = Image.fromarray(x[0].permute(1, 2, 0).numpy()).resize(
        size[::-1], Image.Resampling.BILINEAR
    )
    assert (
        np.abs(found[0].permute(1, 2, 0).numpy().astype(int) - np.asarray(image).astype(int)).max()
        <= 1
    )
    nearest = Image.fromarray(mask[0].numpy().astype(np.uint8)).resize(
        size[::-1], Image.Resampling.NEAREST
    )
    np.testing.assert_array_equal(masks[0].numpy(), np.asarray(nearest))


def test_pad_crop_flip_gives_one_of_the_crops_that_slicing_gives_each_as_often() -> None:
    padding, count = 1, 3600
    x = torch.arange(12.0).reshape(1, 1, 3, 4).expand(count, 2, 3, 4) + 1
    mask = torch.arange(12).reshape(1, 3, 4).expand(count, 3, 4) + 1
    out, masks = PadCropFlip(padding, ignore=0)(x, mask, generator=seeded())
    assert torch.equal(out[:, 0], masks.float())
    assert torch.equal(out[:, 0], out[:, 1])
    padded = functional.pad(x[:1], (padding,) * 4)[0, 0]
    crops = [padded[i : i + 3, j : j + 4] for i in range(3) for j in range(3)]
    options = torch.stack(crops + [crop.flip(1) for crop in crops])
    hits = (out[:, :1] == options).flatten(2).all(2)
    assert (hits.sum(1) == 1).all()
    expected = count / len(options)
    assert (
        float(((hits.sum(0) - expected) ** 2 / expected).sum()) < 40.8
    )  # chi-square with 17 degrees, one in a thousand


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_pad_crop_flip_mirrors_as_often_as_asked(flip: float) -> None:
    x = torch.arange(4.0).reshape(1, 1, 1, 4).expand(4000, 1, 1, 4)
    out, _ = PadCropFlip(0, flip=flip)(x, torch.zeros(4000), generator=seeded())
    fraction = float((out[:, 0, 0, 0] == 3).float().mean())
    assert abs(fraction - flip) <= 4 * math.sqrt(flip * (1 - flip) / 4000)


@pytest.mark.parametrize("size", [(5, 6), (20, 24), (3, 30)])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_random_resized_crop_agrees_with_interpolation_of_each_crop(
    size: tuple[int, int], flip: float
) -> None:
    x, mask = images(20, 16, 18)
    values = x.double()
    transform = RandomResizedCrop(size, flip=flip)
    found, masks = transform(values, mask, generator=seeded(5))
    boxes = transform.boxes(20, 16, 18, seeded(5)).tolist()
    for i, (top, left, height, width) in enumerate(boxes):
        crop = values[i : i + 1, :, top : top + height, left : left + width]
        expected = functional.interpolate(crop, size, mode="bilinear", antialias=True)[0]
        classes = mask[i, top : top + height, left : left + width][None, None].float()
        nearest = functional.interpolate(classes, size, mode="nearest-exact")[0, 0].long()
        if flip:
            expected, nearest = expected.flip(2), nearest.flip(1)
        assert torch.allclose(found[i], expected, atol=1e-4)  # weights are in float32
        assert torch.equal(masks[i], nearest)


def box_one_by_one(
    random: np.random.Generator,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> list[int]:
    """Draw a box as the papers' code does, for one image."""
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        shape = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return [
                int(random.integers(0, height - h + 1)),
                int(random.integers(0, width - w + 1)),
                h,
                w,
            ]
    if width / height < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        w, h = round(height * ratio[1]), height
    else:
        w, h = width, height
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(
    ("height", "width", "scale"),
    [(32, 32, (0.08, 1.0)), (20, 48, (0.3, 1.0)), (40, 10, (0.9, 1.0)), (8, 90, (0.9, 1.0))],
)
def test_random_resized_crop_draws_boxes_as_one_by_one(
    height: int, width: int, scale: tuple[float, float]
) -> None:
    from scipy.stats import ks_2samp

    random, ratio, count = np.random.default_rng(0), (3 / 4, 4 / 3), 4000
    expected = np.array([box_one_by_one(random, height, width, scale, ratio) for _ in range(count)])
    found = (
        RandomResizedCrop((4, 4), scale=scale, ratio=ratio)
        .boxes(count, height, width, seeded())
        .numpy()
    )
    assert (found >= [0, 0, 1, 1]).all()
    assert (found[:, :2] + found[:, 2:] <= [height, width]).all()
    for i in range(4):
        assert ks_2samp(found[:, i], expected[:, i]).pvalue > 1e-3


def test_degrade_adds_a_normal_sample_and_keeps_the_clean_images_as_targets() -> None:
    from scipy.stats import kstest

    x, labels = images(40)[0] / 255, torch.arange(40)
    state = torch.get_rng_state()
    noisy, clean = Degrade(0.3)(x, labels, generator=seeded())
    again, _ = Degrade(0.3)(x, labels, generator=seeded())
    assert torch.equal(noisy, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(clean, x)
    assert kstest(((noisy - clean) / 0.3).flatten().numpy(), "norm").pvalue > 1e-3
    assert not torch.equal(Degrade(0.3)(x, labels, generator=seeded(1))[0], noisy)
    assert torch.equal(Degrade(0)(x, labels, generator=seeded())[0], x)
    assert Degrade(0.3)(x.double(), labels, generator=seeded())[0].dtype == torch.float64


def test_degrade_refuses_bytes_no_generator_and_to_come_before_what_moves_pixels() -> None:
    x, mask = images()
    with pytest.raises(ValueError, match=r"Degrade.x must hold floats; got torch.uint8"):
        Degrade(0.1)(x, mask, generator=seeded())
    with pytest.raises(ValueError, match=r"Degrade.generator must be a torch.Generator"):
        Degrade(0.1)(x / 255, mask)
    noisy, clean = Compose(PadCropFlip(), ToFloat(), Degrade(0.0), Normalize(0.5, 2.0))(
        x, mask, generator=seeded()
    )
    assert torch.allclose(2 * noisy + 0.5, clean)
    for moving in (PadCropFlip(), Resize((4, 4)), RandomResizedCrop((4, 4))):
        with pytest.raises(
            ValueError, match=f"{type(moving).__name__}.y must not be images.*Degrade after it"
        ):
            Compose(ToFloat(), Degrade(0.1), moving)(x, mask, generator=seeded())


def test_compose_has_a_readable_name() -> None:
    assert (
        repr(Compose(ToFloat(), Normalize(0.5, 0.25)))
        == "Compose(ToFloat(), Normalize(mean=0.5, std=0.25))"
    )
    assert Compose(ToFloat()) == Compose(ToFloat())
    assert hash(Compose(ToFloat())) == hash(Compose(ToFloat()))


def test_degrade_per_image_depends_on_the_image_alone() -> None:
    x, labels = images(5)[0] / 255, torch.arange(5)
    degrade = Degrade(0.2, Mask(0.3), per_image=True)
    whole = degrade(x, labels)[0]
    turned = degrade(x.flip(0), labels, generator=seeded(7))[0]
    assert torch.equal(turned.flip(0), whole)
    assert torch.equal(degrade(x[3:4] + 1e-7, labels[:1])[0] == 0, whole[3:4] == 0)
    assert not torch.equal(whole[0] == 0, whole[1] == 0)
