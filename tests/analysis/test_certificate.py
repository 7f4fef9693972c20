from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from samples import opteq
from torch import Tensor, nn

from equipoise.analysis import certify, objective
from equipoise.core.validate import SettingError
from equipoise.families.opteq import OptEq, OptEqConv2d
from equipoise.layers import (
    Cell,
    Certificate,
    ChangeOfVariable,
    Equilibrium,
    Factor,
    Link,
    Regularized,
    Skip,
    Statement,
    project_norms,
)
from equipoise.prox.regularizer import Custom


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_certificate_bounds_every_layer_and_their_product() -> None:
    layer, x = opteq([5, 9], 6, ["relu", "sigmoid"], norm=0.9, mu=1.5, alpha=[0.8, 0.5])
    found = certify(layer)
    norms = [
        float(torch.linalg.matrix_norm(operator.weight.detach(), 2))
        for operator in layer.layers.operators
    ]
    assert [one.norm for one in found.factors] == pytest.approx(norms, rel=1e-10)
    assert all(one.norm >= norm for one, norm in zip(found.factors, norms, strict=True))
    values = [one.value for one in found.factors]
    assert values == pytest.approx([0.8 * 0.81 + 0.2, 0.5 * 0.81 + 0.5])
    assert found.lipschitz == pytest.approx(math.prod(values))
    assert found.contracts
    # The step at random points never stretches more than certified.
    f, y, z = layer.map(x), 3 * normal(3, 6), 3 * normal(3, 6)
    assert ((f(y) - f(z)).norm(dim=1) <= found.lipschitz * (y - z).norm(dim=1)).all()


def test_certificate_is_attained_by_a_linear_layer() -> None:
    layer, x = opteq(6, 6, "identity", norm=0.9, alpha=0.7)
    J = torch.func.jacrev(lambda z: layer.map(x)(z[None].expand(3, 6))[0])(normal(6))
    assert certify(layer).lipschitz == pytest.approx(
        float(torch.linalg.matrix_norm(J.detach(), 2)), rel=1e-10
    )


def test_certificate_bounds_the_distance_to_the_equilibrium() -> None:
    layer, x = opteq(20, 12, "relu", norm=0.99)
    exact, found = layer(x).detach(), certify(layer)
    for size in (1.0, 1e-3):
        z = exact + size * normal(3, 12)
        residual = (layer.map(x)(z) - z).norm(dim=1).detach()
        assert ((z - exact).norm(dim=1) <= found.error(residual)).all()
    assert found.error(0.5) == pytest.approx(0.5 / (1 - found.lipschitz))


def test_certificate_reads_well() -> None:
    found = Certificate(
        (Link("OptEqCell", 0.39361), Link("Skip", 0.50991)),
        (Factor("layer 1", 0.98412, 0.98999), Factor("layer 2", 0.4, 0.5)),
    )
    assert str(found) == (
        "Lipschitz constant at most 0.5100: one equilibrium for every input.\n"
        "  layer 1: |W| <= 0.9900, factor 0.9842\n"
        "  layer 2: |W| <= 0.5000, factor 0.4000\n"
        "  Skip: 0.5100 so far"
    )


def test_certify_names_the_layer_that_is_too_large_and_the_remedy() -> None:
    layer, _ = opteq([5, 9], 6, norm=0.9)
    with torch.no_grad():
        layer.layers.operators[1].weight.mul_(2)
    with pytest.raises(
        ValueError,
        match=r"must have a Lipschitz constant below 1; got 2\.36\d+, because layer 2 of 2 has "
        r"the factor 2\.792 "
        r"\(\|W\| <= 1\.8\)\. Use norm='scale', or norm='project' with project_norms\.$",
    ):
        certify(layer)
    found = certify(layer, strict=False)
    assert not found.contracts
    assert "not certified" in str(found)
    with pytest.raises(ValueError, match=r"Certificate\.error must be asked of a contraction"):
        found.error(1.0)
    layer.layers.norm = "project"
    with pytest.raises(ValueError, match=r"Call project_norms after each optimiser step\.$"):
        certify(layer)
    project_norms(layer)
    assert certify(layer).contracts
    with torch.no_grad():
        layer.layers.operators[1].weight.mul_(2)
    layer.layers.norm = "scale"
    assert certify(layer).factors[1].norm == pytest.approx(0.99)


