"""What one call may set for itself, what it returns, and what differs in evaluation mode."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch
from cells import TanhCell, unroll
from torch import Tensor

from equipoise import (
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    FixedPoint,
    Implicit,
    JacobianFree,
    Newton,
    OptEq,
    Status,
    Stop,
    Unrolled,
    create_model,
)

FLOAT = torch.float64


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=FLOAT, requires_grad=True)


# the Solution of a call


@pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian_free", Unrolled(30)])
def test_solve_returns_the_output_with_its_gradients(gradient: object, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), gradient=gradient, tolerance=1e-8)
    solution = layer.solve(x)
    torch.testing.assert_close(solution.value, layer(x), rtol=0, atol=0)
    found = torch.autograd.grad(solution.value.sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert solution.status.tolist() == [Status.CONVERGED] * 5
    assert solution.residual.shape == solution.steps.shape == (5,)


def test_solve_applies_the_readout_and_leaves_last_detached(x: Tensor) -> None:
    class Doubled(TanhCell):
        def readout(self, z: Tensor, context: Tensor) -> Tensor:
            return 2 * z

    layer = Equilibrium(Doubled())
    solution = layer.solve(x)
    assert solution.value.requires_grad
    assert not layer.last.value.requires_grad
    torch.testing.assert_close(solution.value.detach(), 2 * layer.last.value, rtol=0, atol=0)


def test_solution_of_a_call_gets_the_adjoint_of_that_call(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    first, second = layer.solve(x), layer.solve(x[:2])
    assert first.adjoint is None
    first.value.sum().backward()
    assert first.adjoint is not None
    assert first.adjoint.status.shape == (5,)
    assert second.adjoint is None


def test_solution_of_a_call_is_freed_with_its_last_reference(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    solution = layer.solve(x)
    alive = weakref.ref(solution.value)
    gc.disable()
    try:
        del solution
        assert alive() is None  # no cycle keeps the graph until the collector runs
    finally:
        gc.enable()


def test_concurrent_calls_get_their_own_solutions() -> None:
    layer = Equilibrium(TanhCell(norm=0.9), "fixed_point", tolerance=1e-10, max_steps=1000)
    inputs = [torch.randn(n, 3, dtype=FLOAT) for n in range(1, 9)]
    with torch.no_grad():
        wanted = [layer.solve(one) for one in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                found = layer.solve(inputs[index])
                same = torch.equal(found.value, wanted[index].value)
                if not same or not torch.equal(found.steps, wanted[index].steps):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_solve_under_vmap_is_refused(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    with pytest.raises(ValueError, match="outside of vmap"):
        torch.func.vmap(lambda one: layer.solve(one[None]).value)(x.detach())


# options of a call


def test_call_options_hold_for_one_call(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.9), tolerance=1e-3)
    tight = layer.solve(x, tolerance=1e-12, max_steps=500, solver="newton")
    assert isinstance(tight.solver, Newton)
    assert tight.stop == Stop(1e-12, max_steps=500)
    assert tight.residual.max() <= 1e-12
    torch.testing.assert_close(tight.value, unroll(layer.cell, x), rtol=1e-9, atol=1e-9)
    plain = layer.solve(x)
    assert plain.stop == layer.stop == Stop(1e-3)
    assert isinstance(plain.solver, Anderson)


def test_call_options_change_one_number_of_the_stopping_rule(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), stop=Stop(1e-3, patience=7))
    assert layer.solve(x, tolerance=1e-5).stop == Stop(1e-5, patience=7)
    assert layer.solve(x, stop=Stop(1e-6)).stop == Stop(1e-6)
    assert layer.solve(x, stop=None).stop == layer.stop


def test_call_gradient_is_used_by_that_call(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    other = Equilibrium(layer.cell, gradient=JacobianFree(), tolerance=1e-10)
    (found,) = torch.autograd.grad(layer(x, gradient="jacobian_free").sum(), x)
    (wanted,) = torch.autograd.grad(other(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_call_policy_applies_forward_and_backward(x: Tensor) -> None:
    layer = Equilibrium(
        TanhCell(norm=0.99), "fixed_point", Implicit("neumann", 1e-12, 2), tolerance=1e-3
    )
    with pytest.raises(ConvergenceError, match="did not converge"):
        layer(x, max_steps=1, tolerance=1e-12, on_failure="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x, max_steps=1, on_failure="ignore").sum().backward()
    with pytest.raises(ConvergenceError, match="backward solve"):
        layer(x, solver="anderson", on_failure="raise").sum().backward()
    with pytest.warns(ConvergenceWarning):
        layer(x, max_steps=1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tolerence": 1e-3}, r"got 'tolerence'\. Did you mean 'tolerance'\?"),
        ({"tolerance": -1}, r"Stop.tolerance must be a positive number; got -1"),
        ({"max_steps": 0}, r"Stop.max_steps must be a whole number of at least 1; got 0"),
        ({"solver": "newtn"}, r"Did you mean 'newton'\?"),
        ({"gradient": "implicit "}, r"Did you mean 'implicit'\?"),
        ({"on_failure": "explode"}, r"on_failure must be one of ignore, raise, warn"),
        ({"stop": 1e-3}, r"stop must be a Stop; got float"),
        ({"stop": Stop(), "tolerance": 1e-3}, r"without tolerance and max_steps"),
        ({"eval_options": {}}, r"got 'eval_options'"),
    ],
)
def test_bad_options_are_refused_by_call_and_constructor(
    options: dict, sentence: str, x: Tensor
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell())(x, **options)
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell(), eval_options=options)


# evaluation mode


def test_eval_options_hold_in_evaluation_mode_alone(x: Tensor) -> None:
    layer = Equilibrium(
        TanhCell(norm=0.9), tolerance=1e-3, eval_options={"tolerance": 1e-9, "solver": "newton"}
    )
    assert layer.solve(x).stop == Stop(1e-3)
    evaluated = layer.eval().solve(x)
    assert evaluated.stop == Stop(1e-9)
    assert isinstance(evaluated.solver, Newton)
    assert layer.solve(x, tolerance=1e-5).stop == Stop(1e-5)  # the call has the last word
    assert isinstance(layer.train().solve(x).solver, Anderson)
    assert "eval_options={'tolerance': 1e-09, 'solver': Newton(" in repr(layer)
    assert "eval_options" not in repr(Equilibrium(TanhCell()))


def test_eval_options_may_return_to_the_automatic_solver(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), "fixed_point", eval_options={"solver": "auto"}).eval()
    assert isinstance(layer.solve(x).solver, Anderson)


def test_eval_options_pass_through_families_and_models() -> None:
    options = {"tolerance": 1e-7, "solver": FixedPoint()}
    layer = OptEq(3, 4, 5, eval_options=options)
    assert layer.eval().solve(torch.randn(2, 3)).stop.tolerance == 1e-7
    model = create_model("opteq-digits", eval_options={"tolerance": 1e-6})
    (inner,) = [child for child in model.modules() if isinstance(child, Equilibrium)]
    model.eval()(torch.rand(2, 1, 8, 8))
    assert inner.last.stop.tolerance == 1e-6
