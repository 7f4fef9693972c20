"""The registry of models, and networks that users make themselves."""

import copy
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pytest
import torch
from torch import nn

from equipoise.families.opteq import OptEq
from equipoise.models import (
    ImageNetwork,
    Model,
    create_model,
    factory,
    find_equilibria,
    list_models,
    model_info,
    model_options,
    register_model,
    require_model,
)


class Rest(TypedDict, total=False):
    alpha: float


def dense(*, width: int = 5, **rest: Unpack[Rest]) -> ImageNetwork:
    """Vectors of twelve numbers.

    More about them.
    """
    return ImageNetwork(nn.Flatten(), OptEq(12, width, 8, **rest), nn.Linear(width, 2), (3, 2, 2))


@pytest.fixture
def registered() -> Iterator[None]:
    register_model("dense")(dense)
    yield
    del factory._BUILDERS["dense"]


def test_list_models_matches_patterns() -> None:
    assert list_models("opteq-cifar10-*") == [
        "opteq-cifar10-1.4m",
        "opteq-cifar10-162k",
        "opteq-cifar10-199k",
    ]
    assert list_models() == sorted(list_models())
    assert list_models("nothing") == []


def test_create_model_suggests_a_name() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^model must be one of .*opteq-digits.*; got 'opteq-digit'. Did you mean "
            r"'opteq-digits'\?$"
        ),
    ):
        create_model("opteq-digit")
    with pytest.raises(ValueError, match=r"Did you mean 'opteq-mnist'"):
        model_info("opteq-mnst")


def test_create_model_lists_the_options() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^Option of opteq-digits must be one of activation, alpha, .*; got 'alfa'. Did "
            r"you mean 'alpha'\?$"
        ),
    ):
        create_model("opteq-digits", alfa=0.5)


@pytest.mark.usefixtures("registered")
def test_registered_model_is_listed_described_and_made() -> None:
    assert "dense" in list_models("d*")
    assert model_info("dense") == "Vectors of twelve numbers."
    assert model_options("dense") == ["alpha", "width"]
    network = create_model("dense", width=4, alpha=0.5)
    assert network.name == "dense"
    assert network(torch.randn(7, 3, 2, 2)).shape == (7, 2)
    assert network(torch.randn(7, 12)).shape == (7, 2)
    assert network.parameter_counts() == {
        "extractor": 0,
        "equilibrium": 136,
        "head": 10,
        "classifier": 0,
        "total": 146,
    }


@pytest.mark.usefixtures("registered")
def test_network_takes_only_its_own_size_unless_told() -> None:
    with pytest.raises(
        ValueError,
        match=r"^The input of dense must have shape \(batch, 3, 2, 2\); got \(7, 3, 2, 3\)\.$",
    ):
        create_model("dense")(torch.randn(7, 3, 2, 3))


@pytest.mark.usefixtures("registered")
def test_register_model_refuses_a_name_twice() -> None:
    with pytest.raises(ValueError, match="got 'dense', which is registered already"):
        register_model("dense")(dense)


def test_register_model_refuses_options_without_names_or_defaults() -> None:
    def positional(width: int = 5) -> ImageNetwork:
        return dense(width=width)

    def required(*, width: int) -> ImageNetwork:
        return dense(width=width)

    for builder in (positional, required):
        with pytest.raises(
            ValueError,
            match=r"must have only keyword arguments with defaults; got 'width' of 'other'",
        ):
            register_model("other")(builder)
    assert "other" not in list_models()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"equilibrium": nn.Linear(2, 2)},
            r"ImageNetwork.equilibrium must be an Equilibrium; got Linear\.",
        ),
        (
            {"input_shape": (12,)},
            r"ImageNetwork.input_shape must be channels, height and width; got \(12,\)\.",
        ),
        (
            {"size_multiple": 0},
            r"ImageNetwork.size_multiple must be a whole number of at least 1; got 0\.",
        ),
    ],
)
def test_network_refuses_parts_that_do_not_fit(arguments: dict[str, Any], sentence: str) -> None:
    parts: dict[str, Any] = {
        "extractor": nn.Flatten(),
        "equilibrium": OptEq(12, 4, 8),
        "head": nn.Linear(4, 2),
        "input_shape": (3, 2, 2),
    }
    with pytest.raises(ValueError, match=sentence):
        ImageNetwork(**{**parts, **arguments})