def test_certify_allows_one_layer_to_expand_if_the_others_make_up_for_it() -> None:
    layer, _ = opteq([5, 9], 6, norm=0.6, alpha=1.0)
    with torch.no_grad():
        layer.layers.operators[1].weight.mul_(2)
    assert certify(layer).lipschitz == pytest.approx(0.36 * 1.44)


def around(cell) -> Equilibrium:
    return Equilibrium(cell)


def test_certify_follows_changes() -> None:
    layer, _ = opteq(6, 6, norm=0.8, alpha=1.0)
    cell = layer.layers
    assert certify(around(Skip(cell, 0.5))).lipschitz == pytest.approx(0.5 * 0.64 + 0.5)
    assert certify(around(ChangeOfVariable(cell, scale=7.0, shift=3.0))).lipschitz == pytest.approx(
        0.64
    )
    rotation = torch.linalg.qr(normal(6, 6)).Q
    assert certify(around(ChangeOfVariable(cell, matrix=3 * rotation))).lipschitz == pytest.approx(
        0.64
    )
    stretched = ChangeOfVariable(
        cell, matrix=torch.diag(torch.linspace(1, 1.5, 6, dtype=torch.float64))
    )
    assert certify(around(stretched)).lipschitz == pytest.approx(0.96)
    assert certify(around(Regularized(cell, "l1", 5.0))).lipschitz == pytest.approx(0.64)
    assert certify(around(Regularized(cell, "l2", 1.9, "gradient"))).lipschitz == pytest.approx(
        0.64
    )
    assert certify(around(Regularized(cell, "incay", 0.5))).lipschitz == pytest.approx(0.96)
    found = certify(around(Skip(Regularized(cell, "incay", 0.5), 0.5)))
    assert [name for name, _ in found.chain] == ["OptEqCell", "Regularized", "Skip"]
    assert [bound for _, bound in found.chain] == pytest.approx([0.64, 0.96, 0.98])


def test_certify_refuses_changes_that_break_the_proof() -> None:
    layer, _ = opteq(6, 6, norm=0.8, alpha=1.0)
    cell = layer.layers
    with pytest.raises(
        ValueError,
        match=r"got 0\.64 for its layers but 1\.28 after Regularized\. Use a convex regulariser",
    ):
        certify(around(Regularized(cell, "incay", 1.0)))
    unknown = Regularized(cell, Custom(lambda z: z.sum(dim=1)))
    with pytest.raises(
        ValueError, match=r"got 0\.64 for its layers but no known constant after Regularized"
    ):
        certify(around(unknown))
    found = certify(around(unknown), strict=False)
    assert found.lipschitz == math.inf
    assert "unknown" in str(found)
    steep = ChangeOfVariable(cell, matrix=torch.diag(torch.linspace(1, 3, 6, dtype=torch.float64)))
    with pytest.raises(
        ValueError, match=r"got 0\.64 for its layers but 1\.92 after ChangeOfVariable"
    ):
        certify(around(steep))


def test_certify_holds_for_convolutions_at_every_image_size() -> None:
    layer = OptEqConv2d(2, 3, [4, 5], 3, "tanh", learn_alpha=True)
    with torch.no_grad():
        for operator in layer.layers.operators:
            operator.scale_(10.0)
    found = certify(layer)
    assert [one.norm for one in found.factors] == pytest.approx([0.99, 0.99], rel=1e-5)
    assert found.lipschitz == pytest.approx((0.8 * 0.99**2 + 0.2) ** 2, rel=1e-5)
    for size in (3, 4, 11):
        x = torch.randn(2, 2, size, size)
        f, y, z = layer.map(x), torch.randn(2, 3, size, size), torch.randn(2, 3, size, size)
        assert (
            (f(y) - f(z)).flatten(1).norm(dim=1) <= found.lipschitz * (y - z).flatten(1).norm(dim=1)
        ).all()


