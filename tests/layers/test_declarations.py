"""What cells say of themselves, and what wrappers pass on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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
