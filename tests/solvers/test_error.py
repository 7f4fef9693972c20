"""How far a solution is from the equilibrium, beside the truth."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from equipoise import Cell, Equilibrium, OptEq, Status, Stop, Unrolled, solve

RADII = (0.5, 0.9, 0.99, 0.998, 0.9999)


class SlowCell(Cell):
    """`z = 20 tanh(A z / 20) + x / 10` with eigenvalues of `A` between -radius / 2 and radius."""

    def __init__(self, radius, width=30, declared=None):
        super().__init__()
        rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
        values = torch.linspace(-radius / 2, radius, width, dtype=torch.float64)
        self.A = torch.nn.Parameter(rotation @ values.diag() @ rotation.T)
        self.declared = declared

    def inject(self, x):
        return x / 10

    def step(self, z, context):
        return 20 * torch.tanh(z @ self.A.T / 20) + context

    def lipschitz(self):
        return self.declared


def distance(solution, layer, x):
    exact = layer(x, solution.value.detach(), solver="newton", tolerance=1e-14)
    return (solution.value - exact).norm(dim=1) / exact.norm(dim=1)


@pytest.mark.parametrize("solver", ["auto", "fixed_point", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("radius", RADII)
def test_error_is_the_distance_to_the_equilibrium(radius, solver):
    torch.manual_seed(0)
    layer = Equilibrium(SlowCell(radius), max_steps=3000, on_failure="raise")
    x = torch.randn(4, 30, dtype=torch.float64)
    solution = layer.solve(x, solver=solver)
    assert torch.allclose(solution.error, distance(solution, layer, x), rtol=0.15)
    sharp = layer.solve(x, stop=Stop(max_steps=3000, tolerance_on="error"), solver=solver)
    assert distance(sharp, layer, x).max() <= 1e-4
    assert (sharp.steps >= solution.steps).all()


def test_repr_tells_of_a_distance_far_above_the_tolerance():
    torch.manual_seed(0)
    x = torch.randn(4, 30, dtype=torch.float64)
    layer = Equilibrium(SlowCell(0.998), max_steps=1000)
    layer(x)
    assert "CONVERGED" in repr(layer.last)
    assert "but about 8e-03 from the equilibrium" in repr(layer.last)
    layer = Equilibrium(SlowCell(0.5))
    layer(x)
    assert "from the equilibrium" not in repr(layer.last)


def test_error_bound_is_proved_and_limits_the_estimate():
    torch.manual_seed(0)
    layer = Equilibrium(SlowCell(0.9, declared=0.9))
    x = torch.randn(4, 30, dtype=torch.float64)
    solution = layer.solve(x)
    truth = distance(solution, layer, x)
    assert torch.allclose(solution.error_bound, 10 * solution.residual)
    assert (truth <= solution.error_bound).all()
    assert (solution.error <= solution.error_bound).all()
    sharp = layer.solve(x, stop=Stop(tolerance_on="error"))
    assert (sharp.error_bound <= 1e-4).all()
    assert Equilibrium(SlowCell(0.9)).solve(x).error_bound is None


def test_error_sees_what_a_small_alpha_hides():
    # The residual of an OptEq layer is alpha times that of its inner network.
    torch.manual_seed(0)
    layer = OptEq(8, 8, 8, "tanh", alpha=0.001).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    solution = layer.solve(x, solver="fixed_point", max_steps=5000)
    exact = layer(x, tolerance=1e-14, max_steps=1000, solver="newton")
    truth = (solution.value - exact).norm(dim=1) / exact.norm(dim=1)
    assert solution.converged.all()
    assert truth.min() > 0.01
    assert torch.allclose(solution.error, truth, rtol=0.5)


def test_error_of_a_tree_and_of_a_coupled_batch():
    torch.manual_seed(0)
    A = 0.99 * torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))[0]

    def step(z, c):
        flat = torch.cat([z["a"], z["b"]], dim=1) @ A.T + c
        return {"a": flat[:, :2], "b": flat[:, 2:]}

    c = torch.randn(5, 6, dtype=torch.float64)
    z0 = {"a": torch.zeros(5, 2, dtype=torch.float64), "b": torch.zeros(5, 4, dtype=torch.float64)}
    exact = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - A, c.T).T
    found = solve(step, z0, "fixed_point", Stop(max_steps=2000), context=c)
    truth = (torch.cat([found.value["a"], found.value["b"]], 1) - exact).norm(dim=1)
    assert torch.allclose(found.error, truth / exact.norm(dim=1), rtol=0.2)

    def whole(z):
        return z @ A.T + c

    found = solve(whole, torch.zeros_like(c), stop=Stop(max_steps=2000), coupled=True)
    truth = (found.value - exact).norm() / exact.norm()
    assert torch.allclose(found.error, truth, rtol=0.2)


def test_error_is_infinite_where_equilibria_are_not_isolated():
    found = solve(lambda z: torch.stack([z[:, 0], z[:, 1] / 2 + 1], 1), torch.ones(3, 2))
    assert found.converged.all()
    drifting = solve(lambda z: z + 1e-6, torch.ones(3, 2), "fixed_point")
    assert torch.isinf(drifting.error).all()
    sharp = solve(lambda z: z + 1e-6, torch.ones(3, 2), "fixed_point", Stop(tolerance_on="error"))
    assert not sharp.converged.any()


def test_error_is_refused_once_the_map_has_changed():
    torch.manual_seed(0)
    layer = Equilibrium(SlowCell(0.9))
    solution = layer.solve(torch.randn(2, 30, dtype=torch.float64))
    with torch.no_grad():
        layer.cell.A.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"Solution.error must be asked for while"):
        _ = solution.error
    assert "CONVERGED" in repr(solution)


def test_unrolled_steps_are_judged_by_the_error_too():
    torch.manual_seed(0)
    x = torch.randn(2, 30, dtype=torch.float64)
    layer = Equilibrium(SlowCell(0.9), gradient=Unrolled(steps=45), on_failure="ignore")
    assert layer.solve(x, tolerance=1e-3).converged.all()
    by_error = layer.solve(x, stop=Stop(tolerance=1e-3, tolerance_on="error"))
    assert (by_error.status == Status.MAX_STEPS).all()


def test_estimate_keeps_no_graph_and_travels_in_no_pickle():
    torch.manual_seed(0)
    layer = Equilibrium(SlowCell(0.9))
    x = torch.randn(2, 30, dtype=torch.float64, requires_grad=True)
    middle = x * 2
    seen = weakref.ref(middle)
    layer(middle)
    del middle
    gc.collect()
    assert seen() is None
    for twin in (pickle.loads(pickle.dumps(layer.last)), copy.deepcopy(layer.last)):
        with pytest.raises(ValueError, match=r"Solution.error is known only where the map is"):
            _ = twin.error
