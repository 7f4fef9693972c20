import numpy as np
import pytest
import scipy.optimize
import torch

from equipoise import (
    SAM,
    SOLVERS,
    Equilibrium,
    FixedPoint,
    Implicit,
    Linearization,
    Newton,
    Stop,
    solve,
)
from equipoise.solvers import Status, run
from equipoise.testing import check_solver
from equipoise.testing.cells import MaskCell, SymmetricMaskCell
from equipoise.testing.problems import (
    PROBLEMS,
    Known,
    affine,
    linear,
    residual_of,
    symmetric,
    tanh,
    tree,
)
from equipoise.testing.trees import bare, rows

TIGHT = Stop(tolerance=1e-13, max_steps=500)
ALL = list(SOLVERS)
FORWARD = [name for name in ALL if not SOLVERS[name].linear]
LINEAR = [name for name in ALL if SOLVERS[name].linear]
PAIRS = [
    (name, problem)
    for name in FORWARD
    for problem in PROBLEMS
    if not SOLVERS[name].needs_symmetric or problem.startswith("symmetric")
]


def among(*problems: str) -> list[tuple[str, str]]:
    return [pair for pair in PAIRS if pair[1] in problems]


def suitable(name: str) -> Known:
    """A batch that this solver may run on and that takes it several steps."""
    return symmetric() if SOLVERS[name].needs_symmetric else tanh()


def find(problem: Known, name: str, stop: Stop = TIGHT, **options):
    return solve(
        problem.step,
        problem.start,
        name,
        stop,
        context=problem.context,
        symmetric=problem.symmetric,
        **options,
    )


def error(found, answer) -> float:
    return float((rows(found) - rows(answer)).detach().abs().max())


def test_registry_holds_forward_and_linear_solvers():
    assert {"anderson", "broyden", "fixed_point", "newton", "accelerated"} <= set(FORWARD)
    assert {"bicgstab", "conjugate_gradient", "dense", "gmres", "neumann"} <= set(LINEAR)


@pytest.mark.parametrize("solver", [*SOLVERS, FixedPoint(0.9), SAM("l2")], ids=str)
def test_solver_keeps_its_promises(solver):
    check_solver(solver, max_steps=500)


@pytest.mark.parametrize(("name", "problem"), among("relu", "tanh", "symmetric"))
def test_forward_solver_agrees_with_scipy(name, problem):
    known = PROBLEMS[problem]()
    W, c = known.settings["W"].numpy(), known.settings["c"].numpy()
    maps = {
        "relu": lambda z, i: np.maximum(W @ z + c[i], 0),
        "tanh": lambda z, i: np.tanh(W @ z + c[i]),
        "symmetric": lambda z, i: W.T @ np.maximum(W @ z + c[i], 0),
    }
    found = find(known, name).value.numpy()
    for i in range(len(c)):
        witness = scipy.optimize.root(
            lambda z, i=i: maps[problem](z, i) - z, np.zeros(found.shape[1]), tol=1e-13
        )
        assert np.abs(witness.fun).max() < 1e-9
        assert np.abs(found[i] - witness.x).max() < 1e-8


@pytest.mark.parametrize("name", FORWARD)
def test_forward_solver_makes_one_step_when_asked_for_one(name):
    known = suitable(name)
    solution = find(known, name, Stop(tolerance=1e-13, max_steps=1))
    assert solution.status.tolist() == [Status.MAX_STEPS] * 5
    assert solution.steps.tolist() == [1] * 5
    before, _ = residual_of(known, known.start)
    after, scale = residual_of(known, solution.value)
    assert (after <= before).all()
    assert torch.allclose(solution.residual, after / scale, rtol=1e-10, atol=0)
    if name != "newton":  # all others begin with the plain step
        assert torch.equal(solution.value, known.step(known.start, bare(known.context)))


