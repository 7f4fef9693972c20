"""The automatic adjoint follows the forward solve, and solves again before it reports failure."""

import pytest
import torch
from torch import Tensor, nn

from equipoise import (
    GMRES,
    Anderson,
    Broyden,
    Cell,
    ConjugateGradient,
    DenseLU,
    Equilibrium,
    FixedPoint,
    Implicit,
    Neumann,
    Newton,
    Status,
    Stop,
)
from equipoise.solvers.auto import pick_adjoint, solve_adjoint
from equipoise.testing.problems import affine_problem

TIGHT = Stop(tolerance=1e-12, max_steps=200)


class Expanding(Cell):
    """`z = tanh(z W^T) + x`, with eigenvalues of `W` on both sides of 1 and beyond -1."""

    def __init__(self, width: int = 6, radius: float = 1.8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        W = torch.randn(width, width, generator=generator, dtype=torch.float64)
        self.W = nn.Parameter(radius * W / torch.linalg.eigvals(W).abs().max())

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 0.9 * (z @ self.W.T) + 0.1 * torch.tanh(z) + context


def exact_adjoint(cell: Expanding, z: Tensor, g: Tensor) -> Tensor:
    J = 0.9 * cell.W + 0.1 * torch.diag_embed(1 - z.tanh().square())
    eye = torch.eye(z.shape[1], dtype=z.dtype)
    return torch.linalg.solve((eye - J).mT, g)


def batch(samples: int = 3, width: int = 6) -> Tensor:
    return torch.randn(samples, width, dtype=torch.float64, requires_grad=True)


def problem_of(width: int = 200, samples: int = 100, *, symmetric: bool = False):
    A = torch.zeros(1, width, width).expand(samples, width, width)
    return affine_problem(A, torch.zeros(samples, width), symmetric=symmetric)


@pytest.mark.parametrize(
    ("forward", "symmetric", "lipschitz", "expected"),
    [
        (Anderson(), False, None, Anderson),
        (FixedPoint(), False, 0.9, Anderson),
        (Newton(), False, None, GMRES),
        (Broyden(), False, None, GMRES),
        (Newton(), True, None, ConjugateGradient),
        (Anderson(), True, 0.9, ConjugateGradient),
        (Newton(), False, 0.1, Neumann),
        (Anderson(), True, 0.1, Neumann),
    ],
)
def test_adjoint_of_a_wide_batch_follows_the_forward_solver(
    forward, symmetric, lipschitz, expected
) -> None:
    problem = problem_of(symmetric=symmetric)
    found = pick_adjoint(problem, problem.g.shape, lipschitz=lipschitz, forward=forward, steps=60)
    assert isinstance(found, expected)


def test_adjoint_is_dense_where_that_is_cheaper() -> None:
    def chosen(forward, samples: int, width: int, steps: int):
        shape = (samples, width)
        return pick_adjoint(problem_of(3, 2), shape, lipschitz=None, forward=forward, steps=steps)

    assert isinstance(chosen(FixedPoint(), 4, 16, 30), DenseLU)
    assert isinstance(chosen(FixedPoint(), 4, 16, 3), Anderson)
    assert isinstance(chosen(FixedPoint(), 128, 128, 30), Anderson)
    assert isinstance(chosen(Newton(), 8, 64, 30), DenseLU)


@pytest.mark.parametrize("width", [6, 150])
@pytest.mark.parametrize("create_graph", [False, True])
def test_adjoint_after_newton_is_solved_at_a_radius_above_one(width: int, create_graph) -> None:
    cell = Expanding(width, radius=1.8)
    layer = Equilibrium(cell, "newton", on_failure="raise", stop=TIGHT)
    x = batch(8, width)
    z = layer(x)
    g = torch.randn_like(z)
    (found,) = torch.autograd.grad(z, x, g, create_graph=create_graph)
    assert layer.last.adjoint.converged.all()
    torch.testing.assert_close(found, exact_adjoint(cell, z, g), rtol=1e-7, atol=1e-8)


def test_derivatives_after_newton_pass_gradcheck_at_a_radius_above_one() -> None:
    layer = Equilibrium(Expanding(4), "newton", on_failure="raise", stop=TIGHT)
    x = batch(2, 4)

    def solved(x: Tensor, W: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"cell.W": W}, (x,))

    inputs = (x, layer.cell.W.detach().requires_grad_())
    assert torch.autograd.gradcheck(solved, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(solved, inputs)


@pytest.mark.parametrize("way", ["backward", "second", "forward"])
@pytest.mark.parametrize("width", [20, 60])
def test_samples_whose_adjoint_failed_are_solved_again(way: str, width: int) -> None:
    """Given its equilibrium, plain iteration succeeds forward, and the adjoint expands."""
    cell = Expanding(width)
    x = batch(40, width)
    start = Equilibrium(cell, "newton", on_failure="raise", stop=TIGHT)(x).detach()
    layer = Equilibrium(cell, "fixed_point", on_failure="raise", stop=Stop(1e-9))
    g = torch.randn_like(x)
    if way == "forward":
        _, found = torch.func.jvp(lambda x: layer(x, start), (x.detach(),), (g,))
        J = 0.9 * cell.W + 0.1 * torch.diag_embed(1 - start.tanh().square())
        expected = torch.linalg.solve(torch.eye(width, dtype=J.dtype) - J, g)
    else:
        create_graph = way == "second"
        (found,) = torch.autograd.grad(layer(x, start), x, g, create_graph=create_graph)
        expected = exact_adjoint(cell, start, g)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    adjoint = layer.last.adjoint
    assert adjoint.converged.all()
    assert isinstance(adjoint.solver, DenseLU | GMRES)


@pytest.mark.parametrize("can_drop_rows", [True, False])
def test_only_failed_samples_are_solved_again_and_work_adds_up(can_drop_rows: bool) -> None:
    rates = torch.tensor([0.1, 1.5, -2.0], dtype=torch.float64)
    A = rates[:, None, None] * torch.eye(5, dtype=torch.float64)
    g = torch.randn(3, 5, dtype=torch.float64)
    problem = affine_problem(A, g, can_drop_rows=can_drop_rows)
    stop = Stop(1e-9, absolute=0.0)
    found = solve_adjoint(problem, torch.zeros_like(g), g, Neumann(), stop)
    assert found.converged.all()
    assert isinstance(found.solver, DenseLU if can_drop_rows else GMRES)
    torch.testing.assert_close(found.value, g / (1 - rates[:, None]))
    # Plain iteration runs until the residuals of the two are a hundred million times the first.
    assert found.steps[0] < 12
    assert (found.steps[1:] > 20).all()
    assert (found.evaluations[1:] > found.steps[1:]).all()


def test_adjoint_that_nothing_solves_is_reported_with_its_best_value() -> None:
    A = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    g = torch.randn(2, 4, dtype=torch.float64)
    stop = Stop(1e-9, absolute=0.0)
    found = solve_adjoint(affine_problem(A, g), torch.zeros_like(g), g, Neumann(), stop)
    assert (found.status == Status.STALLED).all()
    assert isinstance(found.solver, DenseLU)
    assert (found.residual <= 1).all()


def test_a_named_adjoint_solver_is_not_replaced() -> None:
    cell = Expanding()
    layer = Equilibrium(cell, "newton", Implicit("neumann"), on_failure="ignore", stop=TIGHT)
    x = batch()
    layer(x).sum().backward()
    assert not layer.last.adjoint.converged.any()
    assert layer.last.adjoint.solver == Neumann()


def test_conjugate_gradient_that_ran_out_of_steps_is_not_followed_by_gmres() -> None:
    """GMRES keeps its directions, and finds no more than conjugate gradient in as many steps."""
    g = torch.ones(4, 400, dtype=torch.float64)
    A = torch.diag(torch.linspace(0, 0.9999, 400, dtype=torch.float64)).expand(4, -1, -1)
    problem = affine_problem(A, g, symmetric=True)
    solution = solve_adjoint(
        problem, torch.zeros_like(g), g, ConjugateGradient(), Stop(1e-12, max_steps=3)
    )
    assert isinstance(solution.solver, ConjugateGradient)
    assert solution.steps.tolist() == [3] * 4


def test_adjoint_that_is_as_exact_as_rounding_allows_is_not_solved_again() -> None:
    """GMRES would take the memory of its directions and find nothing better."""
    g = torch.ones(4, 400)
    A = torch.diag(torch.linspace(0, 0.9, 400)).expand(4, -1, -1)
    problem = affine_problem(A, g, symmetric=True)
    solution = solve_adjoint(
        problem, torch.zeros_like(g), g, ConjugateGradient(), Stop(1e-30, max_steps=200)
    )
    assert isinstance(solution.solver, ConjugateGradient)
    assert not solution.converged.any()
    assert (solution.residual < 2e-6).all()
