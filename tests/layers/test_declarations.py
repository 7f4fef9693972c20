"""What cells say of themselves, and what wrappers pass on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise.core.validate import SettingError
from equipoise.layers import (
    Cell,
    ChangeOfVariable,
    Equilibrium,
    Problem,
    Regularized,
    Skip,
    project_norms,
    project_norms_after,
)
from equipoise.layers.declarations import norm_limit_of, norms_of


class Scaled(Cell):
    """`z = factor z + x`, whose theorems hold for factors below 1/2."""

    projects = True

    def __init__(self, factor: float = 0.25) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.projections = 0

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return self.factor * z + context

    def lipschitz(self) -> Tensor:
        return self.factor.abs()

    @torch.no_grad()
    def project_(self) -> None:
        self.projections += 1
        self.factor.clamp_(-0.5, 0.5)


class Bare(Cell):
    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z / 2 + context


class Line(Problem):
    def describe(self) -> str:
        return "A line."


class Solving(Bare):
    def problem(self, x: Tensor) -> Problem:
        return Line()


def test_a_cell_that_says_nothing_promises_nothing() -> None:
    cell = Bare()
    assert cell.norms() == {}
    assert not cell.projects
    assert not cell.certificate().holds
    cell.project_()
    with pytest.raises(ValueError, match=r"^No problem is known for Bare\.$"):
        Skip(cell, 0.5).problem(torch.zeros(2, 3))


def test_wrappers_pass_on_bounds_and_projections() -> None:
    cell = Scaled()
    wrapped = Regularized(ChangeOfVariable(Skip(cell, 0.5), scale=3.0), "l1")
    assert cell.norms() == {"step": 0.25}
    assert wrapped.norms() == pytest.approx({"step": 0.625})
    assert wrapped.certificate().lipschitz == pytest.approx(0.625)
    assert wrapped.projects
    wrapped.project_()
    assert cell.projections == 1


def test_projection_runs_once_for_each_cell_and_after_each_step() -> None:
    cell = Scaled(3.0)
    model = nn.Sequential(Equilibrium(Skip(cell, 0.5), on_failure="ignore"), nn.Linear(3, 1))
    project_norms(model)
    assert cell.projections == 1
    assert cell.factor.item() == 0.5
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    handle = project_norms_after(optimizer, model)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert cell.projections == 3
    assert abs(cell.factor.item()) <= 0.5
    handle.remove()
    optimizer.step()
    assert cell.projections == 3


def test_a_problem_that_says_nothing_of_wrappers_is_refused_within_them() -> None:
    x = torch.zeros(2, 3)
    assert Solving().problem(x).describe() == "A line."
    assert Solving().problem(x).descent(None) is None
    for wrapped in (
        Skip(Solving(), 0.5),
        ChangeOfVariable(Solving(), scale=2.0),
        Regularized(Solving(), "l2"),
    ):
        name = type(wrapped).__name__
        with pytest.raises(ValueError, match=f"^No problem is known for {name} around"):
            wrapped.problem(x)


def test_a_change_of_variable_measures_the_matrix_that_it_loads() -> None:
    rotation = ChangeOfVariable(Scaled(), matrix=torch.eye(3))
    stretched = ChangeOfVariable(Scaled(), matrix=torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    assert (rotation.conformal, stretched.conformal) == (True, False)
    rotation.load_state_dict(stretched.state_dict())
    assert not rotation.conformal
    assert rotation.certificate().lipschitz == pytest.approx(0.75)


def test_a_change_of_variable_follows_a_matrix_that_is_written_to() -> None:
    cell = ChangeOfVariable(Scaled(0.5), matrix=torch.eye(3))
    assert cell.certificate().lipschitz == pytest.approx(0.5)
    matrix = torch.diag(torch.tensor([1.0, 10.0, 100.0]))
    matrix[0, 1] = 3.0
    for write in (cell.matrix.copy_, cell.matrix.data.copy_):
        cell.matrix.copy_(torch.eye(3))
        assert (cell.conformal, cell.condition) == (True, pytest.approx(1))
        write(matrix)
        assert not cell.conformal
        assert cell.condition == pytest.approx(float(torch.linalg.cond(matrix)), rel=1e-5)
        assert cell.certificate().lipschitz == pytest.approx(0.5 * cell.condition)
        assert cell.lipschitz().item() == pytest.approx(0.5 * cell.condition)
    z = torch.randn(2, 3)
    cell.matrix.copy_(2 * matrix)
    cell.inject(z)
    torch.testing.assert_close(cell.invert(cell.change(z)), z)
    cell.matrix.zero_()
    with pytest.raises(ValueError, match=r"^ChangeOfVariable\.matrix must be invertible"):
        cell.certificate()


def test_a_change_of_variable_can_be_cast() -> None:
    rotation = torch.linalg.qr(torch.randn(200, 200)).Q
    cell = ChangeOfVariable(Scaled(), matrix=rotation).to(torch.bfloat16)
    z = torch.randn(2, 200, dtype=torch.bfloat16)
    cell.inject(z)
    torch.testing.assert_close(cell.invert(cell.change(z)), z, atol=0.1, rtol=0.1)


class Declaring(Bare):
    """A cell that declares whatever it is given."""

    def __init__(self, declared: object) -> None:
        super().__init__()
        self.declared = declared

    def lipschitz(self):
        return self.declared


class Naming(Declaring):
    def norms(self):
        return self.declared


@pytest.mark.parametrize(
    "bound",
    [
        -5.0,
        -math.inf,
        math.nan,
        "0.5",
        True,
        0.5j,
        torch.tensor(-0.5),
        torch.tensor([0.5, 0.5]),
        torch.tensor(0.5 + 0j),
        np.array([[0.5], [0.5]]),
    ],
)
def test_what_is_no_lipschitz_constant_is_refused_by_name(bound: object) -> None:
    cell = Declaring(bound)
    for ask in (
        cell.certificate,
        cell.norms,
        Skip(cell, 0.5).certificate,
        Skip(cell, 0.5).lipschitz,
        lambda: Equilibrium(cell)(torch.zeros(2, 3)),
    ):
        with pytest.raises(SettingError, match=r"^Declaring\.lipschitz must be ") as caught:
            ask()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bound", [0.5, torch.tensor([0.5]), np.float32(0.5)])
def test_all_kinds_of_one_number_are_lipschitz_constants(bound: object) -> None:
    assert Declaring(bound).certificate().lipschitz == 0.5


@pytest.mark.parametrize("bound", [None, math.inf, 10**400])
def test_no_finite_lipschitz_constant_is_none(bound: object) -> None:
    assert Declaring(bound).certificate().lipschitz == math.inf
    assert Skip(Declaring(bound), 0.5).certificate().lipschitz == math.inf


def test_a_negative_constant_of_a_regularizer_is_refused() -> None:
    wrapped = Regularized(Scaled(), "incay", 0.5)
    kind = type(wrapped.regularizer)
    wrapped.regularizer = type("Wrong", (kind,), {"lipschitz": -9.0})()
    with pytest.raises(
        SettingError, match=r"^Wrong\.lipschitz must be in \[0, inf\]; got -9\.0\.$"
    ):
        wrapped.certificate()


def test_norms_are_numbers_by_name() -> None:
    assert norms_of(Naming({"a": torch.tensor([2.0]), "b": 3})) == {"a": 2.0, "b": 3.0}
    for wrong in (None, [1.0], {"a": "1"}, {"a": torch.ones(2)}, {1: 2.0}):
        for cell in (Naming(wrong), Skip(Naming(wrong), 0.5)):
            with pytest.raises(
                SettingError, match=r"^Naming\.norms must be a dict of numbers by name; got .*\.$"
            ):
                norms_of(cell)


def test_norms_have_a_limit_where_the_cell_names_one() -> None:
    assert norm_limit_of(Declaring(0.5)) == 1  # a bound of the step itself
    assert norm_limit_of(Naming({"a": 2.0})) is None
    for wrong in ("1", [1.0], lambda: 1.0):
        cell = type("Limited", (Naming,), {"norm_limit": wrong})({"a": 2.0})
        for each in (cell, Skip(cell, 0.5)):
            with pytest.raises(SettingError, match=r"^Limited\.norm_limit must be a number"):
                norm_limit_of(each)
    limited = type("Limited", (Naming,), {"norm_limit": 3})({"a": 2.0})
    assert norm_limit_of(Skip(limited, 0.5)) == 3


class Around(Scaled):
    """A cell with a cell inside, which it does not project; both note when they are projected."""

    def __init__(self, cell: Cell, order: list[Cell]) -> None:
        super().__init__(3.0)
        self.cell = cell
        self.order = order

    def project_(self) -> None:
        self.order.append(self)
        self.grad_enabled = torch.is_grad_enabled()
        super().project_()


def test_cells_within_cells_are_projected_first_and_once() -> None:
    order: list[Cell] = []
    inner = Around(Bare(), order)
    outer = Around(Skip(inner, 0.5), order)
    project_norms(nn.ModuleList([outer, Skip(outer, 0.5), inner]))
    assert order == [inner, outer]
    assert (inner.factor.item(), outer.factor.item()) == (0.5, 0.5)
    assert not inner.grad_enabled


class Rebinding(Scaled):
    def project_(self) -> None:
        self.factor = nn.Parameter(self.factor.detach().clamp(-0.5, 0.5))


class Method(Scaled):
    def projects(self) -> bool:
        return False


def test_projections_that_an_optimizer_would_miss_are_refused() -> None:
    with pytest.raises(
        SettingError,
        match=r"^Rebinding\.project_ must change parameters in place.*; got another parameter for "
        r"factor\. Use copy_ or mul_\.$",
    ):
        project_norms(Skip(Rebinding(3.0), 0.5))
    with pytest.raises(
        SettingError,
        match=r"^Method\.projects must be True or False; got a method\. Make it a property\.$",
    ):
        project_norms(Skip(Method(), 0.5))
