"""Solvers, gradients, regularisers and activations with their options, from a config."""

import re
from pathlib import Path

import pytest
import torch

from equipoise import SAM, Equilibrium, Implicit, Unrolled
from equipoise.cli import main
from equipoise.core import SourceError
from equipoise.gradients import GRADIENTS
from equipoise.layers import Regularized
from equipoise.prox import ACTIVATIONS, REGULARIZERS, Incay
from equipoise.runs import load_config, open_run, train_run
from equipoise.runs.build import make_model
from equipoise.runs.config import same_run
from equipoise.solvers import GMRES, SOLVERS

PAGE = Path(__file__).parents[2] / "docs/explain/opteq.md"
WAYS = dict(re.findall(r'```toml title="(\w+)\.toml"\n(.*?)```', PAGE.read_text(), re.DOTALL))
REGISTRIES = {
    "solver": SOLVERS,
    "gradient": GRADIENTS,
    "regularizer": REGULARIZERS,
    "activation": ACTIVATIONS,
}


def layer_of(model):
    (layer,) = (part for part in model.modules() if isinstance(part, Equilibrium))
    return layer


@pytest.mark.parametrize("way", ["implicit", "sam", "unrolled"])
def test_each_way_of_algorithm_1_trains_from_a_few_lines_of_toml(way, tmp_path):
    path = tmp_path / "way.toml"
    path.write_text(WAYS[way])
    config = load_config(path, ["train.epochs=1", "data.subset=64", "train.batch=32"])
    before = torch.nn.utils.parameters_to_vector(make_model(config).parameters())
    train_run(config, tmp_path / "run", quiet=True)
    trained = open_run(tmp_path / "run")
    after = torch.nn.utils.parameters_to_vector(trained.model.parameters())
    assert bool(after.isfinite().all())
    assert not torch.equal(before, after)
    assert same_run(trained.config, load_config(tmp_path / "run"))  # what a resumed run is made of
    layer = layer_of(trained.model)
    assert isinstance(layer.gradient, Implicit if way == "implicit" else Unrolled)
    assert isinstance(layer.solver, SAM) == (way == "sam")
    assert isinstance(layer.cell, Regularized) == (way != "sam")
    if way != "implicit":
        assert layer.gradient.steps == 20


def test_tables_hold_tables():
    solver = {"name": "sam", "regularizer": {"name": "incay", "epsilon": 0.5}, "rho": 0.2}
    assert SOLVERS.resolve(solver) == SAM(Incay(0.5), rho=0.2)
    gradient = {"name": "implicit", "solver": {"name": "gmres", "memory": 7}}
    assert GRADIENTS.resolve(gradient) == Implicit(GMRES(7))
    hash(SOLVERS.resolve(solver))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            'solver={name="sma", regularizer="l2"}',
            "model.options.solver.name must be one of .*; got 'sma'. Did you mean 'sam'?",
        ),
        (
            'solver={name="sam", regularizer="l2", roh=0.2}',
            "model.options.solver.roh must be an option of 'sam', one of decay, eta, lipschitz, "
            "regularizer, rho; got 'roh'. Did you mean 'rho'?",
        ),
        (
            "solver=sam",
            "model.options.solver.regularizer must be given for 'sam'; got nothing. "
            'Write solver = { name = "sam", regularizer = ... }.',
        ),
        (
            'solver={name="sam", regularizer={name="incay", epsilon=-1}}',
            "model.options.solver.regularizer.epsilon must be a positive number; got -1.",
        ),
        (
            'solver={name="sam", regularizer="l1"}',
            "model.options.solver.lipschitz must be given for AbsoluteSum, .*; got None. .*",
        ),
        (
            'solver={name="sam", regularizer="l2", rho=0.9}',
            "model.options.solver.decay must be less than (1 - rho)/2 = 0.05, .*; got 0.3.",
        ),
        (
            "solver={memory=3}",
            "model.options.solver.name must be given; got nothing. "
            'Write solver = { name = "...", option = value }.',
        ),
        (
            'gradient={name="unrolled", steps=0}',
            "model.options.gradient.steps must be a whole number of at least 1; got 0.",
        ),
        (
            'activation={name="relu", slope=1}',
            "model.options.activation.slope must be left out, since 'relu' has no options; got 1.",
        ),
        (
            "regularizer.epsilon=1",
            "model.options.regularizer.name must be given; got nothing. .*",
        ),
    ],
)
def test_a_bad_option_is_told_by_the_name_it_has_in_the_config(override, sentence):
    pattern = ".*".join(map(re.escape, sentence.split(".*")))
    with pytest.raises((ValueError, SourceError), match=pattern):
        make_model(load_config("digits", [f"model.options.{override}"]))


@pytest.mark.parametrize(
    ("kind", "name", "option"),
    [
        (kind, name, option)
        for kind, registry in REGISTRIES.items()
        for name in registry.names
        for option in registry.options(name)
    ],
)
@pytest.mark.parametrize("value", ["nonsense", [], -1.5])
def test_every_option_of_every_name_refuses_nonsense_in_one_sentence(kind, name, option, value):
    given = {"name": name, option: value}
    if name == "sam":
        given = {"regularizer": "l2"} | given
    with pytest.raises(ValueError, match=rf"^{kind}\.{option}\b.* must .*; got .*"):
        REGISTRIES[kind].resolve(given)


def test_list_shows_the_options_of_a_solver(capsys):
    assert main(["list", "solvers", "sam"]) == 0
    text = capsys.readouterr().out
    assert 'model.options.solver = { name = "sam", regularizer = ... }' in text
    assert "How fast `beta_k`, the weight of the regulariser's step, falls." in text
    assert main(["list", "solvers"]) == 0
    assert "\nsam " in capsys.readouterr().out
