"""Imaging networks: what the theorems claim, what is trained, and what the terminal makes of it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise import Equilibrium, certify
from equipoise.cli.entry import main
from equipoise.data import load_data
from equipoise.families.imaging import GradientCell, ProximalCell, ResidualNetwork
from equipoise.layers import project_norms
from equipoise.models import create_model
from equipoise.operators import Blur, Identity, Mask
from equipoise.runs import evaluate_run, load_config, open_run, resume_run, train_run
from equipoise.runs.build import resolve
from equipoise.runs.samples import load_samples


def make(kind, degradation, epsilon=0.9, weight=0.8):
    torch.manual_seed(0)
    network = ResidualNetwork(1, 4, 3, 3, epsilon)
    return kind(degradation, network, weight).double()


def jacobian_norm(cell, y):
    """The largest singular value of the step's Jacobian at some state."""
    context = cell.inject(y)
    jacobian = torch.func.jacrev(lambda z: cell.step(z, context))(torch.randn_like(y)).detach()
    return float(torch.linalg.matrix_norm(jacobian.reshape(y.numel(), y.numel()), 2))


@pytest.mark.parametrize(
    ("kind", "degradation", "holds"),
    [
        (ProximalCell, Identity, True),
        (ProximalCell, Mask, False),  # mu = 0, of which Theorem 2 says nothing
        (GradientCell, Identity, True),
        (GradientCell, Blur, True),
        (GradientCell, Mask, True),
    ],
)
def test_certificate_holds_where_the_theorem_does_and_bounds_the_jacobian(kind, degradation, holds):
    made = degradation(0.8, 3) if degradation is Blur else degradation()
    cell = make(kind, made)
    project_norms(cell)
    found = certify(Equilibrium(cell), strict=False)
    assert found.holds is holds
    assert "Theorem" in str(found)
    y = torch.rand(1, 1, 6, 6, dtype=torch.float64) * (torch.rand(1, 1, 6, 6) > 0.4)
    for _ in range(3):
        assert jacobian_norm(cell, y) <= found.lipschitz + 1e-9


@pytest.mark.parametrize("way", ["replaced", "written over"])
def test_certificate_is_about_the_degradation_that_is_there_now(way):
    first = Identity() if way == "replaced" else Blur(0.2, 3)
    cell = ProximalCell(first, ResidualNetwork(1, 4, 3, 3, 0.3), weight=1.0)
    assert cell.certificate().holds
    if way == "replaced":
        cell.degradation = Blur(2.0, 3)
    else:
        cell.degradation.kernel.copy_(Blur(2.0, 3).kernel)
    assert not cell.certificate().holds
    fresh = ProximalCell(Blur(2.0, 3), cell.network, weight=1.0)
    assert cell.certificate().lipschitz == pytest.approx(fresh.certificate().lipschitz)


def test_projection_brings_weights_back_to_where_the_theorem_holds():
    cell = make(ProximalCell, Identity())
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(3)
        cell.log_weight.fill_(math.log(0.01))
    assert not certify(Equilibrium(cell), strict=False).holds
    project_norms(cell)
    assert certify(Equilibrium(cell)).lipschitz < 1
    assert cell.network.lipschitz() <= 0.9


def test_equilibrium_of_a_linear_network_solves_the_normal_equations():
    """With linear activations the restored image is that of a dense solve of a linear system."""
    cell = make(GradientCell, Blur(0.8, 3))
    y = torch.rand(1, 1, 5, 6, dtype=torch.float64)
    with torch.no_grad():
        for activation in cell.network.activations:
            activation.inner.copy_(activation.outer)
    unit = torch.eye(30, dtype=torch.float64).reshape(30, 1, 5, 6)
    blur = cell.degradation
    gram = blur.adjoint(blur(unit)).reshape(30, 30).T
    learnt = cell.network(unit).detach().reshape(30, 30).T + torch.eye(30)
    tau, centre = float(cell.weight.detach()), float(cell.network.centre.detach())
    right = tau * blur.adjoint(y).flatten() + learnt @ torch.full((30,), centre).double()
    expected = torch.linalg.solve(tau * gram + learnt, right)
    z = Equilibrium(cell, tolerance=1e-12, max_steps=500)(y)
    assert torch.allclose(z.flatten(), expected, atol=1e-9)


def test_blur_bounds_are_those_of_its_matrix():
    blur = Blur(0.4, 3).double()
    unit = torch.eye(30, dtype=torch.float64).reshape(30, 1, 5, 6)
    values = torch.linalg.svdvals(blur(unit).reshape(30, 30)) ** 2
    low, high = blur.gram_bounds()
    assert 0 < low <= values.min()
    assert values.max() <= high <= 1 + 1e-6


def test_mask_reads_missing_pixels_off_the_observation():
    x = torch.rand(3, 2, 9, 8) + 0.1
    y = Mask(0.4).degrade(x, 0.1, torch.Generator().manual_seed(0))
    (known,) = Mask(0.4).weights_for(y)
    assert known.shape == (3, 1, 9, 8)
    assert 0.4 < known.mean() < 0.8
    assert torch.equal(y == 0, (known == 0).expand_as(y))
    assert not torch.equal(known[0], known[1])


def test_unrolled_twin_comes_close_to_the_equilibrium_of_the_same_weights():
    torch.manual_seed(0)
    deq = create_model("imaging-proximal", width=4, tolerance=1e-6)
    tied = create_model("imaging-unrolled", method="proximal", width=4, steps=60)
    cell = deq.equilibrium.cell
    tied.body.cell.load_state_dict(cell.state_dict())
    y = torch.rand(1, 1, 21, 13)  # of any size
    with torch.no_grad():
        assert torch.allclose(tied(y), deq(y), atol=1e-5)


