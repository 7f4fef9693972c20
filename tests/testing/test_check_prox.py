"""`check_activation` and `check_regularizer` say which part of a function does not fit."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from equipoise.core import require_positive
from equipoise.prox import Activation, Custom, Regularizer
from equipoise.testing import ContractError, check_activation, check_regularizer


@dataclass(frozen=True)
class Cube(Activation):
    """`s(a) = a / 2`, with parts that can be replaced by wrong ones."""

    wrong: str = ""

    def __call__(self, a):
        return a.abs() / 2 if self.wrong == "value" else a / 2

    def overwrite(self, a):
        return a if self.wrong == "overwrite" else self(a)

    def derivative(self, a):
        return torch.full_like(a, 1.0 if self.wrong == "derivative" else 0.5)

    def conjugate(self, y):
        return 2 * y.square() if self.wrong == "conjugate" else y.square()

    @property
    def slopes(self):
        return {"slopes": (0.5, 0.25), "loose": (0.0, 2.0)}.get(self.wrong, (0.5, 0.5))

    @property
    def admissible(self):
        return self.wrong != "admissible"

    def _integral(self, a):
        return a.square() / (3 if self.wrong == "potential" else 4)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("value", r"Cube\.derivative must be autograd's"),
        ("derivative", r"Cube\.derivative must be autograd's"),
        ("overwrite", r"Cube\.overwrite must return what the activation returns"),
        ("potential", r"Cube\.potential must be the integral"),
        ("conjugate", r"Cube\.conjugate must meet the potential .* S\(a\) \+ S\*\(s\(a\)\)"),
        ("slopes", r"Cube\.slopes must bound the slope .*; got \(0\.5, 0\.25\)"),
        ("loose", r"Cube\.slopes must be the infimum and the supremum"),
        ("admissible", r"Cube\.admissible must be True if and only if"),
    ],
)
def test_broken_activation_is_told(wrong, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_activation(Cube(wrong))


def test_honest_activation_passes():
    report = check_activation(Cube())
    assert report.skipped["conjugate_is_infinite_outside"] == "the range is the whole line"


def test_coupled_activation_needs_points():
    class Coupled(Cube):
        elementwise = False

    with pytest.raises(ValueError, match=r"^check_activation\.points must be a tensor of shape"):
        check_activation(Coupled())


@dataclass(frozen=True)
class Ridge(Regularizer):
    """`R(z) = size |z|^2/2`, with parts that can be replaced by wrong ones."""

    size: float = 2.0
    wrong: str = ""

    has_prox = True
    convex = True

    def __post_init__(self):
        if self.wrong != "settings":
            require_positive("Ridge.size", self.size)

    @property
    def lipschitz(self):
        return self.size * (0.5 if self.wrong == "lipschitz" else 1)

    def value(self, z):
        total = self.size * z.square().flatten(1).sum(dim=1) / 2
        if self.wrong == "samples":
            return total + total.mean()
        return total.sum() if self.wrong == "shape" else total

    def gradient(self, z):
        if self.wrong == "nan":
            return self.size * z.nan_to_num(nan=0.0)
        return (1.1 if self.wrong == "gradient" else 1) * self.size * z

    def _prox(self, z, gamma):
        return z / (1 + (1.05 if self.wrong == "prox" else 1) * gamma * self.size)


@dataclass(frozen=True)
class Dent(Ridge):
    """Not convex, but it says so."""

    def value(self, z):
        return -super().value(z)

    def gradient(self, z):
        return -super().gradient(z)


@dataclass(frozen=True)
class WrongEnvelope(Ridge):
    def envelope(self, z, gamma):
        return gamma * self.value(z)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("settings", r"Ridge\.size must be validated"),
        ("shape", r"Ridge\.value must return shape \(4,\)"),
        ("samples", r"Ridge\.value must treat each sample for itself.*Set coupled = True"),
        ("gradient", r"Ridge\.gradient must be autograd's gradient of the value"),
        ("nan", r"Ridge\.gradient must pass NaN on"),
        ("lipschitz", r"Ridge\.lipschitz must bound .*; got 1 where the gradient changes by 2"),
        ("prox", r"Ridge\.prox must minimise .* that another one beats by"),
    ],
)
def test_broken_regularizer_is_told(wrong, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_regularizer(replace(Ridge(), wrong=wrong))


def test_false_convexity_and_a_wrong_envelope_are_told():
    with pytest.raises(ContractError, match=r"Dent\.convex must be True only for a convex"):
        check_regularizer(Dent())
    with pytest.raises(ContractError, match=r"envelope must be the value that the proximal map"):
        check_regularizer(WrongEnvelope())


def test_honest_regularizer_passes():
    assert len(check_regularizer(Ridge()).passed) == 13


def test_regularizer_that_takes_no_state_is_told():
    def refuse(z):
        raise ValueError(f"no {math.prod(z.shape)}")

    with pytest.raises(ContractError, match=r"^Custom must take states of some shape"):
        check_regularizer(Custom(refuse))


def test_tight_lipschitz_constant_of_an_offset_passes():
    def offset(z):
        return ((z - 1).square() / 2).flatten(1).sum(dim=1)

    check_regularizer(Custom(offset, lipschitz=1.0, convex=True))
    with pytest.raises(ContractError, match="must bound the Lipschitz constant"):
        check_regularizer(Custom(offset, lipschitz=0.99, convex=True))
