"""Learning rates of some parameters, by patterns of their names."""

import re

import pytest
import torch
from torch import nn

import equipoise
from equipoise.core import SourceError
from equipoise.data import Dataset
from equipoise.engine import OptimizerConfig, TrainConfig, Trainer, make_optimizer, make_task
from equipoise.engine.optimizer import parameter_rates
from equipoise.engine.progress import SilentProgress
from equipoise.runs import dump_config, load_config

NAMES = ["head.weight", "head.bias", "equilibrium.cell.operators.0.kernel", "bn.weight"]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"equilibrium.operators": 0.25}, [1, 1, 0.25, 1]),
        ({"head": 0.5, "weight": 3}, [1.5, 0.5, 1, 3]),
        ({"operators.0": 2}, [1, 1, 2, 1]),
        ({"*n.w*": 2}, [1, 1, 1, 2]),
        ({"head.?ias": 0}, [1, 0, 1, 1]),
    ],
)
def test_rates_belong_to_names_that_have_the_words_of_a_pattern(rates, expected):
    assert list(parameter_rates(NAMES, rates).values()) == expected


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("equilibrium.operator", "Did you mean 'equilibrium.operators'?"),
        ("haed", "Did you mean 'head'?"),
        ("weight.head", "Their names begin with head, equilibrium, bn."),
        ("quux", "Their names begin with head, equilibrium, bn."),
    ],
)
def test_pattern_that_matches_nothing_is_refused_with_the_nearest(pattern, hint):
    sentence = (
        "optimizer.rates must name parameters that are trained; got "
        f"{pattern!r}, which matches none. {hint}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parameter_rates(NAMES, {"head": 1.0, pattern: 0.5})


def test_rates_multiply_those_of_the_schedule_in_each_step():
    x, y = torch.randn(6, 1, 8, 8), torch.arange(6) % 3
    data = Dataset("noise", "train", "classification", ("a", "b", "c"), (1, 8, 8), x, y)
    model = equipoise.create_model("opteq-digits", num_classes=3)
    trainer = Trainer(
        model,
        make_task("auto", data),
        data,
        settings=TrainConfig(batch=6),
        optimizer=OptimizerConfig("sgd", 0.1, rates={"head": 0.5, "operators": 0.0}),
        progress=SilentProgress(),
    )
    kernel, head = model.equilibrium.layers.operators[0].kernel, model.head.classifier.weight
    before, old = kernel.detach().clone(), head.detach().clone()
    step = trainer.stepper.compute(x, y, 0.2)
    found = {group["rate"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert found == {1.0: 0.2, 0.5: 0.1, 0.0: 0.0}
    gradient = head.grad.clone()
    trainer.stepper.apply(step, trainer.stepper.verdict(step))
    assert torch.equal(kernel, before)
    assert torch.allclose(head, old - 0.1 * gradient)


def test_rates_and_decay_make_groups_of_their_own():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    made = make_optimizer(model, OptimizerConfig("adamw", 0.1, 0.2, rates={"1": 0.5}))
    found = [(g["rate"], g["weight_decay"], len(g["params"])) for g in made.param_groups]
    assert found == [(1.0, 0.2, 1), (0.5, 0.2, 1), (1.0, 0.0, 1), (0.5, 0.0, 1)]


@pytest.mark.parametrize(
    "text",
    [
        '{ "equilibrium.operators" = 0.25, bias = 2 }',
        "{ equilibrium.operators = 0.25, bias = 2 }",
    ],
)
def test_config_reads_rates_with_and_without_quotes(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "digits"\n[optimizer]\nrates = {text}\n')
    rates = {"equilibrium.operators": 0.25, "bias": 2.0}
    config = load_config(path)
    assert config.optimizer.rates == rates
    path.write_text(dump_config(config, comments=True))
    assert load_config(path).optimizer.rates == rates
    assert "# Factors of the learning rate for some parameters" in path.read_text()
    overridden = load_config(path, ["optimizer.rates.bias=3", "optimizer.rates.head.*=0.5"])
    assert overridden.optimizer.rates == rates | {"bias": 3.0, "head.*": 0.5}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ('{ head = "x" }', "optimizer.rates.head must be a number; got 'x'."),
        ("{ head = -1 }", 'optimizer.rates."head" must be zero or a positive number; got -1.0.'),
        ("3", "optimizer.rates must be a table; got 3."),
    ],
)
def test_bad_rates_are_told_in_one_sentence(tmp_path, value, sentence):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "digits"\n[optimizer]\nrates = {value}\n')
    with pytest.raises(SourceError, match=f"{re.escape(sentence)}$"):
        load_config(path)


def test_rates_know_the_parameters_of_a_model():
    model = equipoise.create_model("opteq-digits")
    made = make_optimizer(model, OptimizerConfig(rates={"equilibrium.operators": 0.25}))
    slow = [group["params"] for group in made.param_groups if group["rate"] == 0.25]
    assert [weight.shape for (weight,) in slow] == [(32, 16, 3, 3)]