def test_certify_refuses_other_layers() -> None:
    with pytest.raises(
        ValueError,
        match=r"certify\.layer must be an Equilibrium, such as OptEq or OptEqConv2d; got Linear",
    ):
        certify(nn.Linear(3, 3))  # type: ignore[arg-type]


def test_default_layers_are_certified() -> None:
    assert certify(OptEq(3, 5, [7, 8])).contracts


class Halving(Cell):
    """A user's cell that declares its bound."""

    bound: float | None = 0.5

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z / 2 + context)

    def lipschitz(self) -> float | None:
        return self.bound


def test_certify_believes_what_a_cell_declares_and_says_so() -> None:
    found = certify(Equilibrium(Halving()))
    assert found.contracts
    assert str(found) == (
        "Lipschitz constant at most 0.5000: one equilibrium for every input.\n"
        "  Halving.lipschitz declares 0.5"
    )
    statement, rate = found.statements
    assert (rate.holds, rate.number) == (True, 0.5)
    assert (statement.holds, statement.number, statement.margin) == (True, 0.5, 0.5)
    assert "Halving.lipschitz declares 0.5" in statement.theorem
    assert certify(Equilibrium(Skip(Halving(), 0.5))).lipschitz == 0.75


def test_certify_refuses_a_cell_of_which_nothing_is_known() -> None:
    cell = Halving()
    cell.bound = None
    with pytest.raises(
        ValueError,
        match=r"^certify\.layer must have a Lipschitz constant below 1; got Halving, of which none "
        r"is known\. Define lipschitz or certificate of Halving\.$",
    ):
        certify(Equilibrium(Skip(cell, 0.5)))
    found = certify(Equilibrium(cell), strict=False)
    assert found.statements[0].holds is None
    assert str(found) == "Lipschitz constant unknown: not certified."
    cell.bound = 1.25
    with pytest.raises(ValueError, match=r"below 1; got 1\.25\.$"):
        certify(Equilibrium(cell))


class Monotone(Halving):
    """A family whose proof is no contraction."""

    bound = None
    margin = 0.25

    def certificate(self) -> Certificate:
        holds = self.margin > 0
        claim = Statement(
            "one equilibrium",
            holds or None,
            1 - self.margin,
            self.margin,
            "Ours, 1",
            unique=True,
        )
        return Certificate(
            (Link("Monotone", math.inf),), further=(claim,), remedy="Call project_norms."
        )


def test_certify_takes_other_proofs_through_wrappers_that_keep_the_equilibria() -> None:
    cell = Monotone()
    found = certify(Equilibrium(ChangeOfVariable(Skip(cell, 0.5), scale=3.0)))
    assert (found.holds, found.contracts) == (True, False)
    assert str(found).startswith("one equilibrium: proved, 0.75 with a margin of 0.25 (Ours, 1)\n")
    with pytest.raises(ValueError, match=r"got Monotone, of which none is known"):
        certify(Equilibrium(Regularized(cell, "l2")))
    cell.margin = -0.5
    with pytest.raises(
        ValueError,
        match=r"^certify\.layer must have a proof of what it claims; got one equilibrium: "
        r"not proved, 1\.5 with a margin of -0\.5 \(Ours, 1\)\. Call project_norms\.$",
    ):
        certify(Equilibrium(cell))


def test_certify_of_a_model_names_each_of_its_equilibria() -> None:
    model = nn.Sequential(OptEq(3, 5, 7), nn.Linear(5, 3), OptEq(3, 5, 7, norm="none"))
    with torch.no_grad():
        model[2].layers.operators[0].scale_(10.0)
    found = certify(model, strict=False)
    assert {name: one.contracts for name, one in found.items()} == {"0": True, "2": False}
    with pytest.raises(ValueError, match=r"^certify\.2 must have a Lipschitz constant below 1"):
        certify(model)


