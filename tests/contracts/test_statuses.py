"""Statuses are true: a thousand problems whose fate is known, and NaN at any moment."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from problems import Product, contraction
from torch import Tensor

from equipoise import SOLVERS, FixedPoint, Status, Stop, solve
from equipoise.solvers import Linearization, LinearProblem, MapProblem, run

WIDTH = 4
STOP = Stop(tolerance=1e-6, max_steps=120, patience=50)
FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
GENERAL = [name for name in FORWARD if not SOLVERS[name].needs_symmetric]
LINEAR = [name for name in SOLVERS if SOLVERS[name].linear]
AFFINE, LOGISTIC, SQUARE, EXPONENTIAL, ROOT, POLE = range(6)


def step(z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
    """Each sample's own map.

    Arguments of the other samples are made harmless, so that no derivative is 0 times infinity.
    """
    kind, A, c, rate = context
    is_a = kind[:, None] == torch.arange(6)
    value = torch.einsum("bij,bj->bi", A, z) + c
    value = torch.where(is_a[:, [LOGISTIC]], rate * z * (1 - z), value)
    value = torch.where(is_a[:, [SQUARE]], z * z, value)
    value = torch.where(
        is_a[:, [EXPONENTIAL]], torch.where(is_a[:, [EXPONENTIAL]], z, 0.0).exp(), value
    )
    value = torch.where(is_a[:, [ROOT]], (torch.where(is_a[:, [ROOT]], z, 2.0) - 1).sqrt(), value)
    return torch.where(is_a[:, [POLE]], 1 / torch.where(is_a[:, [POLE]], z, 1.0), value)


@dataclass
class Sample:
    family: str
    fate: Status
    """How plain iteration ends."""
    start: Tensor
    kind: int
    A: Tensor
    c: Tensor
    rate: float


class Maker:
    """Draws problems of each family from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * float(
            torch.rand((), generator=self.generator, dtype=torch.float64)
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def direction(self) -> Tensor:
        return torch.nn.functional.normalize(self.normal(WIDTH), dim=0)

    def basis(self) -> Tensor:
        return torch.linalg.qr(self.normal(WIDTH, WIDTH))[0]

    def affine(
        self, family: str, fate: Status, A: Tensor, c: Tensor, start: Tensor | None = None
    ) -> Sample:
        return Sample(
            family, fate, self.normal(WIDTH) if start is None else start, AFFINE, A, c, 0.0
        )

    def other(
        self, family: str, fate: Status, kind: int, start: Tensor, rate: float = 0.0
    ) -> Sample:
        nothing = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        return Sample(family, fate, start, kind, nothing, nothing[0], rate)

    def contraction(self) -> Sample:
        A = self.normal(WIDTH, WIDTH)
        return self.affine(
            "contraction",
            Status.CONVERGED,
            self.uniform(0, 0.85) * A / torch.linalg.matrix_norm(A, 2),
            self.normal(WIDTH),
        )

    def to_zero(self) -> Sample:
        return self.affine(
            "to_zero",
            Status.CONVERGED,
            self.uniform(0.1, 0.7) * self.basis(),
            torch.zeros(WIDTH, dtype=torch.float64),
        )

    def at_rest(self) -> Sample:
        A, start = 3 * self.basis(), self.normal(WIDTH)
        return self.affine("at_rest", Status.CONVERGED, A, start - A @ start, start)

    def slow_contraction(self) -> Sample:
        return self.affine(
            "slow_contraction",
            Status.MAX_STEPS,
            self.uniform(0.97, 0.995) * self.basis(),
            self.normal(WIDTH),
        )

    def rotation(self) -> Sample:
        Q, turn = self.basis(), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
        for index in (0, 2):
            angle = self.uniform(0.3, math.pi)
            cos, sin = math.cos(angle), math.sin(angle)
            turn[index : index + 2, index : index + 2] = torch.tensor(
                [[cos, -sin], [sin, cos]], dtype=torch.float64
            )
        return self.affine("rotation", Status.STALLED, Q @ turn @ Q.T, self.normal(WIDTH))

    def reflection(self) -> Sample:
        v = self.direction()
        mirror = torch.eye(WIDTH, dtype=torch.float64) - 2 * torch.outer(v, v)
        return self.affine(
            "reflection", Status.STALLED, mirror, self.uniform(0.5, 2) * v, v + self.normal(WIDTH)
        )

    def permutation(self) -> Sample:
        order = torch.randperm(WIDTH, generator=self.generator)
        while bool((order == torch.arange(WIDTH)).all()):
            order = torch.randperm(WIDTH, generator=self.generator)
        start = torch.arange(WIDTH, dtype=torch.float64) + self.uniform(1, 3)
        return self.affine(
            "permutation",
            Status.STALLED,
            torch.eye(WIDTH, dtype=torch.float64)[order],
            torch.zeros_like(start),
            start,
        )

    def logistic(self) -> Sample:
        start = torch.tensor([self.uniform(0.15, 0.35) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("logistic", Status.STALLED, LOGISTIC, start, self.uniform(3.2, 3.4))

    def translation(self) -> Sample:
        c = self.uniform(0.1, 10) * self.direction()
        return self.affine("translation", Status.STALLED, torch.eye(WIDTH, dtype=torch.float64), c)

    def inconsistent(self) -> Sample:
        Q = self.basis()
        share = torch.tensor(
            [1.0, *(self.uniform(0, 0.5) for _ in range(WIDTH - 1))], dtype=torch.float64
        )
        return self.affine(
            "inconsistent",
            Status.STALLED,
            (Q * share) @ Q.T,
            Q[:, 0] * self.uniform(0.5, 2) + 0.1 * self.normal(WIDTH),
        )

    def slow_expansion(self) -> Sample:
        rate = self.uniform(1.02, 1.3)
        return self.affine(
            "slow_expansion",
            Status.DIVERGED,
            rate * torch.eye(WIDTH, dtype=torch.float64),
            self.normal(WIDTH),
        )

    def spiral(self) -> Sample:
        return self.affine(
            "spiral", Status.DIVERGED, self.uniform(1.05, 1.5) * self.basis(), self.normal(WIDTH)
        )

    def fast_expansion(self) -> Sample:
        return self.affine(
            "fast_expansion",
            Status.DIVERGED,
            self.uniform(2, 100) * self.basis(),
            self.normal(WIDTH),
        )

    def square(self) -> Sample:
        start = torch.tensor([self.uniform(1.2, 30) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("square", Status.DIVERGED, SQUARE, start)

    def exponential(self) -> Sample:
        start = torch.tensor([self.uniform(0.95, 1.05) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("exponential", Status.NONFINITE, EXPONENTIAL, start)

    def root(self) -> Sample:
        start = torch.tensor([self.uniform(1.5, 3) for _ in range(WIDTH)], dtype=torch.float64)
        return self.other("root", Status.NONFINITE, ROOT, start)

    def pole(self) -> Sample:
        start = torch.ones(WIDTH, dtype=torch.float64)
        start[0] = 0
        return self.other("pole", Status.NONFINITE, POLE, start)

    def symmetric(
        self, low: float, high: float, family: str, fate: Status, top: float | None = None
    ) -> Sample:
        """A symmetric matrix with eigenvalues in [low, high], the first one `top`; `low >= 0`."""
        Q = self.basis()
        share = torch.tensor([self.uniform(low, high) for _ in range(WIDTH)], dtype=torch.float64)
        share[0] = share[0] if top is None else top
        return self.affine(family, fate, (Q * share) @ Q.T, Q[:, 0] + 0.1 * self.normal(WIDTH))


FAMILIES: list[Callable[[Maker], Sample]] = [
    Maker.contraction,
    Maker.to_zero,
    Maker.at_rest,
    Maker.slow_contraction,
    Maker.rotation,
    Maker.reflection,
    Maker.permutation,
    Maker.logistic,
    Maker.translation,
    Maker.inconsistent,
    Maker.slow_expansion,
    Maker.spiral,
    Maker.fast_expansion,
    Maker.square,
    Maker.exponential,
    Maker.root,
    Maker.pole,
]
SYMMETRIC_FAMILIES: list[Callable[[Maker], Sample]] = [
    lambda maker: maker.symmetric(0, 0.8, "contraction", Status.CONVERGED),
    lambda maker: maker.symmetric(0.5, 0.999, "slow_contraction", Status.MAX_STEPS),
    lambda maker: maker.symmetric(0, 0.5, "inconsistent", Status.STALLED, top=1.0),
    lambda maker: maker.symmetric(0, 0.5, "expansion", Status.DIVERGED, top=1.2),
    Maker.translation,
    Maker.slow_expansion,
]
REGULAR_SYMMETRIC_FAMILIES = [*SYMMETRIC_FAMILIES[:2], SYMMETRIC_FAMILIES[3], Maker.slow_expansion]
BATCHES, BATCH = 20, 50  # a thousand problems


def batch(
    seed: int, families: list[Callable[[Maker], Sample]] = FAMILIES, size: int = BATCH
) -> list[Sample]:
    """A mixed batch: every family in turn, in random order."""
    maker = Maker(seed)
    samples = [families[(seed * size + i) % len(families)](maker) for i in range(size)]
    return [samples[i] for i in torch.randperm(size, generator=maker.generator).tolist()]


def stack(samples: list[Sample]) -> tuple[Tensor, tuple[Tensor, ...]]:
    return torch.stack([s.start for s in samples]), (
        torch.tensor([s.kind for s in samples]),
        torch.stack([s.A for s in samples]),
        torch.stack([s.c for s in samples]),
        torch.tensor([[s.rate] for s in samples], dtype=torch.float64),
    )


def names(status: Tensor) -> list[str]:
    return [Status(code).name for code in status.tolist()]


@pytest.mark.parametrize("seed", range(BATCHES))
def test_plain_iteration_says_what_became_of_each_sample(seed):
    samples = batch(seed)
    start, context = stack(samples)
    solution = solve(step, start, "fixed_point", STOP, context=context)
    told = [(s.family, name) for s, name in zip(samples, names(solution.status), strict=True)]
    assert told == [(s.family, s.fate.name) for s in samples]


@pytest.mark.parametrize("seed", range(BATCHES))
def test_plain_iteration_stops_when_it_should_and_keeps_the_best(seed):
    samples = batch(seed)
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
        met = made <= STOP.absolute + STOP.tolerance * scale[: steps + 1, i]
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


def check_truth(samples: list[Sample], solution, stop: Stop, *, monotone: bool) -> None:
    """What holds of every solver's verdict, with all residuals recomputed here.

    Args:
        samples: The batch.
        solution: Its solution, with a trace.
        stop: The rules.
        monotone: Whether the solver gives up as soon as it cannot lower the residual.
    """
    _, context = stack(samples)
    f = step(solution.value, context)
    residual, scale = (f - solution.value).norm(dim=1), f.norm(dim=1)
    history = torch.stack(
        [(step(state, context) - state).norm(dim=1) for state in solution.trace.state]
    ).numpy()
    sizes = torch.stack(
        [step(state, context).norm(dim=1) for state in solution.trace.state]
    ).numpy()
    reach = stop.growth * np.maximum(
        np.maximum(history[0], sizes[0]), solution.trace.state[0].norm(dim=1).numpy()
    )
    for i, sample in enumerate(samples):
        status, steps = Status(int(solution.status[i])), int(solution.steps[i])
        told = f"{sample.family}: {status.name} after {steps} steps"
        target = stop.absolute + stop.tolerance * float(scale[i])
        made = history[: steps + 1, i]
        assert solution.value[i].isfinite().all(), told
        arrived = math.isfinite(residual[i]) and float(residual[i]) <= target * (1 + 1e-6)
        assert (status == Status.CONVERGED) == (arrived and float(scale[i]) <= reach[i]), told
        assert (status == Status.NONFINITE) == (not np.isfinite(made[-1])), told
        assert np.isfinite(made[:-1]).all(), told
        if sample.kind == AFFINE:
            assert status != Status.NONFINITE, told
        if np.isfinite(made).any():
            assert math.isclose(
                float(solution.residual[i]),
                float(residual[i] / scale[i]),
                rel_tol=1e-4,
                abs_tol=1e-14,
            ), told
            if status != Status.CONVERGED:
                assert float(residual[i]) <= np.nanmin(made) * (1 + 1e-9), told
        if status == Status.MAX_STEPS:
            assert steps == stop.max_steps, told
        if status == Status.DIVERGED:
            assert made[-1] > 1.01 * made.min() or sizes[steps, i] > reach[i], told
        if status == Status.STALLED:
            assert made[-1] > 0.999 * made[:-1].min(), told
            assert monotone or made[-stop.patience :].min() > 0.99 * made[: -stop.patience].min(), (
                told
            )


@pytest.mark.parametrize("name", GENERAL)
@pytest.mark.parametrize("seed", range(BATCHES))
def test_status_is_true_for_every_solver(name, seed):
    samples = batch(seed)
    start, context = stack(samples)
    stop = Stop(tolerance=1e-6, max_steps=30) if name == "newton" else STOP
    solution = solve(step, start, name, stop, context=context, trace=True)
    check_truth(samples, solution, stop, monotone=name == "newton")
    easy = [i for i, s in enumerate(samples) if s.family in ("contraction", "to_zero", "at_rest")]
    assert solution.converged[easy].all()


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("seed", range(5))
def test_status_is_true_for_symmetric_maps(name, seed):
    samples = batch(seed, SYMMETRIC_FAMILIES, 36)
    start, context = stack(samples)
    solution = solve(step, start, name, STOP, context=context, symmetric=True, trace=True)
    check_truth(samples, solution, STOP, monotone=name == "newton")
    easy = [i for i, s in enumerate(samples) if s.family == "contraction"]
    assert solution.converged[easy].all()
    if name == "accelerated":
        bad = [i for i, s in enumerate(samples) if s.fate in (Status.STALLED, Status.DIVERGED)]
        assert not solution.converged[bad].any()
        growing = [i for i, s in enumerate(samples) if s.fate == Status.DIVERGED]
        assert names(solution.status[growing]) == ["DIVERGED"] * len(growing)


def solve_affine(name: str, samples: list[Sample], stop: Stop):
    _, (_, A, g, _) = stack(samples)
    base = MapProblem(Product(symmetric=SOLVERS[name].needs_symmetric), [A])
    start = torch.zeros_like(g)
    solution = run(
        LinearProblem(base, start, g, transpose=False).linearized(),
        start,
        SOLVERS.resolve(name),
        stop,
    )
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
    samples = batch(
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
        samples = batch(seed, sure)
        start, context = stack(samples)
        solution = solve(step, start, "fixed_point", stop, context=context)
        told = [(s.family, name) for s, name in zip(samples, names(solution.status), strict=True)]
        assert told == [(s.family, s.fate.name) for s in samples]


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
def test_converged_sample_is_the_iterate_that_converged(rate):
    # The residual never falls, but the state grows until the residual is small beside it.
    solution = solve(
        lambda z: rate * z + 1,
        torch.zeros(1, 1, dtype=torch.float64),
        "fixed_point",
        Stop(tolerance=0.05),
    )
    assert names(solution.status) == ["CONVERGED"]
    f = rate * solution.value + 1
    assert float((f - solution.value).abs() / f.abs()) <= 0.05
    assert float(solution.residual) <= 0.05


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_map_never_converges(name, dtype):
    start = torch.ones(3, 2, dtype=dtype)
    jump = torch.tensor([[0.0], [torch.inf], [torch.nan]], dtype=dtype)
    solution = solve(lambda z, c: 0.5 * z + 1 + c, start, name, context=jump, symmetric=True)
    assert names(solution.status) == ["CONVERGED", "NONFINITE", "NONFINITE"]
    assert torch.equal(solution.value[1:], start[1:])


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_start_that_is_not_finite_never_converges(name, bad):
    start = torch.ones(2, 2, dtype=torch.float64)
    start[0, 1] = bad
    solution = solve(lambda z, _: 0.5 * z + 1, start, name, context=(), symmetric=True)
    assert names(solution.status) == ["NONFINITE", "CONVERGED"]


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
    equation = Product(symmetric=True)
    equation.can_drop_rows = can_drop_rows
    base, start = MapProblem(equation, [A]), torch.zeros(6, 7)
    stop = Stop(tolerance=1e-9, absolute=0.0, max_steps=max_steps)
    solution = run(
        LinearProblem(base, start, g, transpose=True).linearized(),
        start,
        SOLVERS.resolve(name),
        stop,
    )
    residual = (base(solution.value) + g - solution.value).norm(dim=1)
    assert names(solution.status)[1] == "CONVERGED"
    assert solution.steps[1] == 0
    assert (residual <= 1e-5 * solution.value.norm(dim=1)).all()
    # Recomputing in another order moves a residual at the limit of the dtype, so only what was
    # reported can be held to.
    assert (solution.residual[solution.converged] <= 1e-9).all()
    assert (solution.steps <= max_steps).all()


class Poison:
    """The step `z = A z + c` of samples numbered in the context; from some call on one is NaN."""

    def __init__(self, victim: int, call: int) -> None:
        self.victim, self.call, self.calls, self.struck = victim, call, 0, False

    def __call__(self, z: Tensor, context: tuple[Tensor, ...]) -> Tensor:
        number, A, c = context
        value = torch.einsum("bij,bj->bi", A, z) + c
        hit = (number == self.victim) & (self.calls >= self.call)
        self.calls += 1
        self.struck |= bool(hit.any())
        return torch.where(hit[:, None], torch.nan, value)


# Newton is done after a few calls.
@pytest.mark.parametrize(
    ("name", "call"),
    [(n, k) for n in FORWARD for k in (0, 1, 2, 3, 4, 6, 8) if n != "newton" or k < 5],
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


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("call", [0, 1, 2, 4])
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

        base, start = MapProblem(Product(symmetric=True), [A]), torch.zeros_like(g)
        return run(
            LinearProblem(base, start, g, transpose=True, local=local(A, torch.arange(4))),
            start,
            SOLVERS.resolve(name),
            stop,
        )

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
    samples = [sample for seed in range(BATCHES) for sample in batch(seed)]
    assert len(samples) == 1000
    assert {sample.fate for sample in samples} == set(Status)
    assert all(len({sample.fate for sample in batch(seed)}) == 5 for seed in range(BATCHES))