def save(path, height, width, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (height, width) if mode == "L" else (height, width, 3)
    random = np.random.default_rng(height * width)
    Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(path)


def test_images_are_cut_into_patches_that_cover_them(tmp_path):
    save(tmp_path / "train" / "a.png", 10, 23)
    save(tmp_path / "train" / "b.png", 9, 8)
    save(tmp_path / "test" / "c.png", 10, 11)
    save(tmp_path / "test" / "d.png", 12, 11)
    train = load_data("images", "train", tmp_path, patch=8)
    assert len(train) == 2 * 3 + 2 * 1
    assert {tuple(train[i][0].shape) for i in range(len(train))} == {(3, 8, 8)}
    whole = torch.from_numpy(np.array(Image.open(tmp_path / "train" / "a.png")))
    assert torch.equal(train[5][0][0], whole[2:10, 15:23])
    test = load_data("images", "test", tmp_path, patch=8)
    assert test.one_by_one
    assert [tuple(test[i][0].shape) for i in range(2)] == [(3, 10, 11), (3, 12, 11)]
    held = load_data("images", "val", tmp_path, patch=8, holdout=0.5)
    rest = load_data("images", "train", tmp_path, patch=8, holdout=0.5)
    assert len(held) == 1
    assert not {held.files[0]} & set(rest.files)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"width": 0}, "width must be a whole number of at least 1; got 0"),
        ({"depth": 1}, "depth must be at least 2; got 1"),
        ({"kernel_size": 4}, "kernel_size must be odd; got 4"),
        ({"epsilon": 0}, "epsilon must be a positive number; got 0"),
        ({"weight": -1}, "weight must be a positive number; got -1"),
        (
            {"degradation": "blurr"},
            "must be one of blur, identity, mask; got 'blurr'. Did you mean",
        ),
        ({"degradation": {"name": "blur", "size": 4}}, "degradation.size must be odd; got 4"),
        ({"degradation": {"name": "mask", "missing": 1}}, "missing must be in"),
    ],
)
def test_bad_options_get_one_sentence(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        create_model("imaging-gradient", **arguments)


def test_kernel_larger_than_the_image_is_told():
    model = create_model("imaging-gradient", width=2, degradation={"name": "blur", "size": 9})
    with pytest.raises(
        ValueError, match="not exceed the image; got a kernel of 9 x 9 for an image"
    ):
        model(torch.rand(1, 1, 8, 12))


@pytest.fixture
def folder(tmp_path):
    for split, sizes in (("train", [(12, 12), (9, 14)]), ("test", [(10, 13), (13, 10), (10, 13)])):
        for number, size in enumerate(sizes):
            save(tmp_path / "data" / split / f"{number}.png", *size)
    return tmp_path / "data"


SETTINGS = ["data.options.patch=8", "model.options.width=3", "train.epochs=2", "train.batch=4"]


@pytest.mark.parametrize("name", ["deblur", "denoise", "inpaint"])
def test_preset_trains_and_predicts_images_of_any_size(folder, tmp_path, capsys, name):
    settings = [*SETTINGS, *(["data.degradation.size=3"] if name == "deblur" else [])]
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(["train", name, *settings, "--data-root", str(folder), "--output", str(run)]) == 0
    assert "test PSNR" in capsys.readouterr().out
    assert "degradation" in (run / "config.toml").read_text()
    page = (run / "report.html").read_text()
    assert all(f"<figcaption>{name}</figcaption>" in page for name in ("degraded", "restored"))
    save(tmp_path / "photo.png", 17, 11, "RGB")
    assert main(["predict", str(run), str(tmp_path / "photo.png"), "--out", str(out)]) == 0
    assert "colours" in capsys.readouterr().err
    with Image.open(out / "photo.png") as found:
        assert (found.mode, found.size) == ("L", (11, 17))


def test_scores_do_not_depend_on_the_batch_and_resume_is_bit_identical(folder, tmp_path):
    settings = [*SETTINGS, f"data.root={folder}", "schedule.name=constant"]
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    train_run(load_config("inpaint", settings), whole, quiet=True)
    train_run(load_config("inpaint", [*settings, "train.epochs=1"]), halved, quiet=True)
    resume_run(halved, ["train.epochs=2"], quiet=True)
    one, two = (dict(open_run(each).model.state_dict()) for each in (whole, halved))
    assert all(torch.equal(one[name], two[name]) for name in one)
    scores = evaluate_run(whole)
    assert scores.samples == 3
    again = load_config("inpaint", [*settings, "train.evaluate_batch=1"])
    assert evaluate_run(replace(open_run(whole), config=again)).metrics == scores.metrics


def test_degradation_of_the_model_must_be_that_of_the_data(folder):
    settings = [*SETTINGS, f"data.root={folder}", 'model.options.degradation={name="identity"}']
    config = load_config("inpaint", settings)
    with pytest.raises(ValueError, match=r"model.options.degradation must be that of the data"):
        resolve(config, load_samples(config.data).train)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["data.degradation={name='blurr'}"],
            "degradation.name must be one of blur, identity",
        ),
        (["data.degradation={name='blur', size=2}"], "data.degradation.size must be odd; got 2"),
        (["task.name=auto"], "data.degradation must be left out for the task 'auto'"),
    ],
)
def test_bad_settings_of_a_config_get_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_config("inpaint", settings)


def test_images_smaller_than_a_patch_are_told(folder):
    with pytest.raises(ValueError, match="must be at least 10 x 10"):
        load_data("images", "train", folder, patch=10).gather(range(6))