@pytest.mark.parametrize(
    ("name", "problem"),
    [pair for pair in among("tanh", "symmetric", "tree") if pair[0] != "newton"],
)
def test_forward_solver_counts_evaluations(name, problem):
    known = PROBLEMS[problem]()
    calls = []

    def step(z, context):
        calls.append(rows(z).shape[0])
        return known.step(z, context)

    solution = solve(
        step, known.start, name, TIGHT, context=known.context, symmetric=known.symmetric
    )
    assert int(solution.evaluations.max()) == len(calls)
    # One at the start, and one of the whole batch at the end if samples ended apart.
    apart = int(solution.steps.min() < solution.steps.max())
    assert torch.equal(solution.evaluations, solution.steps + 1 + apart)
    for call, at_work in enumerate(calls):
        assert at_work >= int((solution.steps >= call).sum())


class CountedMask(MaskCell):
    samples = 4

    def __init__(self, calls):
        super().__init__(width=6)
        self.calls = calls

    def step(self, z, context):
        self.calls.append("step")
        return super().step(z, context)

    def linearize(self, z, context):
        self.calls.append("linearize")
        return self._counted(super().linearize(z, context))

    def _counted(self, local):
        def jvp(v):
            self.calls.append("jvp")
            return local.jvp(v)

        def vjp(v):
            self.calls.extend(["vjp"] * (len(v) // self.samples))
            return local.vjp(v)

        return Linearization(
            local.value,
            jvp,
            vjp,
            select_rows=lambda index: self._counted(local.select_rows(index)),
        )


@pytest.mark.parametrize(("inner", "product"), [("krylov", "jvp"), ("dense", "vjp")])
def test_newton_counts_evaluations_and_products(inner, product):
    calls = []
    cell = CountedMask(calls)
    layer = Equilibrium(cell, Newton(inner=inner), stop=Stop(tolerance=1e-12))
    layer(torch.randn(4, 2, dtype=torch.float64))
    assert layer.last.converged.all()
    assert set(calls) == {"step", "linearize", product}
    # The first linearisation repeats the evaluation that the loop began with; both are counted.
    assert int(layer.last.evaluations.max()) == len(calls)


def test_trace_is_absent_unless_asked_for():
    assert find(tanh(), "anderson").trace is None


@pytest.mark.parametrize("name", FORWARD)
def test_hard_and_easy_samples_share_a_batch(name):
    rates = torch.tensor([0.0, 0.1, 0.9, 0.99, 0.5, 0.98], dtype=torch.float64)[:, None]
    start = torch.linspace(1, 2, 6, dtype=torch.float64)[:, None] * torch.ones(
        6, 3, dtype=torch.float64
    )
    at_work = []

    def step(z, rate):
        at_work.append(len(z))
        return rate * z + 1

    solution = solve(
        step, start, name, Stop(tolerance=1e-12, max_steps=5000), context=rates, symmetric=True
    )
    assert solution.converged.all()
    assert at_work[0] == 6
    if name in ("fixed_point", "accelerated"):  # the others solve this in a few steps
        assert at_work.pop() == 6  # a last look at the whole batch
        assert at_work[-1] == 1
        assert at_work == sorted(at_work, reverse=True)
    assert torch.allclose(solution.value, (1 / (1 - rates)).expand(6, 3), rtol=1e-9)
    assert solution.steps[0] <= solution.steps[3]


@pytest.mark.parametrize("name", FORWARD)
def test_solver_runs_a_map_that_ignores_its_state(name):
    constant = torch.randn(4, 3, dtype=torch.float64)
    solution = solve(
        lambda z, c: c + 0 * z,
        torch.zeros_like(constant),
        name,
        TIGHT,
        context=constant,
        symmetric=True,
    )
    assert solution.converged.all()
    assert error(solution.value, constant) < 1e-12
    assert (solution.steps <= 1).all()


@pytest.mark.parametrize("name", [name for name in FORWARD if name != "fixed_point"])
def test_accelerator_needs_fewer_evaluations_than_plain_iteration(name):
    rate = torch.linspace(0.5, 0.99, 6, dtype=torch.float64).repeat(3, 1)
    start = torch.ones_like(rate)
    stop = Stop(tolerance=1e-8, max_steps=5000)
    plain, fast = (
        solve(lambda z, r: r * z + 1, start, which, stop, context=rate, symmetric=True)
        for which in ("fixed_point", name)
    )
    assert fast.converged.all()
    assert int(fast.evaluations.max()) < int(plain.evaluations.max()) / 2


@pytest.mark.parametrize("name", LINEAR)
def test_linear_solver_refuses_a_nonlinear_map(name):
    with pytest.raises(ValueError, match="linear equations only"):
        solve(torch.cos, torch.zeros(2, 2), name, symmetric=True)


@pytest.mark.parametrize("name", [name for name in ALL if SOLVERS[name].needs_symmetric])
def test_symmetric_solver_refuses_a_map_not_declared_so(name):
    with pytest.raises(ValueError, match="symmetric positive semidefinite"):
        run(linear().problem, torch.zeros(5, 7, dtype=torch.float64), SOLVERS.resolve(name), TIGHT)


@pytest.mark.parametrize("name", ALL)
def test_implicit_gradient_uses_the_named_solver_to_the_right_answer(name):
    cell = SymmetricMaskCell(width=5, hidden=7)
    layer = Equilibrium(
        cell, "anderson", Implicit(solver=name), stop=Stop(tolerance=1e-12, max_steps=500)
    )
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    g = torch.randn_like(z)
    (found,) = torch.autograd.grad(z, x, g)
    slope = (z.detach() @ cell.W.T + cell.inject(x)).sigmoid().detach()  # (batch, hidden)
    J = torch.einsum("hi,bh,hj->bij", cell.W, slope, cell.W).detach()
    v = torch.linalg.solve(torch.eye(5, dtype=torch.float64) - J, g)
    expected = (slope * (v @ cell.W.T)) @ cell.U
    assert error(found, expected) < 1e-10
    adjoint = layer.last.adjoint
    assert adjoint.converged.all()
    assert error(adjoint.value, v) < 1e-10
    assert layer.solves.backward.solves == 1


def test_result_does_not_share_memory_with_the_start():
    start = torch.ones(2, 3, dtype=torch.float64)
    solution = solve(lambda z: z, start)
    solution.value.zero_()
    assert torch.equal(start, torch.ones_like(start))


def test_layer_runs_a_step_that_returns_its_context():
    class Pass(MaskCell):
        def step(self, z, context):
            return context

        def linearize(self, z, context):
            return None

    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    layer = Equilibrium(Pass(), "fixed_point")
    z = layer(x)
    assert error(z, layer.cell.inject(x)) == 0
    (found,) = torch.autograd.grad(z.sum(), x)
    assert error(found, layer.cell.U.sum(0).expand(2, 2)) < 1e-12


def test_large_float32_state_is_solved_without_overflow():
    solution = solve(
        lambda z: 0.5 * z + 1e32, torch.full((2, 1), 1e32), "fixed_point", Stop(tolerance=1e-5)
    )
    assert solution.converged.all()
    assert torch.allclose(solution.value, torch.tensor(2e32), rtol=1e-4)


def test_state_whose_norm_overflows_is_not_claimed_solved():
    solution = solve(
        lambda z: 0.5 * z + 1e32, torch.full((2, 3), 1e32), "fixed_point", Stop(tolerance=1e-5)
    )
    assert not solution.converged.any() or torch.allclose(
        solution.value, torch.tensor(2e32), rtol=1e-4
    )


def test_long_affine_batch_matches_torch():
    known = affine(batch=64, width=12)
    for name in FORWARD:
        if not SOLVERS[name].needs_symmetric:
            assert error(find(known, name).value, known.answer) < 1e-10


def test_tree_is_returned_as_the_tree_it_was():
    known = tree()
    found = find(known, "anderson").value
    assert set(found) == {"first", "rest"}
    assert isinstance(found["rest"], tuple)
    assert found["rest"][0].shape == (4, 2, 2)


@pytest.mark.parametrize("name", ["anderson", "broyden", "fixed_point", "newton"])
def test_solver_leaves_a_point_where_the_residual_is_only_locally_smallest(name):
    # At c = 0.4 the lower branch of z = tanh(1.6 z + c) has just vanished; the residual is smallest
    # there, but not zero.
    context = torch.full((1, 1), 0.4, dtype=torch.float64)
    start = torch.full((1, 1), -0.75, dtype=torch.float64)
    solution = solve(
        lambda z, c: torch.tanh(1.6 * z + c),
        start,
        name,
        Stop(1e-8, max_steps=200),
        context=context,
    )
    assert solution.converged.all()
    assert float(solution.value) > 0.9
