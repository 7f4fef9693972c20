"""Remedies name the settings that rule the solve, and never the solver that has just failed."""

import re

import pytest
import torch
from cells import TanhCell

from equipoise import (
    SOLVERS,
    ConvergenceError,
    Equilibrium,
    Implicit,
    Newton,
    Solution,
    Status,
    Stop,
    Unrolled,
)
from equipoise.solvers.policy import describe

FAILURES = [status for status in Status if status != Status.CONVERGED]


def failed(solver, status: Status, *, unrolled: bool = False, tolerance: float = 1e-4):
    count = torch.full((2,), 3)
    residual = torch.full((2,), 1e-6 if tolerance < 1e-6 else 0.1)
    stop = Stop(tolerance)
    codes = torch.full((2,), int(status))
    return Solution(
        None, codes, residual, count, count, stop=stop, solver=solver, unrolled=unrolled
    )


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-8])
@pytest.mark.parametrize("name", list(SOLVERS))
def test_remedy_names_the_right_settings_and_another_solver(
    name, tolerance, direction, status
) -> None:
    solver = SOLVERS.resolve(name)
    text = describe(failed(solver, status, tolerance=tolerance), direction)
    assert text.endswith(".")
    assert text.count(". ") == 0
    assert f"'{name}'" not in text
    quoted = set(re.findall(r"'(\w+)'", text))
    assert quoted <= set(SOLVERS)
    if direction == "forward":
        assert "Implicit(" not in text
        assert not any(SOLVERS[other].linear for other in quoted)
        assert ("damping" in text) <= hasattr(solver, "damping")
    else:
        bare = re.sub(r"Implicit\([^)]*\)", "", text)
        assert not re.search(r"max_steps|solver '|loosen tolerance", bare.split("):")[1])
        assert not any(SOLVERS[other].needs_symmetric for other in quoted)


@pytest.mark.parametrize("status", FAILURES)
@pytest.mark.parametrize("name", list(SOLVERS))
def test_remedy_of_unrolled_steps_is_theirs(name, status) -> None:
    text = describe(failed(SOLVERS.resolve(name), status, unrolled=True), "forward")
    assert "max_steps" not in text
    assert "solver" not in text
    assert ("Unrolled(steps=...)" in text) == (status == Status.MAX_STEPS)


def test_unrolled_layer_is_told_to_make_more_steps() -> None:
    layer = Equilibrium(TanhCell(), gradient=Unrolled(steps=1), on_failure="raise")
    with pytest.raises(ConvergenceError, match=r"raise Unrolled\(steps=\.\.\.\), loosen tolerance"):
        layer(torch.randn(5, 3, dtype=torch.float64))


def test_newton_is_not_told_to_try_newton() -> None:
    layer = Equilibrium(TanhCell(), Newton(), tolerance=1e-12, max_steps=1, on_failure="raise")
    with pytest.raises(ConvergenceError, match="or try solver 'broyden'"):
        layer(torch.randn(5, 3, dtype=torch.float64))


def test_gmres_in_backward_is_told_to_try_elimination() -> None:
    gradient = Implicit("gmres", tolerance=1e-12, max_steps=1)
    layer = Equilibrium(TanhCell(), gradient=gradient, on_failure="raise")
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    with pytest.raises(ConvergenceError, match=r"or try Implicit\(solver='dense'\)"):
        z.sum().backward()