class Claiming(Halving):
    """`z = tanh(3z + x)`, which has up to three equilibria, with a certificate of any claims."""

    def __init__(self, *claims: Statement, bound: float = math.inf) -> None:
        super().__init__()
        self.claims, self.number = claims, bound

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(3 * z + context)

    def certificate(self) -> Certificate:
        return Certificate((Link("Claiming", self.number),), further=self.claims)


def test_certify_asks_for_a_proof_of_one_equilibrium() -> None:
    bounded, one = Statement("bounded", True), Statement("one equilibrium", True, unique=True)
    wrong, unclear = Statement("monotone", False), Statement("bounded", None)
    with pytest.raises(ValueError, match=r"must have a Lipschitz constant below 1; got Claiming"):
        certify(Equilibrium(Claiming(bounded)))
    found = certify(Equilibrium(Claiming(bounded)), strict=False)
    assert [claim.holds for claim in found.statements] == [None, True]
    assert certify(Equilibrium(Claiming(one, unclear))).holds
    assert certify(Equilibrium(Claiming(unclear, bound=0.5))).holds
    for cell in (Claiming(one, wrong), Claiming(wrong, bound=0.5)):
        with pytest.raises(ValueError, match=r"a proof of what it claims; got monotone: refuted\."):
            certify(Equilibrium(cell))


def test_only_claims_of_one_equilibrium_survive_a_change_of_the_equilibria() -> None:
    one = Statement("one equilibrium", True, unique=True)
    cell = Claiming(one, Statement("equilibria are in [-1, 1]", True), Statement("monotone", False))
    for wrapped in (Skip(cell, 0.5), ChangeOfVariable(cell, scale=9.0)):
        assert certify(Equilibrium(wrapped)).further == (one,)
    assert certify(Equilibrium(Regularized(cell, "l2")), strict=False).further == ()


def test_statements_and_certificates_refuse_what_they_cannot_be() -> None:
    for wrong in (1, "yes", torch.tensor(True)):
        with pytest.raises(SettingError, match=r"^Statement\.holds must be True, False or None"):
            Statement("a", wrong)  # type: ignore[arg-type]
    for number in (-5.0, math.nan, "0.5"):
        with pytest.raises(SettingError, match=r"^Ours\.lipschitz must be in \[0, inf\]"):
            Certificate((Link("Ours", number),))  # type: ignore[arg-type]


def test_a_cell_that_answers_something_else_is_named() -> None:
    cell, x = Halving(), torch.zeros(2, 3)
    cell.certificate = lambda: "proved"  # type: ignore[assignment, method-assign, return-value]
    cell.problem = lambda _: "minimise"  # type: ignore[assignment, method-assign, return-value]
    for wrapped in (cell, Skip(cell, 0.5)):
        layer = Equilibrium(wrapped)
        with pytest.raises(
            SettingError, match=r"^Halving\.certificate must be a Certificate; got str\.$"
        ):
            certify(layer)
        with pytest.raises(
            SettingError, match=r"^Halving\.problem must be a Problem, .*; got str\.$"
        ):
            objective(layer, x)


def test_certify_refuses_buffers_that_hold_nan() -> None:
    wrapped = ChangeOfVariable(Halving(), shift=1.0)
    assert wrapped.shift is not None
    wrapped.shift.fill_(math.nan)
    with pytest.raises(ValueError, match=r"must have buffers without NaN; got NaN in shift"):
        certify(Equilibrium(wrapped))


def test_huge_weights_are_not_certified() -> None:
    layer, _ = opteq([5, 9], 6, norm=0.9)
    with torch.no_grad():
        layer.layers.operators[0].weight.fill_(1e160)
    found = certify(layer, strict=False)
    assert found.lipschitz == math.inf
    assert "not certified" in str(found)
    with pytest.raises(ValueError, match=r"^certify\.layer must have a Lipschitz constant below 1"):
        certify(layer)


