"""A failed adjoint solve never looks like a zero gradient."""

import pytest
import torch
from torch import Tensor

from equipoise import SOLVERS, Cell, Equilibrium, Implicit, Status, Stop


class Expanding(Cell):
    """`z = 2 z + x`: the equilibrium is `-x`, and `I - J` is negative definite."""

    symmetric = True

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return 2 * z + context


class Root(Cell):
    """`z = sqrt(z) / 2 + x`, whose derivative at `z = 0` is infinite."""

    symmetric = True

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z.sqrt() / 2 + context


@pytest.mark.parametrize("adjoint", ["accelerated", "conjugate_gradient", "fixed_point", "neumann"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_failed_adjoint_that_stays_at_zero_gives_the_first_term(
    adjoint: str, create_graph: bool
) -> None:
    """Zero is the best iterate that these solvers find, and would be returned as the gradient."""
    layer = Equilibrium(Expanding(), "fixed_point", Implicit(adjoint), on_failure="ignore")
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    z = layer(x, -x.detach())
    g = torch.randn_like(z)
    (found,) = torch.autograd.grad(z, x, g, create_graph=create_graph)
    assert not layer.last.adjoint.converged.any()
    assert (layer.last.adjoint.value == 0).all()
    assert torch.equal(found, g)


@pytest.mark.parametrize("adjoint", list(SOLVERS))
@pytest.mark.parametrize("create_graph", [False, True])
def test_adjoint_that_meets_an_infinite_jacobian_gives_nan(
    adjoint: str, create_graph: bool
) -> None:
    stop = Stop(tolerance=1e-12)
    layer = Equilibrium(Root(), "fixed_point", Implicit(adjoint), on_failure="ignore", stop=stop)
    x = torch.tensor([[0.0], [0.5]], dtype=torch.float64, requires_grad=True)
    z = layer(x, torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    (found,) = torch.autograd.grad(z.sum(), x, create_graph=create_graph)
    assert layer.last.adjoint.status.tolist() == [Status.NONFINITE, Status.CONVERGED]
    assert found[0].isnan()
    assert found[1].item() == pytest.approx(4 / 3)
