"""`check_model` passes an honest model and says what is wrong with others."""

import pytest
import torch
from torch import nn

from equipoise import OptEq
from equipoise.models import Model
from equipoise.testing import ContractError, check_model

X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Honest(Model):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(5, 3)
        self.equilibrium = OptEq(3, 3, 4, "tanh", tolerance=1e-5)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.equilibrium(self.into(x)))


class UnusedParameter(Honest):
    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2))


class LosesATensor(Honest):
    """Counts the mean of its inputs in a tensor that is saved nowhere."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean = x.mean(dim=0)
        return super().forward(x - self.mean)


class LearnsInEvaluation(Honest):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return super().forward(x)


class DrawsInEvaluation(Honest):
    def forward(self, x):
        return super().forward(x) + torch.rand(1)


class SeesTheBatch(Honest):
    def forward(self, x):
        return super().forward(x - x.mean(dim=0))


class WrongCounts(Honest):
    def parameter_counts(self):
        return {"out": 8, "total": 100}


class WrongEquilibria(Honest):
    def equilibria(self):
        return {"other": OptEq(3, 3, 4)}


class PreparesTwice(Honest):
    def prepare(self, x):
        return x / 2


class NotFinite(Honest):
    def forward(self, x):
        return super().forward(x) / 0


BROKEN = [
    (UnusedParameter, r"finite gradient other than zero; got none for spare"),
    (LosesATensor, r"state_dict must hold every tensor that training changes.*persistent"),
    (LearnsInEvaluation, r"leave its tensors alone in evaluation mode; got another calls"),
    (DrawsInEvaluation, r"must predict the same twice in evaluation mode"),
    (SeesTheBatch, r"predict each sample for itself in evaluation mode"),
    (WrongCounts, r"parameter_counts must give total = \d+ and parts that add up"),
    (WrongEquilibria, r"equilibria must return equilibrium layers that are modules of the model"),
    (PreparesTwice, r"prepare must leave samples alone that it has prepared"),
    (NotFinite, r"must return finite outputs for 4 samples"),
]


@pytest.mark.parametrize("source", [Honest, Honest(), "opteq-digits"], ids=str)
def test_honest_model_passes(source):
    x = None if source == "opteq-digits" else X
    assert len(check_model(source, x).passed) == 9


@pytest.mark.parametrize(("broken", "sentence"), BROKEN)
def test_broken_model_is_told(broken, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_model(broken, X)


def test_check_model_refuses_what_is_no_model():
    with pytest.raises(ValueError, match=r"^check_model\.model must be a Model; got Linear\."):
        check_model(nn.Linear(5, 2), X)
    with pytest.raises(ValueError, match=r"^check_model\.x must be given for a model without"):
        check_model(Honest())
