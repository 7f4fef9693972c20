"""Compiled kernels do what the array operations do."""

import math
import os
import subprocess
import sys
import threading

import pytest
import torch

from equipoise.core import kernels as kernels_module
from equipoise.core.tree import Layout
from equipoise.solvers import (
    Anderson,
    ConjugateGradient,
    Linearization,
    LinearProblem,
    Point,
    Status,
    Stop,
    run,
    solve,
)
from equipoise.solvers.coordinates import CoordinateProblem, Coordinates
from equipoise.solvers.kernels import Workspace, find_kernels, find_lengths, without_kernels
from equipoise.solvers.problem import MapProblem, Work
from equipoise.solvers.solve import Function

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    os.environ.get("EQUIPOISE_KERNELS") == "0", reason="kernels are switched off"
)

EXACT = {torch.float32: 2e-6, torch.float64: 1e-12}
DTYPES = list(EXACT)


def plain_problem(z):
    return MapProblem(Function(lambda z: z, Layout(z), None, False), ())


def halves_problem(z):
    coordinates = Coordinates(z, lambda u: u, 0.7, lambda u: u, lambda _: None)
    return CoordinateProblem(coordinates, symmetric=True, work=Work())


def rows(count, width, dtype, generator):
    """Random rows; as coordinates they have positive squares, since both halves are alike."""
    half = torch.randn(count, width // 2, generator=generator, dtype=dtype)
    noise = 0.1 * torch.randn(count, width, generator=generator, dtype=dtype)
    return torch.cat([half, half], dim=1) + noise


def close(a, b, dtype):
    finite = torch.isfinite(b)
    assert torch.equal(torch.isfinite(a), finite)
    size = torch.linalg.vector_norm(b[finite]) / math.sqrt(max(int(finite.sum()), 1))
    assert (a[finite] - b[finite]).abs().max() <= EXACT[dtype] * max(float(size), 1e-30) * 10


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [plain_problem, halves_problem])
def test_lengths_are_norms(dtype, make):
    generator = torch.Generator().manual_seed(0)
    z, f = rows(7, 90, dtype, generator), rows(7, 90, dtype, generator)
    f[1, 3], f[2, 4], f[3] = torch.nan, torch.inf, z[3]
    problem = make(z)
    size, length = find_lengths(problem, z)(z, f)
    assert size[3] == 0
    close(size, problem.norm(f - z), dtype)
    close(length, problem.norm(f), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [plain_problem, halves_problem])
