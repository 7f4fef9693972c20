"""Equilibria of plain functions and their derivatives."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from cells import bounded
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from equipoise import (
    Anderson,
    ConvergenceError,
    ConvergenceWarning,
    Status,
    Stop,
    fixed_point,
    root,
    solve,
)

FLOAT = torch.float64


def tanh_map(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.T + x)


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor]:
    W = bounded(3, 3, 0.7).requires_grad_()
    x = torch.randn(4, 3, dtype=FLOAT, requires_grad=True)
    return torch.zeros(4, 3, dtype=FLOAT), W, x


def unrolled(function: Any, z: Any, *args: Any) -> Any:
    for _ in range(150):
        z = function(z, *args)
    return z


@pytest.mark.parametrize("solver", ["auto", "fixed_point", "anderson", "broyden", "newton"])
def test_fixed_point_and_its_gradients_are_those_of_a_long_unroll(
    solver: str, problem: tuple[Tensor, ...]
) -> None:
    z0, *args = problem
    z = fixed_point(tanh_map, z0, *args, solver=solver, tolerance=1e-12)
    wanted = unrolled(tanh_map, z0, *args)
    torch.testing.assert_close(z, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(z.square().sum(), args),
        torch.autograd.grad(wanted.square().sum(), args),
        rtol=1e-8,
        atol=1e-9,
    )


def test_fixed_point_has_derivatives_of_every_kind(problem: tuple[Tensor, ...]) -> None:
    z0, W, x = problem

    def call(W: Tensor, x: Tensor) -> Tensor:
        return fixed_point(tanh_map, z0, W, x, tolerance=1e-13)

    assert gradcheck(call, (W, x), check_forward_ad=True)
    assert gradgradcheck(call, (W, x))
    hessian = torch.func.hessian(lambda x: call(W.detach(), x).sum())(x.detach())
    wanted = torch.func.hessian(lambda x: unrolled(tanh_map, z0, W.detach(), x).sum())(x.detach())
    torch.testing.assert_close(hessian, wanted, rtol=1e-7, atol=1e-9)
    scales = torch.tensor([0.5, 1.0], dtype=FLOAT)
    several = torch.func.vmap(lambda s: call(s * W.detach(), x.detach()))(scales)
    for scale, one in zip(scales, several, strict=True):
        torch.testing.assert_close(one, call(scale * W, x).detach())


def test_arguments_are_trees_with_constants_inside(problem: tuple[Tensor, ...]) -> None:
    z0, W, x = problem
    Weights = namedtuple("Weights", ["W", "activation"])

    def step(z: Tensor, weights: Any, options: dict[str, Any]) -> Tensor:
        activation = getattr(torch, weights.activation)
        return activation(options["gain"] * z @ weights.W.T + options["inputs"][0])

    args = Weights(W, "tanh"), {"gain": 0.9, "inputs": [x, None, (4, 3)]}
    z = fixed_point(step, z0, *args, tolerance=1e-12)
    wanted = unrolled(step, z0, *args)
    torch.testing.assert_close(z, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(z.sum(), [W, x]), torch.autograd.grad(wanted.sum(), [W, x])
    )


def test_state_may_be_a_tree() -> None:
    x = torch.randn(3, 2, dtype=FLOAT, requires_grad=True)

    def step(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"fast": 0.1 * z["slow"] + x, "slow": 0.5 * z["fast"].tanh()}

    start = {"slow": torch.zeros_like(x), "fast": torch.zeros_like(x)}
    z, wanted = fixed_point(step, start, x, tolerance=1e-12), unrolled(step, start, x)
    torch.testing.assert_close(z, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(z["slow"].sum(), x), torch.autograd.grad(wanted["slow"].sum(), x)
    )


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(bounded(3, 3, 0.7))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return tanh_map(z, self.W, x)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self(z, x)


@pytest.mark.parametrize("how", ["module", "method"])
def test_parameters_of_a_module_get_gradients(how: str, problem: tuple[Tensor, ...]) -> None:
    z0, _, x = problem
    network = Network()
    function = network if how == "module" else network.step
    z = fixed_point(function, z0, x, tolerance=1e-12)
    wanted = unrolled(tanh_map, z0, network.W, x)
    torch.testing.assert_close(
        torch.autograd.grad(z.square().sum(), [network.W, x]),
        torch.autograd.grad(wanted.square().sum(), [network.W, x]),
        rtol=1e-8,
        atol=1e-9,
    )


@pytest.mark.parametrize("leaf", [True, False])
def test_trainable_tensor_in_a_closure_is_refused(leaf: bool, problem: tuple[Tensor, ...]) -> None:
    z0, W, x = problem
    held = W if leaf else 2 * W / 2
    sentence = (
        r"fixed_point\.f must get .* arguments; got one of shape \(3, 3\) that it closes over"
    )
    with pytest.raises(ValueError, match=sentence):
        fixed_point(lambda z: tanh_map(z, held, x.detach()), z0)
    with pytest.raises(ValueError, match=sentence):
        fixed_point(lambda z, x: tanh_map(z, held, x), z0, x)
    network = Network()
    with pytest.raises(ValueError, match=sentence):
        fixed_point(lambda z: network(z, x.detach()), z0)
    with torch.no_grad():
        fixed_point(lambda z: tanh_map(z, held, x), z0)
    fixed_point(lambda z, x: tanh_map(z, W.detach(), x), z0, x)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_transformed_tensor_in_a_closure_is_refused(
    transform: Any, problem: tuple[Tensor, ...]
) -> None:
    z0, W, x = (tensor.detach() for tensor in problem)
    with pytest.raises(ValueError, match="that it closes over"):
        transform(lambda W: fixed_point(lambda z: tanh_map(z, W, x), z0).sum())(W)
    transform(lambda W: fixed_point(lambda z, W: tanh_map(z, W, x), z0, W).sum())(W)


def laplace(z: Tensor, source: Tensor) -> Tensor:
    padded = nn.functional.pad(z, (1, 1))
    return (padded[:-2] + padded[2:] + source) / 2


def test_coupled_state_is_one_problem_of_any_shape() -> None:
    source = torch.randn(12, dtype=FLOAT, requires_grad=True)
    z0 = torch.zeros(12, dtype=FLOAT)
    solution = fixed_point(
        laplace, z0, source, coupled=True, solver="newton", tolerance=1e-12, return_solution=True
    )
    matrix = 2 * torch.eye(12, dtype=FLOAT)
    matrix -= torch.diag(torch.ones(11, dtype=FLOAT), 1) + torch.diag(
        torch.ones(11, dtype=FLOAT), -1
    )
    torch.testing.assert_close(solution.value, torch.linalg.solve(matrix, source))
    assert solution.status.shape == (1,)
    (found,) = torch.autograd.grad(solution.value.sum(), source)
    torch.testing.assert_close(found, torch.linalg.solve(matrix.T, torch.ones_like(source)))
    number = fixed_point(torch.cos, torch.tensor(1.0, dtype=FLOAT), coupled=True, tolerance=1e-12)
    torch.testing.assert_close(number, torch.tensor(0.7390851332151607, dtype=FLOAT))
    shapes = {"a": torch.zeros(2, dtype=FLOAT), "b": torch.zeros(3, 1, dtype=FLOAT)}
    tree = fixed_point(
        lambda z: {"a": 0.1 * z["b"].sum() + 0 * z["a"] + 1, "b": 0.1 * z["a"].sum() + 0 * z["b"]},
        shapes,
        coupled=True,
        tolerance=1e-12,
    )
    torch.testing.assert_close(tree["a"], torch.full((2,), 1 / (1 - 0.06), dtype=FLOAT))


def test_solution_tells_how_each_row_ended(problem: tuple[Tensor, ...]) -> None:
    z0, W, x = problem
    solution = fixed_point(
        tanh_map, z0, W, x, stop=Stop(1e-9, max_steps=70), trace=True, return_solution=True
    )
    assert solution.status.tolist() == [Status.CONVERGED] * 4
    assert solution.stop == Stop(1e-9, max_steps=70)
    assert solution.trace.residual.shape[1] == 4
    solution.value.sum().backward()
    assert solution.adjoint.converged.all()


def test_failure_is_never_silent(problem: tuple[Tensor, ...]) -> None:
    z0, W, x = problem
    options: dict[str, Any] = {"tolerance": 1e-12, "max_steps": 2, "solver": "fixed_point"}
    with pytest.warns(ConvergenceWarning, match="^fixed_point: 4 of 4 samples did not converge"):
        fixed_point(tanh_map, z0, W, x, **options)
    with pytest.raises(ConvergenceError, match=r"^fixed_point: 4 of 4"):
        fixed_point(tanh_map, z0, W, x, on_failure="raise", **options)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda z: fixed_point(3, z), r"fixed_point\.f must be a function; got int"),
        (lambda z: fixed_point(torch.tanh, z, coupled=1), r"coupled must be True or False"),
        (lambda z: fixed_point(torch.tanh, z, solver="newtn"), r"Did you mean 'newton'\?"),
        (lambda z: fixed_point(torch.tanh, z, tolerance=0), r"tolerance must be a positive number"),
        (lambda _: fixed_point(torch.tanh, 1.0), r"The state must be a tensor"),
        (lambda z: fixed_point(lambda z: z[:, :2], z), r"must return the shape of its state"),
    ],
)
def test_bad_calls_are_told_in_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(torch.zeros(4, 3, dtype=FLOAT))


def test_solve_picks_a_solver_by_itself(problem: tuple[Tensor, ...]) -> None:
    z0, W, x = (tensor.detach() for tensor in problem)
    found = solve(lambda z: tanh_map(z, W, x), z0)
    assert found.solver == solve(lambda z: tanh_map(z, W, x), z0, "auto").solver
    assert found.solver == Anderson(plain_rate=0.75)
    assert solve(lambda z: 0.5 * z, z0, symmetric=True).solver == Anderson()
    with pytest.raises(ValueError, match=r"solver must be one of .*auto"):
        solve(torch.tanh, z0, "best")


@pytest.mark.parametrize("solver", ["auto", "fixed_point", "anderson", "broyden", "newton"])
def test_entries_that_depend_on_each_other_are_not_solved_apart(solver: str) -> None:
    refused = 0
    for _ in range(5):
        source = torch.randn(12, dtype=FLOAT)
        try:
            found = fixed_point(
                laplace,
                torch.zeros(12, dtype=FLOAT),
                source,
                solver=solver,
                max_steps=3000,
                tolerance=1e-8,
                on_failure="ignore",
                return_solution=True,
            )
        except ValueError as error:
            assert "fixed_point.coupled must be True" in str(error)  # noqa: PT017
            refused += 1
        else:  # it may fail, or succeed, and say so
            f = laplace(found.value, source)
            assert ((f - found.value).abs() <= 1e-7 * f.abs())[found.converged].all()
    assert refused or solver == "broyden"


def test_state_and_arguments_may_be_complex() -> None:
    c = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)

    def step(z: Tensor, c: Tensor) -> Tensor:
        return 0.4 * torch.tanh(z) + c

    z = fixed_point(step, torch.zeros_like(c), c, tolerance=1e-12)
    wanted = unrolled(step, torch.zeros_like(c), c)
    torch.testing.assert_close(z, wanted, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad(z.abs().sum(), c),
        torch.autograd.grad(wanted.abs().sum(), c),
        rtol=1e-8,
        atol=1e-9,
    )


def test_messages_about_values_name_the_function():
    with pytest.raises(ValueError, match=r"^fixed_point\.f must return the shape of its state"):
        fixed_point(lambda z: z[:, :1], torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"^fixed_point\.f must keep the dtype of its state"):
        fixed_point(lambda z: z.double(), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"^root\.g must keep the dtype"):
        root(lambda z: z.double(), torch.zeros(3, 2))


def test_number_as_a_state_names_coupled():
    with pytest.raises(ValueError, match=r"^The state must be batch first.*coupled=True"):
        fixed_point(torch.cos, torch.tensor(0.0))
    found = fixed_point(torch.cos, torch.tensor(0.0), coupled=True)
    assert abs(float(found) - 0.7391) < 1e-3
