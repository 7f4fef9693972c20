"""Sequential averaging: maps with many fixed points, of which the one to find is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, minimize
from torch import Tensor, nn

from equipoise import (
    SOLVERS,
    Cell,
    ConvergenceError,
    Equilibrium,
    FixedPoint,
    Implicit,
    JacobianFree,
    Phantom,
    Status,
    Stop,
    Unrolled,
    solve,
)
from equipoise.prox import (
    HSIC,
    AbsoluteSum,
    Custom,
    Decorrelation,
    Incay,
    Regularizer,
    SquaredNorm,
    TotalVariation,
)
from equipoise.solvers import SAM, Solver

F64 = torch.float64


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


# Maps with many fixed points.


@dataclass(frozen=True)
class Choice:
    """A nonexpansive map, a regulariser, and its minimiser on the map's fixed points, by sample."""

    step: Callable[[Tensor], Tensor]
    regularizer: str | Regularizer
    answer: Tensor
    start: Tensor


A, B = (
    torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.0, 1.0, 1.0, 1.0]], dtype=F64),
    torch.tensor([1.0, -0.5], dtype=F64),
)
TARGET = torch.tensor([0.9, -1.2, 0.4, 1.5], dtype=F64)
LOW, HIGH = (
    torch.tensor([0.5, -1.0, -2.0, -3.0], dtype=F64),
    torch.tensor([2.0, 1.0, -0.5, 0.7], dtype=F64),
)
NORMALS, BOUNDS = (
    torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, -1.0, 2.0]], dtype=F64),
    torch.tensor([-0.5, -1.0], dtype=F64),
)


def plane(z: Tensor) -> Tensor:
    """The projection onto `A z = B`."""
    return z - (z @ A.T - B) @ torch.linalg.pinv(A).T


def box(z: Tensor) -> Tensor:
    return z.clamp(LOW, HIGH)


def corner(z: Tensor) -> Tensor:
    """Averaged projections onto two half-spaces `n.z <= b` and a box.

    Its fixed points lie in all three.
    """
    for n, b in zip(NORMALS, BOUNDS, strict=True):
        z = z - ((z @ n - b).clamp_min(0) / (n @ n))[:, None] * n
    return z.clamp(-1.0, 1.0)


def shifted(z: Tensor) -> Tensor:
    return (z - TARGET).square().sum(dim=1) / 2


def smooth_absolute(z: Tensor) -> Tensor:
    return (z.square() + 0.25).sqrt().sum(dim=1)


