"""Which numbers decide that a sample has converged."""

from __future__ import annotations

import itertools

import pytest
import torch

import equipoise
from equipoise.gradients import Implicit
from equipoise.layers import Cell, Equilibrium
from equipoise.solvers import SAM, SOLVERS, Solution, Status, Stop, solve

GENERAL = ["fixed_point", "anderson", "broyden", "newton"]
SCALES = [(torch.float32, 10.0**k) for k in (-35, -25, -16, 20, 30, 36)] + [
    (torch.float64, 10.0**k) for k in (-290, -200, 200, 290)
]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def two_scales(state, _context=None):
    """Leaves at 2e6 and 0.05, of which the second converges at a rate of 0.98."""
    large, small = state
    return 0.5 * large + 1e6, 0.98 * small + 1e-3


def scaled_problem(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 10, generator=generator, dtype=torch.float64)
    weight = weight @ weight.T
    weight *= 0.8 / torch.linalg.matrix_norm(weight, 2)
    b = torch.randn(5, 10, generator=generator, dtype=torch.float64)
    truth = zeros(5, 10)
    for _ in range(300):
        truth = torch.tanh(truth @ weight + b)
    return weight.to(dtype), b.to(dtype), truth


@pytest.mark.parametrize("name", GENERAL)
def test_large_leaf_cannot_hide_a_small_one(name):
    start = (zeros(3, 1), zeros(3, 1))
    solution = solve(two_scales, start, name, Stop(max_steps=2000), context=())
    assert solution.converged.all()
    torch.testing.assert_close(solution.value[1], 0.05 + zeros(3, 1), rtol=0.01, atol=0)
    image = two_scales(solution.value)
    worst = torch.stack([((f - z) / f).abs() for f, z in zip(image, solution.value, strict=True)])
    torch.testing.assert_close(solution.residual, worst.amax(0)[:, 0], rtol=1e-6, atol=0)


def test_norm_of_the_whole_state_can_be_asked_for():
    start = (zeros(1, 1), zeros(1, 1))
    solution = solve(two_scales, start, "fixed_point", Stop(norm="state"))
    assert solution.converged.all()
    assert float(solution.value[1]) < 0.02  # which is hidden by the other


def test_coupled_state_is_judged_leaf_by_leaf():
    start = (zeros(3, 2), zeros(3, 2))
    solution = solve(two_scales, start, "fixed_point", Stop(max_steps=2000), coupled=True)
    torch.testing.assert_close(solution.value[1], 0.05 + zeros(3, 2), rtol=0.01, atol=0)


def test_norm_of_elements_lets_none_be_hidden():
    rate = torch.tensor([0.5, 0.98], dtype=torch.float64)
    b = torch.tensor([1e6, 1e-3], dtype=torch.float64)
    stop = Stop(max_steps=2000)
    hidden = solve(lambda z: rate * z + b, zeros(1, 2), "fixed_point", stop)
    told = solve(
        lambda z: rate * z + b, zeros(1, 2), "fixed_point", Stop(max_steps=2000, norm="element")
    )
    assert hidden.value[0, 1] < 0.03
    assert abs(told.value[0, 1] - 0.05) < 5e-4


def test_leaf_is_the_norm_of_the_state_for_one_tensor():
    weight, b, _ = scaled_problem(torch.float64)
    leaf, state = (
        solve(lambda z, b: torch.tanh(z @ weight + b), zeros(5, 10), "anderson", stop, context=b)
        for stop in (Stop(norm="leaf"), Stop(norm="state"))
    )
    assert torch.equal(leaf.value, state.value)
    assert torch.equal(leaf.residual, state.residual)


def test_norm_that_does_not_exist_is_refused():
    with pytest.raises(
        ValueError, match=r"Stop.norm must be one of element, leaf, state; got 'l2'"
    ):
        Stop(norm="l2")


