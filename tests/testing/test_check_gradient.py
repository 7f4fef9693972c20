"""`check_gradient` passes honest strategies and says what is wrong with others."""

from dataclasses import dataclass

import pytest
import torch

from equipoise import Implicit, JacobianFree
from equipoise.gradients import Gradient
from equipoise.testing import ContractError, check_gradient
from equipoise.testing.cells import CELLS

FEW = {"smooth": CELLS["smooth"]}


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, factor):
        ctx.factor = factor
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.factor * g, None


@dataclass(frozen=True)
class Scaled(Gradient):
    """One step at the equilibrium with a factor on its gradient."""

    factor: float = 1.0
    exact = False

    def attach(self, plan, z0, args):
        return Changed.apply(JacobianFree().attach(plan, z0, args), self.factor)


@dataclass(frozen=True)
class FalselyExact(Gradient):
    exact = True

    def attach(self, plan, z0, args):
        return JacobianFree().attach(plan, z0, args)


@dataclass(frozen=True)
class Inputs(Gradient):
    """Forgets the weights."""

    def attach(self, plan, z0, args):
        last = [arg.detach() for arg in args[1:]]
        return JacobianFree().attach(plan, z0, [args[0], *last]) + 0 * sum(a.sum() for a in args)


@dataclass(frozen=True)
class Hides(Gradient):
    """Turns NaN into zero."""

    def attach(self, plan, z0, args):
        z = JacobianFree().attach(plan, z0, args)
        z.register_hook(lambda g: g.nan_to_num(nan=0.0))
        return z


@dataclass(frozen=True)
class Elsewhere(Gradient):
    """Returns another state than it reports."""

    def attach(self, plan, z0, args):
        return JacobianFree().attach(plan, z0, args) + 1e-3


@pytest.mark.parametrize("gradient", [Implicit(), JacobianFree()], ids=str)
def test_honest_strategy_passes(gradient):
    report = check_gradient(gradient, cells=FEW)
    assert "gradient_points_downhill" in report.passed
    assert ("derivatives_pass_finite_differences" in report.passed) == gradient.exact


@pytest.mark.parametrize(
    ("gradient", "skip", "sentence"),
    [
        (Scaled(-1.0), ["settings_are_validated"], r"must give a direction of descent.*cosine"),
        (Scaled(0.0), ["settings_are_validated", "gradient_points_downhill"], r"no gradient for"),
        (Scaled(), [], r"Scaled\.factor must be validated"),
        (FalselyExact(), [], r"must agree with finite differences .* set exact = False"),
        (Inputs(), [], r"must reach every tensor .* no gradient for cell\.W"),
        (Hides(), [], r"must pass NaN on to the sample"),
        (Elsewhere(), [], r"must return the equilibrium of the 'smooth' cell"),
    ],
    ids=str,
)
def test_broken_strategy_is_told(gradient, skip, sentence):
    with pytest.raises(ContractError, match=sentence):
        check_gradient(gradient, cells=FEW, skip=skip)


def test_zero_for_a_failed_adjoint_is_told():
    skip = ["settings_are_validated", "gradient_points_downhill", "every_parameter_gets_a_gradient"]
    with pytest.raises(ContractError, match="never give a zero gradient for an adjoint solve"):
        check_gradient(Scaled(0.0), cells=FEW, skip=[*skip, "nan_is_passed_on"])
