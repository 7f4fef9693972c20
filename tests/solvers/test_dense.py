"""Linear equations by elimination, alone and inside Newton's method."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from equipoise import Cell, DenseLU, Equilibrium, Implicit, Newton, Status, Stop, solve
from equipoise.solvers import linear_problem, newton, run
from equipoise.testing.problems import affine_problem, contraction

STOP = Stop(1e-12, absolute=0.0)


def find(A: Tensor, g: Tensor, *, stop: Stop = STOP, **options):
    return run(affine_problem(A, g, **options), torch.zeros_like(g), DenseLU(), stop, f=g)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("can_drop_rows", [True, False])
@pytest.mark.parametrize("block", [1, 40, 2**20])
def test_dense_solves_what_numpy_solves(monkeypatch, transpose, can_drop_rows, block) -> None:
    monkeypatch.setattr(linear_problem, "MAX_BLOCK", block)
    A = 3 * torch.randn(5, 9, 9, dtype=torch.float64)
    g = torch.randn(5, 9, dtype=torch.float64)
    found = find(A, g, transpose=transpose, can_drop_rows=can_drop_rows)
    matrix = np.eye(9) - (A.mT if transpose else A).numpy()
    witness = np.linalg.solve(matrix, g.numpy()[..., None])[..., 0]
    assert found.converged.all()
    assert found.steps.max() <= 2
    np.testing.assert_allclose(found.value.numpy(), witness, rtol=1e-9)


def test_dense_refines_in_float32() -> None:
    basis = torch.linalg.qr(torch.randn(20, 20))[0]
    A = basis @ torch.linspace(-0.9, 0.999, 20).diag() @ basis.T
    found = find(A.expand(3, 20, 20), torch.randn(3, 20), stop=Stop(3e-6, absolute=0.0))
    assert found.converged.all()


@pytest.mark.parametrize("tilt", [0.0, 1e-17])
def test_dense_never_calls_a_singular_equation_without_solution_solved(tilt: float) -> None:
    """`v = P v + g` with a projection `P` has solutions only for `g` in the range of `I - P`."""
    direction = torch.randn(6, dtype=torch.float64)
    direction /= direction.norm()
    P = torch.outer(direction, direction) * (1 - tilt)
    g = torch.randn(3, 6, dtype=torch.float64)
    g[1] -= (g[1] @ direction) * direction
    g[2] = 0
    found = find(P.expand(3, 6, 6), g, stop=Stop(1e-10, absolute=0.0))
    assert found.status.tolist() == [Status.STALLED, Status.CONVERGED, Status.CONVERGED]
    torch.testing.assert_close(found.value[1] @ P + g[1], found.value[1])
    assert not found.value[2].any()
    assert found.residual[0] > 1e-3


def test_dense_leaves_the_others_alone_where_one_jacobian_is_not_finite() -> None:
    A, g = contraction(3, 5, 5, norm=0.9), torch.randn(3, 5, dtype=torch.float64)
    clean = find(A, g)
    A[1, 2, 2] = torch.inf
    found = find(A, g)
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    torch.testing.assert_close(found.value[[0, 2]], clean.value[[0, 2]])


class Hard(Cell):
    """`z = tanh(z W^T) + x` with singular values of `W` up to 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        W = torch.randn(width, width, dtype=torch.float64)
        self.W = nn.Parameter(3 * W / torch.linalg.matrix_norm(W, 2))

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T) + context


def test_newton_steps_are_the_same_dense_and_krylov() -> None:
    torch.manual_seed(1)
    cell, x = Hard(12), torch.randn(4, 12, dtype=torch.float64)
    stop = Stop(1e-12)
    found = {}
    for inner in ("dense", "krylov"):
        layer = Equilibrium(cell, Newton(1e-11, inner=inner), stop=stop, on_failure="raise")
        found[inner] = layer(x)
    torch.testing.assert_close(found["dense"], found["krylov"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("samples", "width", "dense"), [(4, 8, True), (8, 100, False)])
def test_newton_is_dense_where_that_is_cheaper(monkeypatch, samples, width, dense) -> None:
    used = []
    for name in ("run", "Factors"):
        kept = getattr(newton, name)

        def record(*args, name=name, kept=kept, **options):
            used.append(name)
            return kept(*args, **options)

        monkeypatch.setattr(newton, name, record)
    W = contraction(1, width, width, norm=0.9)[0]
    c = torch.randn(samples, width, dtype=torch.float64)
    solve(lambda z, c: torch.tanh(z @ W.T) + c, torch.zeros_like(c), "newton", context=c)
    assert set(used) == {"Factors" if dense else "run"}


def test_newton_turns_to_elimination_when_inner_solves_are_long(monkeypatch) -> None:
    made = []

    def record(jacobian: Tensor):
        made.append(jacobian.shape)
        return factors(jacobian)

    factors = newton.Factors
    monkeypatch.setattr(newton, "Factors", record)
    basis = torch.linalg.qr(torch.randn(100, 100, dtype=torch.float64))[0]
    W = basis @ torch.linspace(-5, 0.999, 100, dtype=torch.float64).diag() @ basis.T
    c = torch.randn(8, 100, dtype=torch.float64)
    step = lambda z, c: z @ W.T + 0.001 * torch.sin(z) + c  # noqa: E731
    found = solve(step, torch.zeros_like(c), "newton", Stop(1e-10), context=c)
    assert found.converged.all()
    assert made


def test_newton_inner_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"Newton.inner must be one of auto, dense, krylov"):
        Newton(inner="lu")


def test_dense_adjoint_passes_gradcheck() -> None:
    cell = Hard(3)
    cell.W.data *= 0.3
    layer = Equilibrium(cell, "newton", Implicit("dense"), stop=Stop(1e-13), on_failure="raise")
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(layer, x)


def test_dense_adjoint_of_a_step_that_knows_its_batch_size() -> None:
    # Equal samples end together, so that none of them leaves the batch on the way.
    cell, x = Hard(6), torch.randn(1, 6, dtype=torch.float64).repeat(4, 1).requires_grad_()
    cell.W.data *= 0.2
    mask = (torch.rand(1, 6) > 0.3).double().repeat(4, 1)
    cell.step = lambda z, context: mask * torch.tanh(z @ cell.W.T) + context
    gradients = []
    for adjoint in ("dense", "fixed_point"):
        stop = Stop(1e-13)
        layer = Equilibrium(cell, "fixed_point", Implicit(adjoint), stop=stop, on_failure="raise")
        gradients += torch.autograd.grad(layer(x, torch.zeros_like(x)).sum(), x)
    torch.testing.assert_close(*gradients)