class TwoScales(Cell):
    """Two leaves whose gradients have very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))

    def inject(self, x):
        return x

    def initial(self, x, context):
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, z, context):
        return 0.5 * z[0] + self.b[0] * context, 0.98 * z[1] + self.b[1] * context


@pytest.mark.parametrize("solver", ["auto", "neumann", "gmres"])
def test_large_leaf_cannot_hide_the_gradient_of_a_small_one(solver):
    layer = Equilibrium(TwoScales(), gradient=Implicit(solver), max_steps=3000)
    large, small = layer(torch.ones(2, 3, dtype=torch.float64))
    (1e6 * large.sum() + 1e-3 * small.sum()).backward()
    truth = torch.tensor([6 * 2e6, 6 * 0.05], dtype=torch.float64)
    torch.testing.assert_close(layer.cell.b.grad, truth, rtol=0.01, atol=0)


def test_leaf_without_gradient_does_not_hold_up_the_adjoint():
    layer = Equilibrium(TwoScales(), max_steps=3000, on_failure="raise")
    large, _ = layer(torch.ones(2, 3, dtype=torch.float64))
    large.sum().backward()
    torch.testing.assert_close(
        layer.cell.b.grad, torch.tensor([12.0, 0.0], dtype=torch.float64), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("size", [1.0, 1e-16, 1e-30, 1e-300])
@pytest.mark.parametrize("name", GENERAL)
def test_small_states_are_solved_to_the_relative_tolerance(name, size):
    solution = solve(lambda z: 0.9 * z + 0.1 * size, zeros(1, 1), name)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value / size, 1 + zeros(1, 1), rtol=2e-3, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GENERAL)
def test_equilibria_at_zero_converge(name, dtype, size):
    solution = solve(lambda z: 0.5 * z, torch.full((2, 3), size, dtype=dtype), name)
    assert solution.converged.all()
    assert (solution.value.abs() <= 1e-12 * size).all()
    assert (solution.residual <= 1e-4).all()


def test_absolute_is_the_users_own():
    solution = solve(lambda z: 0.5 * z, 1 + zeros(1, 1), "fixed_point", Stop(absolute=1e-3))
    assert 5e-4 < float(solution.value) <= 2e-3
    start = (1 + zeros(1, 1), 1 + zeros(1, 1))
    solution = solve(
        lambda z: (0.5 * z[0], 0.5 * z[1] + 1), start, "fixed_point", Stop(absolute=1e-3)
    )
    assert 5e-4 < float(solution.value[0]) <= 2e-3


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
@pytest.mark.parametrize("name", [*GENERAL, "accelerated"])
def test_every_solver_solves_every_scale_of_the_dtype(name, dtype, scale):
    weight, b, truth = scaled_problem(dtype)
    solution = solve(
        lambda z, b: scale * torch.tanh((z / scale) @ weight + b),
        torch.zeros(5, 10, dtype=dtype),
        name,
        Stop(1e-5),
        context=b,
        symmetric=name == "accelerated",
        trace=True,
    )
    assert solution.converged.all()
    torch.testing.assert_close((solution.value / scale).double(), truth, rtol=0, atol=1e-3)
    assert solution.trace is not None
    assert torch.equal(solution.trace.state[-1], solution.value)


@pytest.mark.parametrize(("dtype", "scale"), SCALES)
def test_sam_runs_at_every_scale_of_the_dtype(dtype, scale):
    weight, b, _ = scaled_problem(dtype)
    one, other = (
        solve(
            lambda z, b, s=s: s * torch.tanh((z / s) @ weight + b),
            torch.zeros(5, 10, dtype=dtype),
            SAM("l2"),
            Stop(1e-5, max_steps=20),
            context=b,
        )
        for s in (1.0, scale)
    )
    torch.testing.assert_close(other.value / scale, one.value, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(other.residual, one.residual, rtol=1e-2, atol=0)


class ScaledTanh(Cell):
    def __init__(self, weight, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = torch.nn.Parameter(weight), scale

    def inject(self, x):
        return x

    def step(self, z, context):
        return self.scale * torch.tanh((z / self.scale) @ self.weight + context)


@pytest.mark.parametrize(("dtype", "scale"), [SCALES[i] for i in (1, 4, 7, 8)])
@pytest.mark.parametrize("name", ["auto", *(name for name in SOLVERS if name != "accelerated")])
def test_gradients_are_right_at_every_scale_of_the_dtype(name, dtype, scale):
    if name == "conjugate_gradient":
        pytest.skip("the Jacobian is not symmetric")
    weight, b, _ = scaled_problem(dtype)
    truth = None
    for s, solver in ((1.0, "newton"), (scale, name)):
        layer = Equilibrium(
            ScaledTanh(weight.clone(), s),
            gradient=Implicit(solver),
            tolerance=1e-5,
            on_failure="raise",
        )
        (layer(b) / s).sum().backward()
        gradient = layer.cell.weight.grad
        truth = gradient if truth is None else truth
    torch.testing.assert_close(gradient, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("x", [10.0**-k for k in (0, 3, 10, 20, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GENERAL)
def test_far_equilibrium_of_a_saturating_step_is_found(name, dtype, x):
    solution = solve(
        lambda z: torch.tanh(2 * z + x), torch.zeros(1, 1, dtype=dtype), name, Stop(max_steps=200)
    )
    assert solution.converged.all()
    z = solution.value.double()
    residual = (torch.tanh(2 * z + x) - z).abs()
    assert float(residual) <= 1.1e-4 * float(z.abs())
    if name == "fixed_point":
        assert float(z) > 0.9
        few = solve(lambda z: torch.tanh(2 * z + x), torch.zeros(1, 1, dtype=dtype), name)
        assert Status(int(few.status)) in (Status.CONVERGED, Status.MAX_STEPS)


RUNAWAYS = {
    "translation": lambda z, s: z + s,
    "growth": lambda z, s: 1.5 * z + s,
    "slow growth": lambda z, s: 1.01 * z + s,
    "alternating": lambda z, s: -1.2 * z + s,
}


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("kind", RUNAWAYS)
def test_runaway_is_never_called_converged(name, kind):
    budgets = (100,) if name == "newton" else (100, 300)  # its steps are dear
    for dtype, size, steps in itertools.product(
        (torch.float32, torch.float64), (1e-30, 1e-12, 1.0, 1e12), budgets
    ):
        f = RUNAWAYS[kind]
        solution: Solution = solve(
            lambda z, f=f, size=size: f(z, size),
            torch.zeros(1, 1, dtype=dtype),
            name,
            Stop(1e-2, max_steps=steps, patience=steps),
        )
        if solution.converged.any():  # an equilibrium that is there
            z = solution.value.double()
            assert kind in ("growth", "slow growth", "alternating")
            assert float((f(z, size) - z).abs() / size) <= 0.02


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-9])
def test_translation_does_not_converge_by_running_away(name, tolerance):
    for dtype, start, shift in itertools.product(
        (torch.float32, torch.float64), (0.0, 1.0, -3.0, 50.0), (1.0, 1e-1)
    ):
        z = torch.full((1, 1), start, dtype=dtype)
        for state, step in (
            (z, lambda z, shift=shift: z + shift),
            # The second leaf is small beside the first, which converges.
            ((z, z), lambda z, shift=shift: (0.5 * z[0] + 1e6, z[1] + shift)),
        ):
            steps = 6 if name == "newton" else 30
            solution = solve(step, state, name, Stop(tolerance, max_steps=steps))
            relative = shift / max(abs(start), abs(start + shift), shift)
            assert solution.converged.item() == (relative <= tolerance)


@pytest.mark.parametrize("name", ["auto", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-14])
def test_equilibrium_beyond_growth_converges_if_the_residual_fell(name, tolerance):
    rate = torch.tensor(1 - 1e-10, dtype=torch.float64, requires_grad=True)
    solution = equipoise.fixed_point(
        lambda z, rate: rate * z + 1.0,
        1 + zeros(1, 1),
        rate,
        solver=name,
        tolerance=tolerance,
        on_failure="raise",
        return_solution=True,
    )
    assert float(solution.value.detach()) > 1e9
    solution.value.sum().backward()
    assert solution.adjoint.converged.all()
    if tolerance < 1e-10:
        assert abs(float(solution.value.detach()) / 1e10 - 1) < 1e-3
        assert abs(float(rate.grad) / 1e20 - 1) < 1e-3


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("solver", ["auto", "dense", "gmres", "neumann", "anderson", "broyden"])
def test_adjoint_of_leaves_of_many_scales_converges(solver, weights):
    c = torch.full((3, 2), 0.2, dtype=torch.float64, requires_grad=True)

    def step(z, c):
        large, small = z
        return (
            1e6 * torch.tanh(0.5 * large / 1e6 + c + 0.1 * small * 1e6),
            1e-6 * torch.tanh(0.3 * large / 1e6 + c),
        )

    def alike(z, c):  # the same in units of the leaves
        return torch.tanh(0.5 * z[0] + c + 0.1 * z[1]), torch.tanh(0.3 * z[0] + c)

    def gradient(f, solver, weights):
        start = (zeros(3, 2), zeros(3, 2))
        settings = {"tolerance": 1e-6, "on_failure": "raise"}
        z = equipoise.fixed_point(f, start, c, gradient=Implicit(solver), **settings)
        (weights[0] * z[0].sum() + weights[1] * z[1].sum()).backward()
        found, c.grad = c.grad, None
        return found

    truth = gradient(alike, "dense", (1e6 * weights[0], 1e-6 * weights[1]))
    torch.testing.assert_close(gradient(step, solver, weights), truth, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rate", [1.5, -3.0, 1e3])
def test_linear_equation_whose_residual_grows_diverges_soon(rate):
    solution = equipoise.fixed_point(
        lambda z, b: rate * z + b,
        zeros(1, 1),
        torch.ones(1, 1, dtype=torch.float64, requires_grad=True),
        solver="newton",
        gradient=Implicit("neumann"),
        on_failure="ignore",
        return_solution=True,
    )
    solution.value.sum().backward()
    assert Status(int(solution.adjoint.status)) is Status.DIVERGED
    assert int(solution.adjoint.steps) <= 50


def test_top_level_stop_takes_the_norm():
    assert equipoise.Stop().norm == "leaf"
