"""The multiscale DEQ: its cell against a plain transcription, its heads and its sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise import Equilibrium, create_model
from equipoise.families.multiscale import Multiscale, MultiscaleCell, ScaleClassHead, ScalePixelHead
from equipoise.models import model_size


def _cell(channels: tuple[int, ...] = (2, 4, 6), **options: object) -> MultiscaleCell:
    torch.manual_seed(0)
    cell = MultiscaleCell(channels, 2, 2, **{"deviation": 0.3, **options})  # type: ignore[arg-type]
    with torch.no_grad():
        for part in cell.modules():
            if isinstance(part, nn.GroupNorm):  # so that their order matters
                part.weight.normal_(1, 0.3)
                part.bias.normal_(0, 0.3)
    return cell


def _transcribed(cell: MultiscaleCell, z: list[Tensor], x: Tensor) -> list[Tensor]:
    """The step as Section 3 of the paper and Figure 2 say it, with torch's own weight norm."""

    def weight(part: nn.Module) -> Tensor:
        return torch._weight_norm(part.weight, part.length, 0)

    blocks = []
    for scale, (block, own) in enumerate(zip(cell.blocks, z, strict=True)):
        y = F.relu(block.norm1(F.conv2d(own, weight(block.widen), padding=1)))
        y = F.conv2d(y, weight(block.narrow), padding=1) + (x if scale == 0 else 0)
        blocks.append(block.norm3(F.relu(block.norm2(y) + own)))
    found = []
    for target, own in enumerate(blocks):
        total = own.clone()
        for source, other in enumerate(blocks):
            if source > target:
                conv, norm, _ = cell.fusion[f"{source}_to_{target}"]
                factor = 2 ** (source - target)
                y = norm(conv(other)).repeat_interleave(factor, 2).repeat_interleave(factor, 3)
                total += y
            elif source < target:
                parts = [*cell.fusion[f"{source}_to_{target}"]]
                y = other
                while parts:
                    assert parts[0].stride == (2, 2)
                    y = parts[1](parts[0](y))
                    parts = parts[3:]
                    y = F.relu(y) if parts else y
                total += y
        mixed = F.conv2d(F.relu(total), weight(cell.mix[target]))
        found.append(cell.norms_out[target](mixed))
    return found


def test_multiscale_cell_is_the_published_step() -> None:
    cell = _cell()
    x = torch.randn(2, 2, 8, 4)
    z = [torch.randn(2, own, 8 >> k, 4 >> k) for k, own in enumerate(cell.channels)]
    bare = Equilibrium(cell).map(x)
    torch.testing.assert_close(list(bare(tuple(z))), _transcribed(cell, z, x))


def test_multiscale_layer_is_trained_in_all_resolutions_at_once() -> None:
    torch.manual_seed(0)
    layer = Multiscale((4, 8), 2, 4, tolerance=1e-5, max_steps=100)
    x = torch.randn(3, 4, 8, 8, requires_grad=True)
    z = layer(x)
    assert [tuple(one.shape) for one in z] == [(3, 4, 8, 8), (3, 8, 4, 4)]
    assert layer.last is not None
    assert bool(layer.last.converged.all())
    for one, again in zip(z, layer.map(x)(z), strict=True):
        torch.testing.assert_close(one, again, atol=1e-3, rtol=1e-3)
    z[1].square().sum().backward()  # the coarse image alone reaches what is injected at the fine
    assert x.grad is not None
    assert bool(x.grad.flatten(1).any(dim=1).all())


@pytest.mark.parametrize("groups", [2, 8])
def test_first_solves_of_the_published_cell_converge_by_plain_steps(groups: int) -> None:
    torch.manual_seed(0)
    layer = Multiscale((8, 16, 32), 2, groups, solver="fixed_point", on_failure="ignore")
    x = torch.relu(torch.randn(2, 8, 16, 16))
    assert bool(layer.solve(x).converged.all())


def test_weight_norm_begins_where_plain_kernels_do_and_trains_length_and_direction() -> None:
    plain, normed = _cell(weight_norm=False), _cell()
    x, z = torch.randn(2, 2, 4, 4), None
    z = plain.initial(x, plain.inject(x))
    z = tuple(torch.randn_like(one) for one in z)
    for one, other in zip(*(Equilibrium(cell).map(x)(z) for cell in (plain, normed)), strict=True):
        torch.testing.assert_close(one, other)
    layer = Equilibrium(normed, max_steps=20, on_failure="ignore")
    sum(one.pow(3).sum() for one in layer(x)).backward()
    narrow = normed.blocks[0].narrow
    inner = (narrow.weight * narrow.weight.grad).sum(dim=(1, 2, 3))
    assert bool(narrow.length.grad.any())
    torch.testing.assert_close(inner, torch.zeros_like(inner), atol=1e-4, rtol=0)


