"""What the layers of an equilibrium get and give: measured, logged and told."""

import os
import re
import signal

import pytest
import torch
from torch import nn

import equipoise
from equipoise.core import Interrupted, SettingError, Structure
from equipoise.data import Dataset, ToFloat
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_task, read_metrics
from equipoise.engine.part_activity import PartActivity, measure_parts
from equipoise.engine.progress import SilentProgress
from equipoise.layers import ChangeOfVariable, Regularized, Skip
from equipoise.layers.declarations import contributions_of, part_weights_of
from equipoise.report import RunReport, render_report


def blobs(count=48):
    random = torch.Generator().manual_seed(0)
    y = torch.arange(count) % 3
    x = torch.randn(count, 8, generator=random) + 2 * nn.functional.one_hot(y, 8)
    return Dataset("blobs", "train", "classification", ("a", "b", "c"), (8,), x, y)


class Deep(nn.Module):
    def __init__(self, hidden=(6, 6, 6), **options):
        super().__init__()
        torch.manual_seed(0)
        self.equilibrium = equipoise.OptEq(8, 8, list(hidden), **options)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.equilibrium(x))))


class Notes(SilentProgress):
    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class StopAt(SilentProgress):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def step(self, step, epoch, values):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def make(folder=None, model=None, progress=None, **settings):
    data = blobs()
    return Trainer(
        model or Deep(),
        make_task("auto", data),
        data,
        settings=TrainConfig(**{"epochs": 2, "batch": 16, "log_every": 1, **settings}),
        optimizer=OptimizerConfig("adam", 1e-2),
        folder=folder,
        progress=progress or SilentProgress(),
    )


def test_gradients_and_contributions_are_those_written_out():
    model, data = Deep(tolerance=1e-6, alpha=0.7).eval(), blobs()
    x, y = data.gather(range(16))
    found = measure_parts(model, make_task("auto", data), x, y)

    nn.functional.cross_entropy(model(x), y).backward()
    layer = model.equilibrium
    weights = [operator.weight for operator in layer.layers.operators]
    sizes = [float(W.detach().norm() * W.grad.norm()) for W in weights]
    wanted = [size / max(sizes) for size in sizes]
    assert list(found.gradients) == ["equilibrium.1", "equilibrium.2", "equilibrium.3"]
    assert list(found.gradients.values()) == pytest.approx(wanted, rel=1e-4)

    def walk(z, left_out):
        for number in {0, 1, 2} - {left_out}:
            W, inject = layer.layers.operators[number].weight, layer.layers.inputs[number]
            z = 0.7 * torch.relu(z @ W.T + inject(x)) @ W + 0.3 * z
        return z

    with torch.no_grad():
        z = layer(x)
        whole = walk(z, None)
        wanted = [float((whole - walk(z, n)).norm() / whole.norm()) for n in range(3)]
    assert list(found.contributions.values()) == pytest.approx(wanted, rel=1e-4)


def test_measuring_changes_nothing():
    model, data = Deep(on_failure="raise", max_steps=1, tolerance=1e-7).train(), blobs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    assert measure_parts(model, make_task("auto", data), *data.gather(range(8))) is not None
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(part.training for part in model.modules())
    assert model.equilibrium.solves.on_failure == "raise"
    assert not model.equilibrium._forward_pre_hooks


def test_models_without_several_layers_are_not_measured():
    data = blobs()
    task, batch = make_task("auto", data), data.gather(range(8))
    assert measure_parts(Deep([6]), task, *batch) is None
    assert measure_parts(nn.Linear(8, 3), task, *batch) is None
    bad = Deep()
    with torch.no_grad():
        bad.head.weight.fill_(float("nan"))
    assert measure_parts(bad, task, *batch) is None