OUTSIDE = '''
import torch
from equipoise import Model

class Plain(Model):
    """A linear map of vectors, without an equilibrium."""

    def __init__(self, width, num_classes):
        super().__init__()
        self.map = torch.nn.Linear(width, num_classes)

    def prepare(self, x):
        if x.shape[1] != self.map.in_features:
            raise ValueError(f"The input of {self.name} must be longer.")
        return 2 * x

    def forward(self, x):
        return self.map(x)

def plain(*, width: int = 3, num_classes: int = 2):
    """Vectors, from outside.

    And more."""
    return Plain(width, num_classes)

def failing(*, width: int = 3):
    raise KeyError("lost")

def linear(*, width: int = 3):
    return torch.nn.Linear(width, 2)

def positional(width=3):
    return Plain(width, 2)

number = 5
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside_models.py").write_text(OUTSIDE)
    (tmp_path / "broken_models.py").write_text("raise RuntimeError('no such thing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_models", raising=False)


@pytest.mark.usefixtures("outside")
def test_model_from_outside_is_described_and_made() -> None:
    name = "outside_models:plain"
    assert model_info(name) == "Vectors, from outside."
    assert model_options(name) == ["num_classes", "width"]
    model = create_model(name, num_classes=4)
    assert model.name == name
    assert model.parameter_counts() == {"total": 16}
    assert model.equilibria() == {}
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), nn.functional.linear(2 * x, *model.parameters()))
    with pytest.raises(ValueError, match="The input of outside_models:plain must be longer"):
        model(torch.randn(5, 2))
    assert name not in list_models()


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent:plain", r"be imported; got 'absent:plain' \(ModuleNotFoundError: No module named"),
        ("broken_models:plain", r"'broken_models:plain' \(RuntimeError: no such thing\)\.$"),
        ("outside_models:plan", "name something in outside_models.*mean 'outside_models:plain'"),
        ("outside_models:number", "name a function; got 'outside_models:number', which is a int"),
        ("outside_models:positional", "have only keyword arguments with defaults; got 'width'"),
        (
            "outside_models:",
            "be written as package.module:name or file.py:name; got 'outside_models:'",
        ),
        (
            "out side:plain",
            "be written as package.module:name or file.py:name; got 'out side:plain'",
        ),
    ],
)
def test_model_from_outside_that_is_not_there_is_refused_in_one_sentence(
    name: str, sentence: str
) -> None:
    for ask in (create_model, model_info, model_options, partial(require_model, "model.name")):
        with pytest.raises(ValueError, match=rf"^model(\.name)? must .*{sentence}") as caught:
            ask(name)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("outside")
def test_model_from_outside_that_fails_says_whose_function_it_was() -> None:
    with pytest.raises(ValueError, match=r"its function raised KeyError: 'lost'\.$"):
        create_model("outside_models:failing")
    with pytest.raises(
        ValueError, match=r"^model 'outside_models:linear' must return a Model; got Linear\."
    ):
        create_model("outside_models:linear")
    with pytest.raises(ValueError, match=r"^Option of outside_models:plain must be one of"):
        create_model("outside_models:plain", depth=3)


class Pair(Model):
    """Two equilibria after each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OptEq(3, 4, 5), OptEq(4, 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_model_finds_its_equilibria_and_survives_copies() -> None:
    model = Pair()
    assert model.equilibria() == {"first": model.first, "second": model.second}
    assert find_equilibria(nn.Sequential(model)) == {
        "0.first": model.first,
        "0.second": model.second,
    }
    x = torch.randn(2, 3)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(x), model(x))
