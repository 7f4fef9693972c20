"""The registry of models, and networks that users make themselves."""

from collections.abc import Iterator
from typing import Any, TypedDict, Unpack

import pytest
import torch
from torch import nn

from equipoise.families.opteq import OptEq
from equipoise.models import (
    Network,
    create_model,
    factory,
    list_models,
    model_info,
    model_options,
    register_model,
)


class Rest(TypedDict, total=False):
    alpha: float


def dense(*, width: int = 5, **rest: Unpack[Rest]) -> Network:
    """Vectors of twelve numbers.

    More about them.
    """
    return Network(nn.Flatten(), OptEq(12, width, 8, **rest), nn.Linear(width, 2), (3, 2, 2))


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
    def positional(width: int = 5) -> Network:
        return dense(width=width)

    def required(*, width: int) -> Network:
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
            r"Network.equilibrium must be an Equilibrium; got Linear\.",
        ),
        (
            {"input_shape": (12,)},
            r"Network.input_shape must be channels, height and width; got \(12,\)\.",
        ),
        ({"multiple": 0}, r"Network.multiple must be a whole number of at least 1; got 0\."),
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
        Network(**{**parts, **arguments})