def test_dropout_keeps_one_mask_for_a_solve_and_none_in_evaluation() -> None:
    cell = _cell(dropout=0.5)
    x = torch.randn(64, 2, 4, 4)
    masks = cell.inject(x).masks
    assert masks is not None
    assert [tuple(mask.shape) for mask in masks] == [(64, own, 1, 1) for own in cell.channels]
    assert set(masks[2].unique().tolist()) == {0.0, 2.0}
    step = Equilibrium(cell).map(x)
    z = tuple(torch.randn(64, own, 4 >> k, 4 >> k) for k, own in enumerate(cell.channels))
    for one, other in zip(step(z), step(z), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert cell.eval().inject(x).masks is None


def test_class_head_reads_every_resolution_and_pixel_head_gives_every_pixel() -> None:
    z = tuple(torch.randn(2, 4 << k, 8 >> k, 12 >> k, requires_grad=True) for k in range(3))
    heads = ScaleClassHead((4, 8, 16), (2, 3, 4), 5, 7), ScalePixelHead((4, 8, 16), 7, 4)
    for head, shape in zip(heads, [(2, 7), (2, 7, 32, 48)], strict=True):
        y = head(z)
        assert tuple(y.shape) == shape
        assert all(g.any() for g in torch.autograd.grad(y.pow(3).sum(), z))


@pytest.mark.parametrize(
    ("name", "parameters", "published"),
    [
        ("cifar10-tiny", 175_194, 170e3),
        ("cifar10-large", 11_095_934, 10e6),
        ("imagenet-small", 17_042_680, 18e6),
        ("imagenet-xl", 90_459_440, 81e6),
        ("cityscapes-small", 7_399_827, 7.8e6),
        ("cityscapes-large", 55_954_659, 53.0e6),
        ("cityscapes-xl", 79_550_435, 70.9e6),
    ],
)
def test_multiscale_model_has_about_the_published_size(
    name: str, parameters: int, published: float
) -> None:
    size = model_size(f"multiscale-{name}")
    assert size == parameters
    assert 0.88 < size / published < 1.13


def test_multiscale_model_takes_images_of_all_sizes_that_its_resolutions_divide() -> None:
    model = create_model("multiscale-digits").eval()
    assert model(torch.randn(2, 1, 12, 6)).shape == (2, 10)
    with pytest.raises(ValueError, match=r"sides that are multiples of 2; got \(2, 1, 9, 8\)\.$"):
        model(torch.randn(2, 1, 9, 8))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"input_shape": (3, 27, 27)},
            r"input_shape must have sides that are multiples of 4, for 3 resolutions; "
            r"got \(3, 27, 27\)\. Set data.size\.",
        ),
        ({"groups": 3}, r"groups must be 1 or even; got 3"),
        ({"groups": 6}, r"channels must be multiples of groups, 6; got \(8, 16, 32\)"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1.0"),
        ({"gain": 0.0}, r"gain must be in \(0, 1\]; got 0.0"),
        ({"deviation": -1.0}, r"deviation must be a positive number; got -1.0"),
        ({"num_classes": 0}, r"num_classes must be a whole number of at least 1; got 0"),
    ],
)
def test_multiscale_model_refuses_nonsense(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        create_model("multiscale-cifar10-tiny", **options)


def test_multiscale_cell_refuses_sides_that_its_resolutions_do_not_divide() -> None:
    layer = Equilibrium(_cell())
    with pytest.raises(
        ValueError, match=r"sides that are multiples of 4, for 3 resolutions; got \(6, 8\)"
    ):
        layer(torch.randn(1, 2, 6, 8))
    with pytest.raises(ValueError, match=r"have shape \(batch, 2, height, width\)"):
        layer(torch.randn(1, 3, 8, 8))


def test_last_image_alone_is_normalised_even_where_it_has_one_pixel() -> None:
    cell = _cell()
    step = Equilibrium(cell).map(torch.randn(1, 2, 4, 4))
    z = tuple(torch.randn(1, own, 4 >> k, 4 >> k) for k, own in enumerate(cell.channels))
    assert z[-1].shape[2:] == (1, 1)
    assert all(bool(one.isfinite().all()) for one in step(z))