@pytest.mark.parametrize(
    "solver",
    [
        Anderson(),
        Anderson(memory=2),
        Anderson(memory=1),
        Anderson(damping=0.6),
        Anderson(memory=8, plain_rate=0.75),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [80, 2500])
def test_anderson_steps_are_equal(dtype, make, solver, width):
    """Fed with the same points, through rests, plain steps, dropped rows and NaN."""
    generator = torch.Generator().manual_seed(1)
    z = rows(9, width, dtype, generator)
    problem = make(z)
    fast = solver.start(problem, z, z)
    with without_kernels():
        slow = solver.start(problem, z, z)
    assert fast.kernels is not None
    assert slow.kernels is None
    for step in range(17):
        z = rows(len(z), width, dtype, generator)
        # Some samples fall fast, some slowly, and some not at all, so that they rest.
        speed = torch.linspace(0.5, 1.02, len(z), dtype=dtype)[:, None] ** step
        f = z + speed * rows(len(z), width, dtype, generator)
        if step == 6:
            f[0, 0] = torch.nan
        at = [Point(z, f, None, problem.norm) for _ in range(2)]
        close(fast.advance(at[0]).z, slow.advance(at[1]).z, dtype)
        if step == 9:
            keep = torch.tensor([1, 2, 4, 7, 8])
            z = z[keep]
            fast.select_rows(problem, keep)
            slow.select_rows(problem, keep)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_gaps_are_mixed_alike(dtype):
    """Where gaps are dependent the matrix is singular but for the shift of its diagonal."""
    z = torch.ones(3, 4, dtype=dtype)
    f = torch.tensor([[2.0] * 4, [1.0] * 4, [3.0] * 4], dtype=dtype)
    problem = plain_problem(z)
    fast = Anderson(memory=3).start(problem, z, f)
    with without_kernels():
        slow = Anderson(memory=3).start(problem, z, f)
    for _ in range(4):
        values = [rule.advance(Point(z, f)).z for rule in (fast, slow)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-4)


def linear_problem(g, eigenvalues):
    def product(v):
        return v * eigenvalues

    local = Linearization(g, product, product, select_rows=lambda rows: linear(eigenvalues[rows]))

    def linear(chosen):
        return Linearization(chosen, lambda v: v * chosen, lambda v: v * chosen)

    base = plain_problem(g)
    base.symmetric = True
    return LinearProblem(base, g, g, transpose=True, local=local)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conjugate_gradient_steps_are_equal(dtype):
    """Also for an indefinite row, which stands still, a zero one, and one with NaN."""
    generator = torch.Generator().manual_seed(2)
    g = torch.randn(6, 40, generator=generator, dtype=dtype)
    eigenvalues = torch.rand(6, 40, generator=generator, dtype=dtype)
    eigenvalues[1], g[2], g[3, 5] = 1.5, 0.0, torch.nan
    problem, kept = linear_problem(g, eigenvalues), g.clone()
    z = torch.zeros(1, 1, dtype=dtype).expand_as(g)
    fast = ConjugateGradient().start(problem, z, g)
    with without_kernels():
        slow = ConjugateGradient().start(problem, z, g)
    assert type(fast) is not type(slow)
    points = [Point(z, g), Point(z, g)]
    for step in range(6):
        moves = [rule.advance(at) for rule, at in zip((fast, slow), points, strict=True)]
        close(moves[0].z, moves[1].z, dtype)
        close(moves[0].gap, moves[1].gap, dtype)
        close(moves[0].size, torch.linalg.vector_norm(moves[1].gap, dim=1), dtype)
        close(moves[0].length, torch.linalg.vector_norm(moves[1].z, dim=1), dtype)
        points = [Point(moves[1].z, moves[1].z, moves[1].gap) for _ in range(2)]
        if step == 3:
            keep = torch.tensor([0, 1, 4, 5])
            problem = problem.select_rows(keep)
            for rule, at in zip((fast, slow), points, strict=True):
                rule.select_rows(problem, keep)
                at.keep_rows(keep)
    assert torch.equal(g.nan_to_num(), kept.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solver", [Anderson(), Anderson(plain_rate=0.75)], ids=str)
def test_solves_end_alike(dtype, solver):
    """With samples that converge early or late, stall, diverge, or meet NaN."""
    generator = torch.Generator().manual_seed(3)
    W = torch.randn(30, 30, generator=generator, dtype=dtype)
    W = W / torch.linalg.matrix_norm(W, 2)
    c = torch.randn(40, 30, generator=generator, dtype=dtype)
    gain = torch.linspace(0.1, 0.97, 40, dtype=dtype)[:, None]
    gain[5], c[6, 0], c[7, 1] = 3.0, torch.nan, torch.inf

    def step(z, context):
        gain, c = context
        return gain * (z @ W.T) + c

    stop = Stop(1e-5 if dtype == torch.float32 else 1e-10, max_steps=60, patience=20)
    start, context = torch.zeros(40, 30, dtype=dtype), (gain, c)
    fast = solve(step, start, solver, stop, context=context)
    with without_kernels():
        slow = solve(step, start, solver, stop, context=context)
    assert torch.equal(fast.status, slow.status)
    assert {Status.CONVERGED, Status.NONFINITE} <= set(fast.counts())
    done = fast.converged
    assert (fast.residual[done] <= stop.tolerance).all()
    error = torch.linalg.vector_norm(fast.value - slow.value, dim=1)[done]
    assert (error <= 100 * stop.tolerance * torch.linalg.vector_norm(slow.value, dim=1)[done]).all()
    assert (fast.steps - slow.steps)[done].abs().max() <= 3


def test_a_solve_never_writes_to_its_start_or_its_constant():
    generator = torch.Generator().manual_seed(4)
    g = torch.randn(5, 20, generator=generator)
    problem = linear_problem(g, torch.full_like(g, 0.5))
    start, kept = torch.randn(5, 20, generator=generator), g.clone()
    before = start.clone()
    assert run(problem, start, ConjugateGradient(), Stop(1e-6)).all_converged
    assert torch.equal(start, before)
    assert torch.equal(g, kept)


def test_states_that_kernels_do_not_know_do_without():
    z = torch.zeros(2, 3)
    assert find_kernels(z) is not None
    assert find_kernels(z.half()) is None
    assert find_kernels(z.to("meta")) is None
    with torch.enable_grad():
        assert find_kernels(z) is None
    with without_kernels():
        assert find_kernels(z) is None
    seen = []
    torch.func.vmap(lambda row: seen.append(find_kernels(row)) or row)(z)
    assert seen == [None]


def test_rows_that_do_not_lie_together_are_copied():
    z, f = torch.randn(4, 6).T, torch.randn(6, 4)
    size, length = find_lengths(plain_problem(f), z)(z, f)
    torch.testing.assert_close(size, torch.linalg.vector_norm(f - z, dim=1))
    torch.testing.assert_close(length, torch.linalg.vector_norm(f, dim=1))


def test_large_states_are_left_to_many_threads(monkeypatch):
    z = torch.zeros(2**10, 2**9)
    assert find_kernels(z) is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert find_kernels(z) is None
    assert find_kernels(z[:4]) is not None


def test_memory_of_a_solve_is_its_own():
    """A solve within a step of another one, and solves in other threads, take other memory."""
    z = torch.zeros(1)
    first = Workspace(z, 100)
    second = Workspace(z, 100)
    assert first.split((1,), (100,))[0].ctypes.data != second.split((1,), (100,))[0].ctypes.data
    kept = first.split((1,), (100,))[0].ctypes.data
    del first
    found = []
    other = threading.Thread(target=lambda: found.append(Workspace(z, 100)))
    other.start()
    other.join()
    assert found[0].split((1,), (100,))[0].ctypes.data != kept
    again = Workspace(z.double(), 50)
    assert again.split((1,), (50,))[0].ctypes.data == kept


def test_threads_solve_alike():
    generator = torch.Generator().manual_seed(5)
    W = torch.randn(20, 20, generator=generator)
    W = 0.9 * W / torch.linalg.matrix_norm(W, 2)
    c = torch.randn(8, 20, generator=generator)
    found = [torch.empty(0)] * 8

    def work(place):
        with torch.no_grad():
            found[place] = solve(lambda z: torch.tanh(z @ W + c), torch.zeros(8, 20)).value

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(value, found[0]) for value in found)


PROGRAM = """
import sys, torch
from equipoise.solvers import solve
assert solve(lambda z: 0.5 * torch.cos(z), torch.zeros(3, 4)).all_converged
print("numba" in sys.modules)
"""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_switch_in_the_environment(switch):
    environment = {**os.environ, "EQUIPOISE_KERNELS": switch}
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == str(switch == "1")


def test_a_numba_that_fails_is_told_of_and_done_without(monkeypatch, caplog):
    import equipoise.solvers.row_kernels as compiled

    def fail(_):
        raise ImportError("Numba needs NumPy 2.0 or less")

    monkeypatch.setattr(kernels_module, "_ready", {})
    monkeypatch.setattr(compiled, "compile_for", fail)
    assert find_kernels(torch.zeros(2, 2)) is None
    assert find_kernels(torch.zeros(2, 2)) is None
    assert len(caplog.records) == 1
    assert "NumPy 2.0" in caplog.text