@pytest.mark.parametrize(
    ("bound", "first"),
    [
        (0.99999999, "at most 0.99999999: one equilibrium"),
        (1 - 2.0**-53, "at most 0.9999999999999999: one equilibrium"),
        (1.0, "at most 1.0000: not certified"),
        (1.00000001, "at most 1.0001: not certified"),
        (1e20, "at most 1e+20: not certified"),
        (1.234561e300, "at most 1.2346e+300: not certified"),
    ],
)
def test_printed_bounds_are_upper_bounds_on_the_right_side_of_one(bound: float, first: str) -> None:
    found = Certificate((Link("Ours", bound),), (Factor("layer 1", bound, -math.inf),))
    assert str(found).startswith(f"Lipschitz constant {first}")
    assert "|W| <= unknown" in str(found)


def test_declared_bounds_are_not_rounded_down() -> None:
    cell = Halving()
    for bound, printed in ((0.30004, "0.3001"), (0.99999999, "0.99999999"), (0.3, "0.3")):
        cell.bound = bound
        assert str(cell.certificate()).endswith(f"Halving.lipschitz declares {printed}")
    cell.bound = 1.00000001
    with pytest.raises(ValueError, match=r"below 1; got 1\.00000001\.$"):
        certify(Equilibrium(cell))


class Flipped(type(OptEq(3, 4, 8).cell)):  # type: ignore[misc]
    def step(self, z: Tensor, context: object) -> Tensor:
        return -3 * super().step(z, context)


class Doubled(Halving):
    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 4 * super().step(z, context)


class Stretched(Skip):
    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 4 * super().step(z, context)


def flipped() -> Cell:
    cell = OptEq(3, 4, 8).cell
    cell.__class__ = Flipped
    return cell


@pytest.mark.parametrize(
    ("make", "who"),
    [
        (flipped, "Flipped has a step of its own"),
        (lambda: Skip(flipped(), 0.5), "Flipped has a step of its own"),
        (lambda: Regularized(flipped(), "l2", 0.1), "Flipped has a step of its own"),
        (Doubled, "Doubled has a step of its own"),
        (lambda: Stretched(Halving(), 0.5), "Stretched has a step of its own"),
    ],
)
def test_certify_does_not_believe_what_a_subclass_inherits(make, who) -> None:
    layer = Equilibrium(make())
    found = certify(layer, strict=False)
    assert (found.holds, found.lipschitz) == (False, math.inf)
    assert who in found.statements[0].theorem
    assert found.remedy.startswith("Define certificate of ")
    with pytest.raises(ValueError, match=who):
        certify(layer)


def test_certify_does_not_believe_a_cell_with_a_hook() -> None:
    layer = OptEq(3, 4, 8)
    layer.cell.register_forward_hook(lambda _, __, z: 100 * z)
    found = certify(layer, strict=False)
    assert not found.holds
    assert "a forward hook may change its output" in str(found)


class LouderLayer(OptEq):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return 100 * super().forward(x, **options)


def test_certify_does_not_believe_a_layer_with_a_forward_of_its_own() -> None:
    layer = LouderLayer(3, 4, 8)
    why = "LouderLayer has a forward of its own, of which its cell's certificate knows nothing"
    found = certify(layer, strict=False)
    assert (found.holds, found.lipschitz) == (False, math.inf)
    assert why in str(found)
    with pytest.raises(ValueError, match=why):
        certify(nn.Sequential(layer))
    assert certify(Equilibrium(layer.cell)).holds


def test_certify_changes_nothing_in_a_model_in_training() -> None:
    cell = Halving()
    cell.bound = None
    norm, frozen = nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval()
    model = nn.Sequential(norm, frozen, Equilibrium(cell))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = certify(model, torch.randn(8, 3) + 5, strict=False)["2"]
    assert found.further[0].claim.startswith("measured spectral radius")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.training, norm.training, frozen.training) == (True, True, False)
    assert model[2].last is None
