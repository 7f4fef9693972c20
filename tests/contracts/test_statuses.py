"""How a solve ended must be true: a thousand problems with known fates, and NaN at any moment."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from equipoise import SOLVERS, FixedPoint, Status, Stop, solve
from equipoise.solvers import Linearization, run
from equipoise.testing import check_statuses
from equipoise.testing.fates import (
    FAMILIES,
    SYMMETRIC_FAMILIES,
    Maker,
    Poison,
    Sample,
    draw_batch,
    stack,
    step,
)
from equipoise.testing.problems import affine_problem, contraction
from equipoise.testing.status import relative_to

STOP = Stop(tolerance=1e-6, max_steps=120, patience=50)
FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
GENERAL = [name for name in FORWARD if not SOLVERS[name].needs_symmetric]
LINEAR = [name for name in SOLVERS if SOLVERS[name].linear]
REGULAR_SYMMETRIC_FAMILIES = [*SYMMETRIC_FAMILIES[:2], SYMMETRIC_FAMILIES[3], Maker.slow_expansion]
BATCHES = 20  # of 50: a thousand problems


def names(status: Tensor) -> list[str]:
    return [Status(code).name for code in status.tolist()]


@pytest.mark.parametrize("seed", range(BATCHES))
def test_plain_iteration_says_what_became_of_each_sample(seed):
    samples = draw_batch(seed)
    start, context = stack(samples)
    solution = solve(step, start, "fixed_point", STOP, context=context)
    told = [(s.family, name) for s, name in zip(samples, names(solution.status), strict=True)]
    assert told == [(s.family, s.fate.name) for s in samples]


@pytest.mark.parametrize("seed", range(BATCHES))
def test_plain_iteration_stops_when_it_should_and_keeps_the_best(seed):
    samples = draw_batch(seed)
    start, context = stack(samples)
    solution = solve(step, start, "fixed_point", STOP, context=context)
    z, residuals, norms, path = start, [], [], []
    for _ in range(STOP.max_steps + 1):
        f = step(z, context)
        residuals.append((f - z).norm(dim=1).numpy())
        norms.append(f.norm(dim=1).numpy())
        path.append(z)
        z = f
    history, scale = np.stack(residuals), np.stack(norms)
    for i, sample in enumerate(samples):
        steps, made = int(solution.steps[i]), history[: int(solution.steps[i]) + 1, i]
        first = max(history[0, i], scale[0, i], float(start[i].norm()))
        unit = relative_to(STOP, made, scale[: steps + 1, i], first)
        met = made <= STOP.absolute + STOP.tolerance * unit
        assert not met[:-1].any(), sample.family
        assert np.isfinite(made[:-1]).all(), sample.family
        if sample.fate == Status.CONVERGED:
            assert met[-1]
            best = steps
        else:
            best = int(np.nanargmin(made))
        if sample.fate == Status.NONFINITE:
            assert not np.isfinite(made[-1])
        if sample.fate == Status.MAX_STEPS:
            assert steps == STOP.max_steps
        if sample.fate == Status.STALLED:
            assert made[-STOP.patience :].min() >= 0.99 * made[: -STOP.patience].min()
        if sample.family == "at_rest":
            assert steps == 0
        if np.isfinite(made[best]):
            reached = (step(solution.value, context) - solution.value).norm(dim=1)[i]
            assert float(reached) <= made[best] * (1 + 1e-9), sample.family
        else:
            assert torch.equal(solution.value[i], path[0][i])


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("seed", range(BATCHES))
def test_status_is_true_for_every_solver(name, seed):
    samples = draw_batch(seed)
    stop = Stop(tolerance=1e-6, max_steps=30) if name == "newton" else STOP  # which is slow
    solution = check_statuses(name, samples, stop)
    easy = [i for i, s in enumerate(samples) if s.family in ("contraction", "to_zero", "at_rest")]
    assert solution.converged[easy].all()


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("seed", range(5))
def test_status_is_true_for_symmetric_maps(name, seed):
    samples = draw_batch(seed, SYMMETRIC_FAMILIES, 36)
    solution = check_statuses(name, samples, STOP, symmetric=True)
    easy = [i for i, s in enumerate(samples) if s.family == "contraction"]
    assert solution.converged[easy].all()
    if name == "accelerated":
        bad = [i for i, s in enumerate(samples) if s.fate in (Status.STALLED, Status.DIVERGED)]
        assert not solution.converged[bad].any()
        growing = [i for i, s in enumerate(samples) if s.fate == Status.DIVERGED]
        assert names(solution.status[growing]) == ["DIVERGED"] * len(growing)


def solve_affine(name: str, samples: list[Sample], stop: Stop):
    _, (_, A, g, _) = stack(samples)
    problem = affine_problem(A, g, symmetric=SOLVERS[name].needs_symmetric)
    solution = run(problem, torch.zeros_like(g), SOLVERS.resolve(name), stop)
    f = torch.einsum("bij,bj->bi", A, solution.value) + g
    return (
        solution,
        (f - solution.value).norm(dim=1),
        torch.maximum(f.norm(dim=1), g.norm(dim=1)),
        g.norm(dim=1),
    )


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("seed", range(5))
def test_status_is_true_for_affine_equations(name, seed):
    singular = (Maker.inconsistent, Maker.translation)
    families = [family for family in FAMILIES[:13] if family not in (*singular, Maker.logistic)]
    samples = draw_batch(
        seed, REGULAR_SYMMETRIC_FAMILIES if SOLVERS[name].needs_symmetric else families, 36
    )
    stop = Stop(tolerance=1e-8, absolute=0.0, max_steps=30 if name == "newton" else 120)
    solution, residual, scale, size = solve_affine(name, samples, stop)
    assert solution.value.isfinite().all()
    assert "NONFINITE" not in names(solution.status)
    assert torch.equal(solution.converged, residual <= stop.tolerance * scale * (1 + 1e-6))
    assert (residual <= size * (1 + 1e-9)).all(), "worse than the start"
    assert torch.allclose(
        solution.residual, torch.where(scale == 0, 0.0, residual / scale), rtol=1e-3, atol=1e-12
    )
    for i, sample in enumerate(samples):
        if sample.fate == Status.CONVERGED and sample.family != "at_rest":
            assert solution.converged[i], sample.family
        if solution.status[i] == Status.MAX_STEPS:
            assert solution.steps[i] == stop.max_steps, sample.family
        if name == "neumann" and sample.fate in (Status.DIVERGED, Status.STALLED) and size[i] > 0:
            assert solution.status[i] == sample.fate, sample.family


@pytest.mark.parametrize("name", list(SOLVERS))
def test_singular_affine_equation_is_never_called_solved(name):
    # `v = v + g` has no solution, but where |v| is very large the residual |g| is small beside it.
    maker = Maker(0)
    stop = Stop(tolerance=1e-8, absolute=0.0, max_steps=120)
    solution, residual, _, size = solve_affine(name, [maker.translation() for _ in range(30)], stop)
    assert solution.value.isfinite().all()
    assert not solution.converged.any()
    assert (residual <= size * (1 + 1e-9)).all()
    if name not in ("broyden", "anderson"):  # these may run away along the kernel
        assert names(solution.status) == ["STALLED"] * 30


@pytest.mark.parametrize("name", [name for name in LINEAR if SOLVERS[name].tracks_residual])
def test_affine_residual_is_recomputed_and_never_worse_than_at_the_start(name):
    # Almost singular: recurrences drift far from the residuals that they predict.
    maker = Maker(0)
    samples = [maker.symmetric(0, 0.5, "inconsistent", Status.STALLED, top=1.0) for _ in range(60)]
    stop = Stop(tolerance=1e-8, absolute=0.0, max_steps=120)
    solution, residual, scale, _ = solve_affine(name, samples, stop)
    noise = 100 * torch.finfo(torch.float64).eps * solution.value.norm(dim=1) / scale
    assert (solution.residual <= 1 + 1e-9).all()
    assert ((solution.residual - residual / scale).abs() <= noise + 1e-9).all()


@pytest.mark.parametrize("looks", [1, 2, 3, 4, 8])
def test_status_does_not_depend_on_how_often_one_looks(looks):
    stop = Stop(tolerance=1e-6, max_steps=120, check_every=looks)
    sure = [
        family
        for family in FAMILIES
        if family not in (Maker.square, Maker.exponential, Maker.permutation)
    ]
    for seed in range(4):
        samples = draw_batch(seed, sure)
        start, context = stack(samples)
        solution = solve(step, start, "fixed_point", stop, context=context)
        told = [(s.family, name) for s, name in zip(samples, names(solution.status), strict=True)]
        assert told == [(s.family, s.fate.name) for s in samples]


@pytest.mark.parametrize("samples", [1, 6])
@pytest.mark.parametrize(("tolerance", "first"), [(1e-3, 3.0), (1e-8, 3.0), (1e-3, 0.01)])
def test_residual_that_came_down_and_rises_a_little_has_not_diverged(samples, tolerance, first):
    """Near the target or far below the first residual, the last steps alone show no divergence."""
    rates = torch.tensor([0.2, 1.02], dtype=torch.float64)
    start = torch.tensor([[3.75 - 1.25 * first, 0.25]], dtype=torch.float64).expand(samples, 2)

    def last(steps):
        stop = Stop(tolerance=tolerance, max_steps=steps)
        moved = torch.tensor([3.0, 0.0], dtype=torch.float64)
        return set(names(solve(lambda z: rates * z + moved, start, "fixed_point", stop).status))

    assert last(15) == {"MAX_STEPS"}
    assert last(400) == {"DIVERGED"}


@pytest.mark.parametrize("looks", [1, 2, 4, 8])
def test_growth_after_a_long_fall_is_divergence_however_often_one_looks(looks):
    rates = torch.tensor([0.7, 1.05], dtype=torch.float64)
    start = torch.tensor([[1e6, 1e-3]], dtype=torch.float64)
    solution = solve(
        lambda z: rates * z,
        start,
        "fixed_point",
        Stop(tolerance=1e-8, max_steps=150, check_every=looks),
    )
    assert names(solution.status) == ["DIVERGED"]


@pytest.mark.parametrize("rate", [1.002, 1.005, 1.01, 1.02])
def test_slow_growth_is_divergence(rate):
    solution = solve(
        lambda z: rate * z + 1,
        torch.zeros(1, 1, dtype=torch.float64),
        "fixed_point",
        Stop(max_steps=500),
    )
    assert names(solution.status) == ["DIVERGED"]


@pytest.mark.parametrize("rate", [0.9999, 0.9996, 0.9991, 0.995])
def test_slow_fall_is_no_stall(rate):
    # Over 50 updates the residual falls by half a percent at least: five times the thousandth that
    # patience asks for.
    solution = solve(
        lambda z: rate * z + 1,
        torch.zeros(1, 1, dtype=torch.float64),
        "fixed_point",
        Stop(max_steps=200),
    )
    assert names(solution.status) == ["MAX_STEPS"]
    assert solution.steps.tolist() == [200]


@pytest.mark.parametrize("rate", [1.0, 1.01, 1.03])
@pytest.mark.parametrize("tolerance", [0.05, 1e-3])
def test_iterate_that_runs_away_never_converges(rate, tolerance):
    # The residual never falls, but the state grows until the residual is small beside it.
    solution = solve(
        lambda z: rate * z + 1,
        torch.zeros(1, 1, dtype=torch.float64),
        "fixed_point",
        Stop(tolerance, max_steps=3000, patience=3000),
    )
    assert names(solution.status) == ["STALLED" if rate == 1 else "DIVERGED"]


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tolerance_beyond_the_dtype_is_no_convergence(name, dtype):
    # A residual of exactly zero may be hit by luck; short of that nothing below machine precision
    # may be claimed.
    torch.manual_seed(1)
    A, c = contraction(8, 5, 5), torch.randn(8, 5, dtype=torch.float64)
    A, c = (A @ A.mT).to(dtype), c.to(dtype)
    solution = solve(
        lambda z, context: torch.einsum("bij,bj->bi", context[0], z) + context[1],
        torch.zeros_like(c),
        name,
        Stop(tolerance=1e-20, absolute=0.0, max_steps=1000),
        context=(A, c),
        symmetric=True,
    )
    gap = torch.einsum("bij,bj->bi", A, solution.value) + c - solution.value
    eps = torch.finfo(dtype).eps
    assert (gap.norm(dim=1) <= 100 * eps * solution.value.norm(dim=1)).all()
    assert torch.equal(solution.converged, solution.residual == 0)
    assert set(names(solution.status)) <= {"CONVERGED", "STALLED"}


@pytest.mark.parametrize("name", [name for name in LINEAR if SOLVERS[name].tracks_residual])
@pytest.mark.parametrize("max_steps", [30, 300, 3000])
@pytest.mark.parametrize("can_drop_rows", [True, False])
def test_prediction_that_drifted_is_not_believed(name, max_steps, can_drop_rows):
    # The tolerance is out of float32's reach, though the recurrences believe that they get there.
    A = contraction(6, 7, 7, norm=0.9)
    A, g = (A @ A.mT).float(), torch.randn(6, 7)
    g[1] = 0
    problem = affine_problem(A, g, transpose=True, symmetric=True, can_drop_rows=can_drop_rows)
    stop = Stop(tolerance=1e-9, absolute=0.0, max_steps=max_steps)
    solution = run(problem, torch.zeros(6, 7), SOLVERS.resolve(name), stop)
    f = torch.einsum("bij,bj->bi", A, solution.value) + g
    residual = (f - solution.value).norm(dim=1)
    assert names(solution.status)[1] == "CONVERGED"
    assert solution.steps[1] == 0
    assert (residual <= 1e-5 * solution.value.norm(dim=1)).all()
    # Recomputing in another order moves a residual at the limit of the dtype, so only what was
    # reported can be held to.
    assert (solution.residual[solution.converged] <= 1e-9).all()
    assert (solution.steps <= max_steps).all()


# Newton is done after a few calls.
@pytest.mark.parametrize(
    ("name", "call"),
    [(n, k) for n in FORWARD for k in (0, 1, 2, 3, 4, 6, 8) if n != "newton" or k < 4],
)
@pytest.mark.parametrize("count", [1, 5])
def test_nan_at_any_call_is_told_and_touches_nobody_else(name, call, count):
    A = contraction(count, 6, 6, norm=0.97)
    A, c = A @ A.mT, torch.randn(count, 6, dtype=torch.float64)
    start, stop = torch.randn(count, 6, dtype=torch.float64), Stop(tolerance=1e-10, max_steps=2000)
    context = (torch.arange(count), A, c)
    clean = solve(Poison(-1, 0), start, name, stop, context=context, symmetric=True)
    assert clean.converged.all()
    for victim in range(count):
        poison = Poison(victim, call)
        solution = solve(poison, start, name, stop, context=context, symmetric=True)
        assert poison.struck
        assert names(solution.status)[victim] == "NONFINITE"
        assert solution.value[victim].isfinite().all()
        others = [i for i in range(count) if i != victim]
        assert solution.converged[others].all()
        assert torch.allclose(
            solution.value[others],
            clean.value[others],
            rtol=0,
            atol=1e-12 if name != "newton" else 1e-9,
        )
        before = (A[victim] @ start[victim] + c[victim] - start[victim]).norm()
        f = A[victim] @ solution.value[victim] + c[victim]
        after = (f - solution.value[victim]).norm()
        if call == 0:
            assert torch.equal(solution.value[victim], start[victim])
            assert not solution.residual[victim].isfinite()
        else:
            assert after <= before * (1 + 1e-12)
            assert math.isclose(
                float(solution.residual[victim]), float(after / f.norm()), rel_tol=1e-6
            )


@pytest.mark.parametrize("call", range(12))
def test_nan_keeps_the_best_iterate_of_plain_iteration(call):
    A, c = contraction(3, 5, 5, norm=0.9), torch.randn(3, 5, dtype=torch.float64)
    start = torch.randn(3, 5, dtype=torch.float64)
    solution = solve(
        Poison(1, call),
        start,
        FixedPoint(),
        Stop(tolerance=1e-12, max_steps=500),
        context=(torch.arange(3), A, c),
    )
    z = start[1]
    for _ in range(call - 1):
        z = A[1] @ z + c[1]
    assert names(solution.status) == ["CONVERGED", "NONFINITE", "CONVERGED"]
    assert solution.steps[1] == call
    assert torch.allclose(solution.value[1], z, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "call"),
    # Elimination is done after a few calls too.
    [(n, k) for n in SOLVERS for k in (0, 1, 2, 4) if n != "dense" or k < 2],
)
def test_nan_in_a_jacobian_product_is_told_and_touches_nobody_else(name, call):
    A = contraction(4, 9, 9, norm=0.97)
    A, g = A @ A.mT, torch.randn(4, 9, dtype=torch.float64)
    stop = Stop(tolerance=1e-9, absolute=0.0, max_steps=2000)

    def solution_with(victim: int):
        calls = [0]

        def local(matrix, number):
            def product(v):
                hit = (number == victim) & (calls[0] >= call)
                calls[0] += 1
                return torch.where(hit[:, None], torch.nan, torch.einsum("bij,bj->bi", matrix, v))

            return Linearization(
                torch.zeros_like(matrix[:, 0]),
                product,
                product,
                lambda rows: local(matrix[rows], number[rows]),
            )

        products = local(A, torch.arange(4))
        problem = affine_problem(A, g, transpose=True, symmetric=True, local=products)
        return run(problem, torch.zeros_like(g), SOLVERS.resolve(name), stop)

    clean = solution_with(-1)
    assert clean.converged.all()
    for victim in range(4):
        solution = solution_with(victim)
        assert not solution.converged[victim]
        assert names(solution.status)[victim] == "NONFINITE"
        assert solution.value[victim].isfinite().all()
        others = [i for i in range(4) if i != victim]
        assert solution.converged[others].all()
        assert torch.allclose(solution.value[others], clean.value[others], atol=1e-7)


def test_thousand_problems_are_a_thousand_and_mixed():
    samples = [sample for seed in range(BATCHES) for sample in draw_batch(seed)]
    assert len(samples) == 1000
    assert {sample.fate for sample in samples} == set(Status)
    assert all(len({sample.fate for sample in draw_batch(seed)}) == 5 for seed in range(BATCHES))