def witness(R: Callable[[Tensor], Tensor], constraints: LinearConstraint) -> Tensor:
    """The minimiser by SciPy."""

    def both(u: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.from_numpy(u)[None].requires_grad_()
        value = R(point).sum()
        return value.item(), torch.autograd.grad(value, point)[0][0].numpy()

    options = {"gtol": 1e-12, "xtol": 1e-14, "barrier_tol": 1e-12, "maxiter": 5000}
    found = minimize(
        both,
        np.zeros(4),
        jac=True,
        hess=lambda _: np.eye(4),
        method="trust-constr",
        constraints=constraints,
        options=options,
    )
    return torch.from_numpy(found.x)


QUADRATIC = Custom(shifted, lipschitz=1.0, convex=True)
ABSOLUTE = Custom(smooth_absolute, lipschitz=2.0, convex=True)
IN_PLANE = LinearConstraint(A.numpy(), B.numpy(), B.numpy())
IN_CORNER = LinearConstraint(
    np.vstack([NORMALS.numpy(), np.eye(4)]),
    [-np.inf, -np.inf, *[-1.0] * 4],
    [*BOUNDS.numpy(), *[1.0] * 4],
)


def choices() -> dict[str, Callable[[], Choice]]:
    def choice(step, R, answer) -> Choice:
        start = 3 * numbers(5, 4)
        return Choice(step, R, answer.expand(5, 4), start)

    zero = torch.zeros(1, 4, dtype=F64)
    return {
        "l2 plane": lambda: choice(plane, "l2", plane(zero)[0]),
        "l2 box": lambda: choice(box, "l2", box(zero)[0]),
        "l2 corner": lambda: choice(
            corner, SquaredNorm(), witness(lambda z: z.square().sum(dim=1) / 2, IN_CORNER)
        ),
        "shifted plane": lambda: choice(plane, QUADRATIC, plane(TARGET[None])[0]),
        "shifted box": lambda: choice(box, QUADRATIC, box(TARGET[None])[0]),
        "shifted corner": lambda: choice(corner, QUADRATIC, witness(shifted, IN_CORNER)),
        "absolute plane": lambda: choice(plane, ABSOLUTE, witness(smooth_absolute, IN_PLANE)),
        "absolute corner": lambda: choice(corner, ABSOLUTE, witness(smooth_absolute, IN_CORNER)),
    }


CHOICES = choices()


def worst(found: Tensor, answer: Tensor) -> float:
    return float((found - answer).norm(dim=1).max())


def average(
    step, gradient, z: Tensor, steps: int, lipschitz: float, rho: float, decay: float, eta: float
) -> Tensor:
    """OptEq, eq. 11, as it is written."""
    gamma = 1 / (2 * lipschitz)
    for k in range(1, steps + 1):
        beta, pull = eta / k**rho, eta / k**decay
        moved = z - gamma * (gradient(z) + pull * z)
        z = beta * moved + (1 - beta) * step(z)
    return z


@pytest.mark.parametrize("name", CHOICES)
def test_sam_approaches_the_minimiser_on_the_fixed_points(name: str) -> None:
    known = CHOICES[name]()
    sam = SAM(known.regularizer, eta=0.05)
    errors = []
    for steps in (100, 1000, 6000):
        solution = solve(known.step, known.start, sam, Stop(max_steps=steps))
        errors.append(worst(solution.value, known.answer))
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
    assert errors[2] < 1.5e-2
    # Plain iteration ends at a fixed point too, but at one that depends on the start.
    plain = solve(known.step, known.start, FixedPoint(), Stop(tolerance=1e-10, max_steps=5000))
    assert plain.converged.all()
    assert float((plain.value - known.answer).norm(dim=1).min()) > 0.1
    assert float(torch.pdist(plain.value).min()) > 0.1
    assert float(torch.pdist(solution.value).max()) < 1e-2


@pytest.mark.parametrize("name", CHOICES)
def test_sam_with_its_defaults_comes_nearer_with_more_steps(name: str) -> None:
    known = CHOICES[name]()
    errors = [
        worst(
            solve(known.step, known.start, SAM(known.regularizer), Stop(max_steps=n)).value,
            known.answer,
        )
        for n in (20, 200, 2000)
    ]
    assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
    assert errors[2] < 0.25


def test_sam_is_accurate_where_nothing_pulls_aside() -> None:
    """With `l2` the pull towards zero belongs to the regulariser, and `beta` alone decides.

    On a plane the averaged step has its fixed point at `1/(1 + beta gamma (1 + lambda)/(1 - beta))`
    times the answer.
    """
    known = CHOICES["l2 plane"]()
    sam = SAM("l2", rho=0.6, decay=0.15)
    solution = solve(known.step, known.start, sam, Stop(tolerance=2e-3, max_steps=5000))
    beta, pull = sam.schedule(5000)
    short = 1 / (1 + beta * sam.gamma * (1 + pull) / (1 - beta))
    assert worst(solution.value, short * known.answer) < 1e-5
    assert worst(solution.value, known.answer) < 1e-3
    assert solution.converged.all()


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("every", [1, 7])
def test_sam_is_the_printed_iteration(few: bool, every: int) -> None:
    known = CHOICES["shifted corner"]()
    start = known.start[:2] if few else known.start
    sam = SAM(QUADRATIC, rho=0.4, decay=0.2, eta=0.3)
    solution = solve(corner, start, sam, Stop(max_steps=40, check_every=every), trace=not few)
    by_hand = average(corner, lambda z: z - TARGET, start, 40, 1.0, 0.4, 0.2, 0.3)
    assert torch.allclose(solution.value, by_hand, rtol=1e-12)
    assert (solution.steps == 40).all()
    assert (solution.evaluations == 41).all()
    if not few:
        assert torch.equal(solution.trace.state[-1], solution.value)
        assert len(solution.trace.state) == (41 if every == 1 else 7)


def test_sam_takes_its_constant_from_the_regularizer_or_the_argument() -> None:
    start = numbers(2, 4)
    R = Incay(epsilon=0.5)
    for sam, L in (
        (SAM(R), 4.0),
        (SAM(R, lipschitz=8.0), 8.0),
        (SAM(AbsoluteSum(), lipschitz=0.5), 0.5),
    ):
        eta = min(math.sqrt(2 * L), L / 2, 0.5)
        assert sam.gamma == 1 / (2 * L)
        assert sam.schedule(1) == (eta, eta)
        assert sam.schedule(16) == (eta / 16**0.3, eta / 16**0.3)
        found = solve(plane, start, sam, Stop(max_steps=10)).value
        penalty = sam.regularizer
        assert torch.allclose(
            found, average(plane, penalty.gradient, start, 10, L, 0.3, 0.3, eta), rtol=1e-12
        )


def test_default_eta_is_that_of_the_theorem() -> None:
    for L, eta in ((1e-4, 5e-5), (0.5, 0.25), (1.0, 0.5), (100.0, 0.5)):
        assert SAM(lambda z: z.sum(dim=1), lipschitz=L).schedule(1)[0] == pytest.approx(eta)


@pytest.mark.parametrize("L", [0.1, 1.0, 30.0])
def test_no_step_expands_at_the_largest_eta(L: float) -> None:
    """`S_k` for a quadratic whose curvatures lie in [0, L]; beyond it some step would expand."""
    sam = SAM(lambda z: z.sum(dim=1), lipschitz=L, eta=min(1.0, 3 * L))
    curvature = torch.linspace(0, L, 50)
    for k in (1, 2, 10, 1000):
        _, pull = sam.schedule(k)
        assert (1 - sam.gamma * (curvature + pull)).abs().max() <= 1 + 1e-12


# All steps, and how they end.


def test_sam_is_registered_but_not_among_the_solvers_that_a_name_alone_makes() -> None:
    assert "sam" not in list(SOLVERS)
    assert "sam" in SOLVERS.names
    assert SOLVERS["sam"] is SAM
    assert SOLVERS.resolve(sam := SAM("l2")) is sam
    assert SAM.runs_all_steps
    assert not any(SOLVERS[name].runs_all_steps for name in SOLVERS)
    assert Solver.runs_all_steps is False


@pytest.mark.parametrize("samples", [2, 9])
def test_sam_leaves_a_fixed_point_for_a_better_one(samples: int) -> None:
    start = plane(3 * numbers(samples, 4))
    solution = solve(plane, start, SAM("l2", eta=0.05), Stop(tolerance=1e-2, max_steps=3000))
    assert (solution.steps == 3000).all()
    assert worst(solution.value, plane(torch.zeros(1, 4, dtype=F64)).expand(samples, 4)) < 1e-2
    assert worst(start, solution.value) > 0.5
    assert solution.converged.all()


def test_sam_returns_the_last_iterate_and_its_residual_not_the_best() -> None:
    start = plane(3 * numbers(3, 4))  # the residual is zero here, and nowhere again
    stop = Stop(tolerance=1e-6, max_steps=25, patience=1)
    solution = solve(plane, start, SAM("l2"), stop, trace=True)
    assert torch.equal(solution.value, solution.trace.state[-1])
    assert not torch.allclose(solution.value, start, rtol=1e-2)
    f = plane(solution.value)
    assert torch.allclose(
        solution.residual, (f - solution.value).norm(dim=1) / f.norm(dim=1), rtol=1e-12
    )
    assert solution.status.tolist() == [Status.MAX_STEPS] * 3
    assert (solution.steps == 25).all()  # patience of one step did not end it


@pytest.mark.parametrize("samples", [3, 8])
def test_sam_status_is_decided_by_the_residual_at_the_end(samples: int) -> None:
    start = numbers(samples, 4)
    for tolerance, status in ((0.1, Status.CONVERGED), (1e-9, Status.MAX_STEPS)):
        solution = solve(plane, start, SAM("l2"), Stop(tolerance=tolerance, max_steps=50))
        assert solution.status.tolist() == [status] * samples
        f = plane(solution.value)
        assert ((solution.residual <= tolerance) == (status == Status.CONVERGED)).all()
        assert torch.allclose(
            solution.residual, (f - solution.value).norm(dim=1) / f.norm(dim=1), rtol=1e-12
        )


@pytest.mark.parametrize("samples", [1, 8])
def test_a_rise_of_the_residual_from_a_fixed_point_is_no_divergence(samples: int) -> None:
    """A slow map: each early step leads further from its fixed points."""

    def slow(z: Tensor) -> Tensor:
        return 0.99 * z + 0.01 * plane(z)

    start = plane(3 * numbers(samples, 4))
    solution = solve(slow, start, SAM("l2"), Stop(max_steps=12), trace=True)
    assert (solution.trace.residual[1:].diff(dim=0) > 0).all()
    assert solution.status.tolist() == [Status.MAX_STEPS] * samples


@pytest.mark.parametrize("samples", [2, 8])
@pytest.mark.parametrize("every", [1, 5])
def test_sam_may_start_at_zero_where_the_map_is_zero(samples: int, every: int) -> None:
    """There the scale of the start is zero, and any step is infinitely larger."""
    start = torch.zeros(samples, 4, dtype=F64)
    solution = solve(
        lambda z: z, start, SAM(QUADRATIC, eta=0.05), Stop(max_steps=4000, check_every=every)
    )
    assert solution.converged.all()
    assert (solution.steps == 4000).all()
    assert worst(solution.value, TARGET.expand(samples, 4)) < 2e-2


def test_sam_sees_divergence_and_keeps_the_best_iterate() -> None:
    start = 1 + numbers(3, 4).abs()
    solution = solve(lambda z: 3 * z, start, SAM("l2"), Stop(max_steps=500))
    assert solution.status.tolist() == [Status.DIVERGED] * 3
    assert (solution.steps < 100).all()
    assert solution.value.isfinite().all()


@pytest.mark.parametrize("samples", [3, 9])
def test_sam_sees_nan_in_some_samples_and_goes_on_with_the_others(samples: int) -> None:
    images = numbers(samples, 1, 3, 3)
    bad = torch.zeros(samples, 1, 1, 1, dtype=F64)
    bad[1:] = math.nan  # nearly all leave, so that the rest is taken out of the batch
    bad[-1] = 0

    class Average(Cell):
        def inject(self, x: Tensor) -> Tensor:
            return x

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return (z + z.mean(dim=(2, 3), keepdim=True)) / 2 + context

    layer = Equilibrium(Average(), SAM(TotalVariation(0.5)), max_steps=30, on_failure="ignore")
    found = layer(bad, images)
    good = [0, samples - 1]
    # Map and regulariser agree on constant images, so the good ones converge early, and go on.
    assert layer.last.status.tolist() == [
        Status.CONVERGED if i in good else Status.NONFINITE for i in range(samples)
    ]
    assert layer.last.steps.tolist() == [30 if i in good else 0 for i in range(samples)]
    R = TotalVariation(0.5)
    by_hand = average(
        lambda z: (z + z.mean(dim=(2, 3), keepdim=True)) / 2,
        R.gradient,
        images[good],
        30,
        R.lipschitz,
        0.3,
        0.3,
        0.5,
    )
    assert torch.allclose(found[good], by_hand, rtol=1e-12)


def test_sam_reports_through_the_policy_of_the_layer() -> None:
    layer = Equilibrium(LeastSquares(), SAM("l2"), on_failure="raise", max_steps=10)
    with pytest.raises(ConvergenceError, match="3 of 3 samples did not converge"):
        layer(numbers(3, 2))
    assert layer.last.status.tolist() == [Status.MAX_STEPS] * 3


# States of other shapes.


class Shrink(Cell):
    """`z = (z + x)/2` for any shape of the state."""

    def __init__(self, coupled: bool = False) -> None:
        super().__init__()
        self.coupled = coupled

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return (z + context) / 2


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2, 2)])
@pytest.mark.parametrize("R", [Decorrelation(0.1), HSIC(), HSIC(features=3)], ids=str)
def test_sam_gives_coupled_regularizers_the_whole_batch(
    R: Regularizer, shape: tuple[int, ...]
) -> None:
    x = numbers(*shape)
    sam = SAM(R, lipschitz=5.0)
    layer = Equilibrium(Shrink(coupled=True), sam, max_steps=15, on_failure="ignore")
    by_hand = average(
        lambda z: (z + x) / 2, R.gradient, torch.zeros_like(x), 15, 5.0, 0.3, 0.3, 0.5
    )
    assert torch.allclose(layer(x), by_hand, rtol=1e-10, atol=1e-13)
    assert layer.last.status.shape == (1,)
    unrolled = Equilibrium(Shrink(coupled=True), sam, Unrolled(15), on_failure="ignore")
    assert torch.allclose(unrolled(x), by_hand, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("channels_last", [False, True])
def test_sam_gives_regularizers_the_shape_of_the_state(channels_last: bool) -> None:
    x = numbers(2, 3, 4, 5)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    R = TotalVariation(0.5)
    layer = Equilibrium(Shrink(), SAM(R), max_steps=15, on_failure="ignore")
    by_hand = average(
        lambda z: (z + x) / 2, R.gradient, torch.zeros_like(x), 15, R.lipschitz, 0.3, 0.3, 0.5
    )
    assert torch.allclose(layer(x), by_hand, rtol=1e-10, atol=1e-13)


# Derivatives.


class LeastSquares(Cell):
    """`z = z - W^T (W z - x)/3`, whose many fixed points are the solutions of `W z = x`."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(A.clone() / 2)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return torch.zeros(len(x), 4, dtype=F64)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z - (z @ self.W.T - context) @ self.W / 3


def unrolled_layer(R: str | Regularizer, steps: int, **settings: float) -> Equilibrium:
    return Equilibrium(LeastSquares(), SAM(R, **settings), Unrolled(steps), on_failure="ignore")


@pytest.mark.parametrize("R", ["l2", QUADRATIC, ABSOLUTE, Incay(0.7)], ids=str)
def test_unrolled_sam_has_the_derivative_of_its_iterate(R: str | Regularizer) -> None:
    layer = unrolled_layer(R, 8)
    x, start = numbers(2, 2).requires_grad_(), numbers(2, 4)

    def outcome(x: Tensor, W: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"cell.W": W}, (x, start))

    assert torch.autograd.gradcheck(
        outcome, (x, layer.cell.W.detach().clone().requires_grad_())
    )  # by finite differences
    assert torch.autograd.gradgradcheck(
        outcome, (x, layer.cell.W.detach().clone().requires_grad_())
    )


def test_unrolled_sam_makes_exactly_its_steps() -> None:
    calls = []
    layer = unrolled_layer("l2", 6)
    layer.cell.register_forward_hook(lambda *_: calls.append(1))
    x = numbers(3, 2)
    z = layer(x)
    assert len(calls) == 7  # and one to judge where it came
    assert (layer.last.steps == 6).all()
    assert layer.last.status.tolist() == [Status.MAX_STEPS] * 3
    cell = layer.cell
    by_hand = average(
        lambda z: cell.step(z, x), lambda z: z, torch.zeros(3, 4, dtype=F64), 6, 1.0, 0.3, 0.3, 0.5
    )
    assert torch.allclose(z, by_hand, rtol=1e-12)
    solved = Equilibrium(cell, SAM("l2"), max_steps=6, on_failure="ignore")(x)
    assert torch.allclose(solved, z, rtol=1e-12)


def test_unrolled_sam_learns_what_it_chooses() -> None:
    """The derivative of the chosen equilibrium, the pseudo-inverse times the input."""
    layer = unrolled_layer("l2", 400, rho=0.6, decay=0.1, eta=0.1)
    x = numbers(3, 2).requires_grad_()
    weight = numbers(3, 4)
    z = layer(x)
    exact = x @ torch.linalg.pinv(layer.cell.W).T
    assert torch.allclose(z, exact, atol=2e-2)
    found = torch.autograd.grad((weight * z).sum(), [x, layer.cell.W])
    expected = torch.autograd.grad((weight * exact).sum(), [x, layer.cell.W])
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 3e-2


def test_unrolled_sam_gives_gradients_to_the_weights_of_its_regularizer() -> None:
    weight = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def weighted(z: Tensor) -> Tensor:
        return weight * shifted(z)

    layer = Equilibrium(
        LeastSquares(), SAM(weighted, lipschitz=1.0), Unrolled(5), on_failure="ignore"
    )
    x = numbers(2, 2)
    (slope,) = torch.autograd.grad(layer(x).sum(), weight)
    with torch.no_grad():
        ends = []
        for shift in (1e-6, -1e-6):
            weight += shift
            ends.append(float(layer(x).sum()))
            weight -= shift
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


def test_unrolled_with_another_solver_is_plain_iteration() -> None:
    x = numbers(3, 2)
    for solver in ("anderson", "fixed_point"):
        layer = Equilibrium(LeastSquares(), solver, Unrolled(4, damping=0.5), on_failure="ignore")
        z = torch.zeros(3, 4, dtype=F64)
        for _ in range(4):
            z = (z + layer.cell.step(z, x)) / 2
        assert torch.allclose(layer(x), z, rtol=1e-12)


def test_unrolled_sam_refuses_damping() -> None:
    layer = Equilibrium(LeastSquares(), SAM("l2"), Unrolled(3, damping=0.5))
    with pytest.raises(
        ValueError, match=r"^Unrolled\.damping must be 1 with SAM, which averages; got 0\.5\.$"
    ):
        layer(numbers(2, 2))


@pytest.mark.parametrize(
    "gradient", [Implicit(), Phantom(30), JacobianFree()], ids=lambda g: type(g).__name__
)
def test_other_gradients_take_the_equilibrium_as_isolated(gradient) -> None:
    """Where it is, the implicit derivative is as near as the iterate is to the equilibrium."""
    layer = Equilibrium(
        Shrink(), SAM("l2", rho=0.8, decay=0.05), gradient, tolerance=1e-3, max_steps=4000
    )
    x = numbers(3, 4).requires_grad_()
    z = layer(x)
    assert torch.allclose(z, x, rtol=2e-3)
    (slope,) = torch.autograd.grad(z.sum(), x)
    expected = 0.5 if isinstance(gradient, JacobianFree) else 1.0
    assert torch.allclose(slope, torch.full_like(x, expected), rtol=2e-3)


# Settings.


@pytest.mark.parametrize("value", [0, -0.1, math.nan, math.inf, True, "1", None])
def test_exponents_must_be_positive_numbers(value: object) -> None:
    for name in ("rho", "decay"):
        rule = r"in \(0, 1\)" if name == "rho" else "a positive number"
        with pytest.raises(ValueError, match=rf"^SAM\.{name} must be {rule}; got .*\.$"):
            SAM("l2", **{name: value})
    if value is not None:
        for name in ("lipschitz", "eta"):
            with pytest.raises(
                ValueError, match=rf"^SAM\.{name} must be a positive number; got .*\.$"
            ):
                SAM("l2", **{name: value})


@pytest.mark.parametrize(("rho", "decay"), [(0.5, 0.25), (0.2, 0.4), (0.9, 0.1), (0.1, 0.5)])
def test_exponents_must_leave_the_lag_a_rate(rho: float, decay: float) -> None:
    with pytest.raises(
        ValueError,
        match=(
            rf"^SAM\.decay must be less than \(1 - rho\)/2 = {(1 - rho) / 2:g}, so that "
            rf"rho \+ 2 decay < 1; got {decay}\.$"
        ),
    ):
        SAM("l2", rho=rho, decay=decay)


def test_eta_has_a_largest_value() -> None:
    SAM("l2", eta=1.0)
    SAM(shifted, lipschitz=0.1, eta=0.3)
    with pytest.raises(
        ValueError,
        match=(
            r"^SAM\.eta must be at most min\(1, 3 lipschitz\) = 1; got 1\.1\. Some steps "
            r"would expand\.$"
        ),
    ):
        SAM("l2", eta=1.1)
    with pytest.raises(
        ValueError, match=r"^SAM\.eta must be at most min\(1, 3 lipschitz\) = 0\.3; got 0\.4\."
    ):
        SAM(shifted, lipschitz=0.1, eta=0.4)


@pytest.mark.parametrize(
    "R", ["l1", "nuclear", "decorrelation", "hsic", TotalVariation(0.0), shifted]
)
def test_a_lipschitz_constant_is_needed(R: object) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"^SAM\.lipschitz must be given for \w+, which knows no Lipschitz constant .*; "
            r"got None\. Pass"
        ),
    ):
        SAM(R)
    assert SAM(R, lipschitz=3.0).gamma == 1 / 6


def test_settings_are_frozen_and_survive_a_change_of_one() -> None:
    sam = SAM("l2", eta=0.1)
    with pytest.raises(FrozenInstanceError):
        sam.rho = 0.2
    assert sam == SAM("l2", eta=0.1)
    assert repr(sam) == "SAM(regularizer='l2', rho=0.3, decay=0.3, lipschitz=None, eta=0.1)"
    other = replace(sam, regularizer=Incay(0.5), eta=None)
    assert other.gamma == 1 / 8
    assert other.schedule(1) == (0.5, 0.5)


@pytest.mark.parametrize("R", ["l3", 3, SquaredNorm])
def test_regularizer_must_be_one(R: object) -> None:
    with pytest.raises(ValueError, match=r"^regularizer must be"):
        SAM(R)


@pytest.mark.parametrize("gradient", [Implicit(), Unrolled(3)], ids=lambda g: type(g).__name__)
def test_coupled_regularizer_needs_a_coupled_cell(gradient) -> None:
    layer = Equilibrium(Shrink(), SAM("decorrelation", lipschitz=1.0), gradient)
    message = (
        r"^SAM\.regularizer must not tie independent samples together; got "
        r"Decorrelation\. Set coupled = True on the cell, "
    )
    with pytest.raises(ValueError, match=message):
        layer(numbers(3, 2))


class Pair(Cell):
    def inject(self, x: Tensor) -> Tensor:
        return x

    def initial(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def step(self, z: tuple[Tensor, Tensor], context: Tensor) -> tuple[Tensor, Tensor]:
        return (z[1] + context) / 2, (z[0] + context) / 2


def test_a_state_of_several_tensors_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^SAM must have a state of one tensor, .*; got a tree of tensors\.$"
    ):
        Equilibrium(Pair(), SAM("l2"))(numbers(3, 2))


def test_sam_is_refused_for_the_adjoint() -> None:
    layer = Equilibrium(Shrink(), gradient=Implicit(SAM("l2")))
    x = numbers(3, 2).requires_grad_()
    z = layer(x)
    with pytest.raises(
        ValueError,
        match=(
            r"^SAM must solve the forward equation, .*; got a linear one, such as an "
            r"adjoint\. Give it"
        ),
    ):
        z.sum().backward()


def test_sam_accepts_an_empty_batch() -> None:
    x = torch.zeros(0, 4, dtype=F64)
    assert Equilibrium(Shrink(), SAM("l2"))(x).shape == (0, 4)
    assert Equilibrium(Shrink(), SAM(ABSOLUTE), Unrolled(3))(x).shape == (0, 4)