def test_wrappers_pass_on_what_parts_give():
    torch.manual_seed(0)
    cell = equipoise.OptEq(8, 8, [6, 6]).cell
    x, z = torch.randn(4, 8), torch.randn(4, 8)
    context = equipoise.OptEq(8, 8, [6, 6]).cell.inject(x)
    structure = Structure(context, "context")
    context = structure.rebuild(structure.leaves)
    assert contributions_of(Skip(cell, 0.5), z, context) == cell.contributions(z, context)
    moved = ChangeOfVariable(cell, scale=2.0, shift=1.0)
    assert contributions_of(moved, z, context) == cell.contributions(2 * z + 1, context)
    shrunk = Regularized(cell, "l2", 1.0)
    assert contributions_of(shrunk, z, context) == cell.contributions(z / 2, context)
    for wrapper in (moved, shrunk):
        assert part_weights_of(wrapper).keys() == {"1", "2"}
        assert wrapper.idle_remedy == cell.idle_remedy


def test_idle_layers_are_told_in_one_sentence():
    """Of six layers that shrink what they get, little of the first one's work is left."""
    trainer = make(model=Deep([6] * 6, alpha=0.95), progress=Notes(), epochs=1)
    for group in trainer.optimizer.param_groups:
        group["rate"] = 0.0
    trainer.fit()
    (note,) = [note for note in trainer.progress.notes if "idle" in note]
    assert re.fullmatch(
        r"equilibrium\.1 is idle \(and \d more\): its weights get [\d.e-]+ % of the largest "
        r"gradient, and without it the state would change by [\d.e-]+ %\. Try norm='orthogonal', "
        r"or a smaller alpha\.",
        note,
    )
    assert PartActivity({"a": 0.5}, {"a": 0.0}).describe_idle() == ""


def test_log_has_what_parts_get_and_give_and_resumes_bit_identically(tmp_path):
    make(tmp_path / "whole").fit()
    with pytest.raises(Interrupted):
        make(tmp_path / "run", progress=StopAt(3)).fit()  # the last step of the first epoch
    make(tmp_path / "run").fit(resume=True)
    runs = [
        [
            (line["part_gradients"], line["part_contributions"])
            for line in read_metrics(tmp_path / name / "metrics.jsonl")
            if line["kind"] == "epoch"
        ]
        for name in ("whole", "run")
    ]
    assert runs[0] == runs[1]
    gradients, contributions = runs[0][-1]
    assert max(gradients.values()) == 1
    assert gradients.keys() == contributions.keys() == {f"equilibrium.{n}" for n in (1, 2, 3)}


def test_page_shows_what_parts_get_and_give():
    def page(first):
        line = {
            "part_gradients": {"equilibrium.1": first, "equilibrium.2": 1.0},
            "part_contributions": {"equilibrium.1": 0.002, "equilibrium.2": 0.4},
        }
        epochs = [{"kind": "epoch", "epoch": n, "step": n + 1, **line} for n in range(2)]
        return render_report(RunReport(title="a", epochs=epochs))

    idle = page(0.001)
    assert "What each part of the equilibrium gets and gives" in idle
    assert "<p>equilibrium.1 is idle: less than 1 % of the largest gradient" in idle
    assert "Contribution of each part" in idle
    assert "All of them work" in page(0.3)
    assert "What each part" not in render_report(RunReport(title="a"))


def test_wrong_declarations_are_told_by_name():
    class Wrong(equipoise.Cell):
        def part_weights(self):
            return {"1": 3.0}

        def contributions(self, z, context):
            return [1.0]

    with pytest.raises(SettingError, match=r"^Wrong.part_weights must be a dict of lists of wei"):
        part_weights_of(Wrong())
    with pytest.raises(SettingError, match=r"^Wrong.contributions must be a dict of numbers by na"):
        contributions_of(Wrong(), None, None)


def test_samples_are_probed_as_they_are_learnt_from_where_none_are_scored():
    images = torch.randint(0, 256, (16, 1, 28, 28), dtype=torch.uint8)
    labels = torch.arange(16) % 2
    data = Dataset("bytes", "train", "classification", ("a", "b"), (1, 28, 28), images, labels)
    model = equipoise.create_model("opteq-mnist", num_classes=2)  # takes floats only
    settings = TrainConfig(epochs=1, batch=16)
    task, quiet = make_task("classification", data), SilentProgress()
    trainer = Trainer(model, task, data, settings=settings, transform=ToFloat(), progress=quiet)
    assert trainer.fit().epochs == 1
