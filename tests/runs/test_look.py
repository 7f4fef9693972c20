"""`equipoise look`: figures of a small run, their numbers, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.sparse.linalg import LinearOperator, eigsh
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from equipoise.cli import main
from equipoise.core.named_code import ChangedFileWarning
from equipoise.data import batches
from equipoise.engine import read_checkpoint, write_checkpoint
from equipoise.models import find_equilibria
from equipoise.runs import curvature as curvature_module
from equipoise.runs import evaluate_run, open_run, report_run
from equipoise.runs import landscape as landscape_module
from equipoise.runs.curvature import find_curvature
from equipoise.runs.landscape import LandscapeSettings, find_landscape
from equipoise.runs.network import Source, list_kept_epochs, open_network

SMALL = ["data.subset=60", "train.batch=30", "train.epochs=2", "train.weights_every=1"]
TINY = LandscapeSettings(points=3, samples=20)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look") / "run"
    words = ["train", "digits", "--output", str(folder), *SMALL, "--quiet"]
    assert main(words) == 0
    return folder


@pytest.fixture(scope="module")
def explicit(tmp_path_factory):
    """A network without an equilibrium, never trained."""
    path = tmp_path_factory.mktemp("explicit") / "plain.toml"
    path.write_text('[model]\nname = "plain.py:Plain"\n\n[data]\nname = "digits"\n')
    path.with_name("plain.py").write_text(
        "from torch import nn\n"
        "from equipoise.models import Model\n\n"
        "class Plain(Model):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.last = nn.Linear(64, 10)\n\n"
        "    def forward(self, x):\n"
        "        return self.last(x.flatten(1))\n"
    )
    return path


def told(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_run_keeps_the_weights_of_its_epochs_and_the_first_ones(run, tmp_path):
    assert list_kept_epochs(run) == [0, 1, 2]
    last, state = read_checkpoint(run / "weights" / "epoch-000002.safetensors")
    assert state["epoch"] == 2
    kept = read_checkpoint(run / "model.safetensors")[0]
    assert all(torch.equal(last[name], kept[name]) for name in kept)
    words = ["train", "digits", "--output", str(tmp_path / "none"), *SMALL[:2], "train.epochs=1"]
    assert main([*words, "--quiet"]) == 0
    assert not (tmp_path / "none" / "weights").exists()


def test_landscape_of_a_run_is_what_evaluation_finds_at_its_centre(run, tmp_path):
    settings = LandscapeSettings(points=3, samples=60, reach=(-0.1, 0.1))
    found = find_landscape(Source(str(run)), settings, tmp_path)
    scored = evaluate_run(run, split="train").metrics["loss"]
    assert found.landscape.loss[1, 1] == pytest.approx(scored, rel=1e-6)
    assert found.landscape.samples == 60
    assert found.split == "train"


def test_landscape_of_a_path_has_the_weights_on_its_grid(run, tmp_path, capsys):
    settings = LandscapeSettings(points=8, samples=4, directions="path")
    found = find_landscape(Source(str(run)), settings, tmp_path)
    land, path = found.landscape, found.path
    assert (land.y[land.centre[0]], land.x[land.centre[1]]) == (0.0, 0.0)
    for axis, along in ((land.x, path[:, 0]), (land.y, path[:, 1])):
        assert axis[0] <= along.min() <= along.max() <= axis[-1]
    words = ["look", "landscape", str(run), "--line", "--range", "0.1", "1", "--points", "3"]
    assert main([*words, "--samples", "4", "--processes", "1", "--quiet"]) == 0
    assert "at the point of the grid nearest to the weights;" in capsys.readouterr().out


def test_landscape_of_another_model_option_code_or_transform_is_computed_anew(explicit, tmp_path):
    found = [
        find_landscape(Source("digits", (f"model.options.activation={name}",)), TINY, tmp_path)
        for name in ("tanh", "relu", "relu")
    ]
    assert found[1].file == found[2].file
    assert found[0].file != found[1].file
    assert not np.array_equal(found[0].landscape.loss, found[1].landscape.loss)
    scaled = Source("digits", ("model.options.activation=relu", "data.mean=[0.5]", "data.std=[2]"))
    other = find_landscape(scaled, TINY, tmp_path).landscape
    assert not np.array_equal(other.loss, found[1].landscape.loss)
    copy = tmp_path / "own" / explicit.name
    shutil.copytree(explicit.parent, copy.parent)
    code = copy.with_name("plain.py")
    before = find_landscape(Source(str(copy), trust=True), TINY, tmp_path)
    code.write_text(code.read_text().replace("x.flatten(1)", "2 * x.flatten(1)"))
    with pytest.warns(ChangedFileWarning):  # a new process would run it as it is now
        after = find_landscape(Source(str(copy), trust=True), TINY, tmp_path)
    assert before.file != after.file


def test_landscape_by_two_processes_is_the_serial_one_bit_for_bit(run, tmp_path):
    serial = find_landscape(Source(str(run)), TINY, tmp_path / "one").landscape
    shared = find_landscape(Source(str(run)), TINY, tmp_path / "two", processes=2).landscape
    assert np.array_equal(serial.loss, shared.loss)
    assert np.array_equal(serial.missed, shared.missed)


def test_landscape_resumes_after_a_kill_and_refuses_a_damaged_file(run, tmp_path, monkeypatch):
    whole = find_landscape(Source(str(run)), TINY, tmp_path / "whole").landscape
    measured = []
    measure = landscape_module._Worker.measure

    def measure_some(self, points):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(points)
        return measure(self, points)

    monkeypatch.setattr(landscape_module._Worker, "measure", measure_some)
    with pytest.raises(KeyboardInterrupt):
        find_landscape(Source(str(run)), TINY, tmp_path / "killed")
    done = []
    monkeypatch.setattr(landscape_module._Worker, "measure", measure)
    again = find_landscape(
        Source(str(run)), TINY, tmp_path / "killed", on_points=lambda *count: done.append(count)
    )
    assert done[0] == (4, 9)
    assert done[-1] == (9, 9)
    assert np.array_equal(again.landscape.loss, whole.loss)
    again.file.write_bytes(again.file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="landscape-"):
        find_landscape(Source(str(run)), TINY, tmp_path / "killed")


@pytest.mark.filterwarnings("ignore::equipoise.ConvergenceWarning")
def test_landscape_counts_unsolved_equilibria_and_undefined_losses(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = (copy / "config.toml").read_text()
    assert "tolerance" not in config
    config = config.replace("options = {", "options = { max_steps = 1, tolerance = 1e-6,", 1)
    (copy / "config.toml").write_text(config)
    found = find_landscape(Source(str(copy)), TINY, tmp_path).landscape
    assert found.unsolved == 9
    assert found.missed.max() == 20
    weights, state = read_checkpoint(copy / "model.safetensors")
    weights["head.classifier.weight"][0, 0] = torch.nan
    write_checkpoint(copy / "model.safetensors", weights, state)
    found = find_landscape(Source(str(copy)), TINY, tmp_path).landscape
    assert found.undefined == 9
    assert np.isnan(found.loss).all()


def test_curvature_of_a_run_is_that_of_differences_of_gradients(run, monkeypatch):
    monkeypatch.setattr(curvature_module, "BATCH", 5)  # the last part is a smaller one
    network = open_network(Source(str(run)))
    dataset = network.samples("train", 12)
    found = find_curvature(network, dataset, 1)
    model = network.run.model.double().eval()
    for layer in find_equilibria(model).values():
        layer.stop = replace(layer.stop, tolerance=1e-11, max_steps=500)
    ((x, y),) = batches(dataset, 12, shuffle=False, transform=network.run.transform)
    weights = list(model.parameters())
    centre = parameters_to_vector(weights).detach()

    def gradient(place):
        vector_to_parameters(place, weights)
        loss = torch.nn.functional.cross_entropy(model(x.double()), y)
        return torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, weights)])

    def product(vector):
        step = 1e-6 * torch.from_numpy(vector.reshape(-1))
        return ((gradient(centre + step) - gradient(centre - step)) / 2e-6).numpy()

    matrix = LinearOperator((len(centre),) * 2, product, dtype=np.float64)
    smallest, largest = eigsh(matrix, 2, which="BE", tol=1e-4, return_eigenvectors=False)
    assert found.largest[0] == pytest.approx(largest, rel=5e-3)
    assert found.smallest == pytest.approx(smallest, abs=5e-3 * largest)


def test_look_prints_the_largest_eigenvalues_of_the_hessian(run, capsys):
    small = ["--points", "3", "--samples", "4", "--processes", "1", "--quiet"]
    assert main(["look", "landscape", str(run), *small, "--line", "--eigenvalues", "2"]) == 0
    network = open_network(Source(str(run)))
    expected = find_curvature(network, network.samples("train", 4), 2)
    numbers = ", ".join(f"{value:.4g}" for value in expected.largest)
    line = f"largest eigenvalues of the Hessian {numbers}; smallest {expected.smallest:.4g} "
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_landscape_resumes_after_kill_9_bit_for_bit(run, tmp_path, processes):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("look"))
    settings = LandscapeSettings(points=11, samples=20)
    words = ["look", "landscape", str(copy), "--points", "11", "--samples", "20", "--quiet"]
    words += ["--processes", str(processes)]
    child = subprocess.Popen([sys.executable, "-m", "equipoise", *words])
    done = 0
    while not done and child.poll() is None:
        time.sleep(0.005)
        for file in copy.glob("look/landscape-*.safetensors"):
            done = int(read_checkpoint(file)[0]["done"].sum())
    child.kill()
    child.wait()
    counts = []
    again = find_landscape(
        Source(str(copy)), settings, copy / "look", on_points=lambda *count: counts.append(count)
    )
    assert done <= counts[0][0] < 121
    assert counts[-1] == (121, 121)
    whole = find_landscape(Source(str(copy)), settings, tmp_path / "whole").landscape
    assert np.array_equal(again.landscape.loss, whole.loss)
    assert len(list((copy / "look").glob("landscape-*.safetensors"))) == 1


def test_look_draws_every_figure_and_the_page_shows_them(run, capsys):
    small = ["--points", "3", "--samples", "20", "--processes", "1", "--quiet"]
    for words in (
        ["landscape", str(run), *small],
        ["landscape", str(run), *small, "--directions", "path"],
        ["landscape", str(run), *small, "--line"],
        ["trajectory", str(run), "--samples", "5", "--epochs", "all"],
        ["spectrum", str(run), "--samples", "2", "--products", "5"],
        ["kernel", str(run), "--samples", "2"],
    ):
        assert main(["look", *words]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert "basin below" in printed
    assert "before training, anderson: all solved" in printed
    names = sorted(path.name for path in (run / "look").glob("*.png"))
    assert names == [
        "kernel.png",
        "landscape-contour-path.png",
        "landscape-contour.png",
        "landscape-line.png",
        "landscape-surface-path.png",
        "landscape-surface.png",
        "residual.png",
        "spectrum.png",
        "trajectory.png",
    ]
    for name in names:
        assert (run / "look" / name).with_suffix(".svg").read_text().startswith("<?xml")
        with Image.open(run / "look" / name) as image:
            caption = image.info["Description"]
        assert "samples of" in caption
        assert ("the cross marks" in caption) == name.startswith("landscape-contour")
    page = report_run(run).read_text()
    assert page.count('<figure class="plot">') == len(names)
    assert "biases and scales of normalisations fixed" in page


def test_look_compares_networks_that_are_not_trained(tmp_path, capsys):
    words = ["digits", "model.options.alpha=0.5,0.9", "--samples", "4"]
    assert main(["look", "trajectory", *words, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "digits, alpha = 0.5, anderson" in printed
    assert "digits, alpha = 0.9, anderson" in printed


def test_look_draws_the_landscape_of_a_network_without_equilibrium(explicit, tmp_path, capsys):
    small = ["--points", "3", "--samples", "20", "--processes", "1", "--quiet"]
    assert main(["look", "landscape", str(explicit), *small, "--output", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["look", "trajectory", str(explicit), "--output", str(tmp_path)]) == 2
    assert "have an equilibrium to look at; got none" in told(capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["landscape", "RUN", "--points", "2"], "look.points must be at least 3"),
        (["landscape", "RUN", "--range", "1", "1"], "look.range must rise"),
        (["landscape", "RUN", "--range", "0", "nan"], "look.range must be a finite number"),
        (["landscape", "RUN", "--samples", "0"], "look.samples must be a whole number"),
        (["landscape", "RUN", "--eigenvalues", "-1"], "look.eigenvalues must be a whole number"),
        (["landscape", "RUN", "--level", "nan"], "look.level must be a finite number"),
        (["landscape", "RUN", "--data-root", "nowhere", "--split", "val"], "val"),
        (["landscape", "RUN", "train.epochs=3"], "is a trained run, whose settings cannot change"),
        (["landscape", "nowhere/run"], "there is no such file or folder"),
        (["landscape", "digits"], "--output DIR must say where to write"),
        (["trajectory", "RUN", "--epochs", "1,9"], "it has those of 0, 1, 2"),
        (["trajectory", "RUN", "--epochs", "-"], "--epochs must be 'all' or whole numbers"),
        (["trajectory", "RUN", "--solvers", "andersen"], "Did you mean 'anderson'?"),
        (["spectrum", "RUN", "--layer", "nothing"], "look.layer must be one of equilibrium"),
        (["lanscape", "RUN"], "invalid choice: 'lanscape'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_look_refuses_bad_input_in_one_sentence(words, sentence, run, capsys):
    assert main(["look", *(str(run) if word == "RUN" else word for word in words)]) == 2
    assert sentence in told(capsys)


def test_path_of_a_run_that_kept_too_few_weights_is_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "weights")
    words = ["look", "landscape", str(tmp_path / "run"), "--directions", "path", "--quiet"]
    assert main(words) == 2
    assert "Train it with train.weights_every=1" in told(capsys)
    assert open_run(tmp_path / "run")
