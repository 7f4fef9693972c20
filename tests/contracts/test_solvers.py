import numpy as np
import pytest
import scipy.optimize
import torch
from problems import (
    PROBLEMS,
    TIGHT,
    Known,
    MaskCell,
    Product,
    SymmetricMaskCell,
    affine,
    bare,
    leaves,
    linear,
    pick,
    residual_of,
    rows,
    symmetric,
    tanh,
    tree,
)

from equipoise import SOLVERS, Equilibrium, Implicit, Linearization, Shared, Status, Stop, solve
from equipoise.solvers import LinearProblem, MapProblem, run

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


COARSE = Stop(tolerance=1e-6, absolute=1e-7, max_steps=500)


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
    assert {"conjugate_gradient", "bicgstab", "gmres", "neumann"} <= set(LINEAR)


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_forward_solver_finds_known_fixed_point(name, problem):
    known = PROBLEMS[problem]()
    solution = find(known, name)
    assert solution.converged.all(), solution
    assert error(solution.value, known.answer) < 1e-10
    assert [leaf.shape for leaf in leaves(solution.value)] == [
        leaf.shape for leaf in leaves(known.answer)
    ]


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_forward_solver_finds_known_fixed_point_in_float32(name, problem):
    known = PROBLEMS[problem](dtype=torch.float32)
    solution = find(known, name, COARSE)
    assert solution.converged.all(), solution
    assert all(leaf.dtype == torch.float32 for leaf in leaves(solution.value))
    assert error(solution.value, known.answer) < 1e-4


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


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("max_steps", [1, 3, 500])
def test_forward_solver_reports_recomputed_residual(name, max_steps):
    known = suitable(name)
    solution = find(known, name, Stop(tolerance=1e-9, max_steps=max_steps))
    residual, scale = residual_of(known, solution.value)
    assert torch.allclose(solution.residual, residual / scale, rtol=1e-4, atol=1e-15)
    assert torch.equal(solution.converged, residual <= 1e-14 + 1e-9 * scale)
    assert solution.converged.all() == (max_steps == 500)


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
    assert torch.equal(solution.evaluations, solution.steps + 1)
    for call, at_work in enumerate(calls):
        assert at_work >= int((solution.evaluations > call).sum())


class CountedMask(MaskCell):
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

        return Linearization(
            local.value,
            jvp,
            local.vjp,
            select_rows=lambda index: self._counted(local.select_rows(index)),
        )


def test_newton_counts_evaluations_and_products():
    calls = []
    cell = CountedMask(calls)
    layer = Equilibrium(cell, "newton", stop=Stop(tolerance=1e-12))
    layer(torch.randn(4, 2, dtype=torch.float64))
    assert layer.last.converged.all()
    assert set(calls) == {"step", "linearize", "jvp"}
    # The first linearisation repeats the evaluation that the loop began with; both are counted.
    assert int(layer.last.evaluations.max()) == len(calls)


@pytest.mark.parametrize(("name", "problem"), among("tanh", "symmetric", "tree"))
def test_trace_holds_every_look(name, problem):
    known = PROBLEMS[problem]()
    solution = find(known, name, Stop(tolerance=1e-8), trace=True)
    path = solution.trace
    steps, batch = int(solution.steps.max()), rows(known.start).shape[0]
    assert path.residual.shape == (steps + 1, batch)
    assert len(path.state) == steps + 1
    assert error(path.state[0], known.start) == 0
    for look, state in enumerate(path.state):
        residual, scale = residual_of(known, state)
        assert torch.allclose(path.residual[look], residual / scale, rtol=1e-4, atol=1e-15)
    for sample, ended in enumerate(solution.steps.tolist()):
        end = rows(path.state[ended])[sample]
        assert torch.equal(rows(path.state[-1])[sample], end)
        assert torch.equal(rows(solution.value)[sample], end)
        assert (path.residual[:ended, sample] > 1e-8).all()
        assert (path.residual[ended:, sample] <= 1e-8).all()


def test_trace_is_absent_unless_asked_for():
    assert find(tanh(), "anderson").trace is None


@pytest.mark.parametrize("name", FORWARD)
def test_looking_less_often_makes_fewer_looks_and_finds_the_same(name):
    known = suitable(name)
    often = find(known, name, Stop(tolerance=1e-10, max_steps=500))
    rarely = find(known, name, Stop(tolerance=1e-10, max_steps=500, check_every=3), trace=True)
    assert rarely.converged.all()
    assert error(often.value, rarely.value) < 1e-8
    assert (rarely.steps % 3 == 0).all()
    assert (rarely.steps >= often.steps).all()
    assert len(rarely.trace.state) == int(rarely.steps.max()) // 3 + 1


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_warm_start_at_solution_takes_no_step(name, problem):
    known = PROBLEMS[problem]()
    solution = solve(
        known.step,
        known.answer,
        name,
        Stop(tolerance=1e-10),
        context=known.context,
        symmetric=known.symmetric,
        trace=True,
    )
    assert solution.converged.all()
    assert (solution.steps == 0).all()
    assert (solution.evaluations == 1).all()
    assert error(solution.value, known.answer) == 0
    assert solution.trace.residual.shape[0] == 1


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_sample_does_not_depend_on_its_batch_mates(name, problem):
    known = PROBLEMS[problem]()
    stop = Stop(tolerance=1e-11, max_steps=500)
    together = find(known, name, stop)
    for sample in range(rows(known.start).shape[0]):
        index = slice(sample, sample + 1)
        alone = solve(
            known.step,
            pick(known.start, index),
            name,
            stop,
            context=pick(known.context, index),
            symmetric=known.symmetric,
        )
        assert alone.status[0] == together.status[sample]
        assert abs(int(alone.steps[0]) - int(together.steps[sample])) <= 1
        assert error(alone.value, pick(together.value, index)) < 1e-8


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
        assert at_work[-1] == 1
        assert at_work == sorted(at_work, reverse=True)
    assert torch.allclose(solution.value, (1 / (1 - rates)).expand(6, 3), rtol=1e-9)
    assert solution.steps[0] <= solution.steps[3]


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("with_context", [True, False])
def test_samples_that_cannot_leave_are_frozen(name, with_context):
    known = suitable(name)
    context = bare(known.context)

    def closed(z, _=None):
        assert with_context or z.shape == known.start.shape
        return known.step(z, context)

    if with_context:
        solution = solve(
            lambda z, c: known.step(z, c),
            known.start,
            name,
            TIGHT,
            context=known.context,
            symmetric=known.symmetric,
        )
    else:
        solution = solve(closed, known.start, name, TIGHT, symmetric=known.symmetric)
    assert solution.converged.all()
    assert error(solution.value, known.answer) < 1e-10
    residual, scale = residual_of(known, solution.value)
    assert torch.allclose(solution.residual, residual / scale, rtol=1e-2, atol=1e-15)


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_solver_never_writes_into_its_start_or_context(name, problem):
    known = PROBLEMS[problem]()
    mine = [*leaves(known.start), *(leaf for leaf in leaves(bare(known.context)))]
    before = [leaf.clone() for leaf in mine]
    find(known, name, Stop(tolerance=1e-8), trace=True)
    assert all(torch.equal(old, new) for old, new in zip(before, mine, strict=True))


@pytest.mark.parametrize(("name", "problem"), PAIRS)
def test_solver_is_deterministic(name, problem):
    known = PROBLEMS[problem]()
    first, second = (find(known, name, Stop(tolerance=1e-9), trace=True) for _ in range(2))
    assert torch.equal(rows(first.value), rows(second.value))
    for field in ("status", "residual", "steps", "evaluations"):
        assert torch.equal(getattr(first, field), getattr(second, field))
    assert torch.equal(first.trace.residual, second.trace.residual)


@pytest.mark.parametrize("name", FORWARD)
def test_solver_accepts_an_empty_batch(name):
    start = torch.zeros(0, 3, dtype=torch.float64)
    solution = solve(lambda z, _: z.cos(), start, name, context=(), symmetric=True)
    assert solution.value.shape == (0, 3)
    assert solution.status.shape == (0,)


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


@pytest.mark.parametrize("name", FORWARD)
def test_coupled_batch_is_one_problem_with_one_status(name):
    mixing = torch.full((3, 3), 0.3, dtype=torch.float64)
    c = torch.randn(3, 2, dtype=torch.float64)
    answer = torch.linalg.solve(torch.eye(3, dtype=torch.float64) - mixing, c)
    solution = solve(
        lambda z, context: context[0] @ z + context[1],
        torch.zeros_like(c),
        name,
        TIGHT,
        context=(Shared(mixing), c),
        symmetric=True,
        coupled=True,
    )
    assert solution.status.shape == (1,)
    assert solution.converged.all()
    assert error(solution.value, answer) < 1e-10


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


SETTINGS = [
    (name, transpose, symmetric)
    for name in ALL
    for transpose in (False, True)
    for symmetric in (False, True)
    if symmetric or not SOLVERS[name].needs_symmetric
]


@pytest.mark.parametrize(("name", "transpose", "symmetric"), SETTINGS)
def test_solver_solves_affine_equations(name, transpose, symmetric):
    known = linear(transpose=transpose, symmetric=symmetric)
    start = torch.zeros_like(known.g)
    solution = run(
        known.problem,
        start,
        SOLVERS.resolve(name),
        Stop(tolerance=1e-12, absolute=0.0, max_steps=500),
    )
    assert solution.converged.all(), solution
    assert error(solution.value, known.answer) < 1e-10
    assert torch.equal(start, torch.zeros_like(start))


@pytest.mark.parametrize(("name", "transpose", "symmetric"), SETTINGS)
def test_solver_solves_affine_equations_in_float32(name, transpose, symmetric):
    known = linear(transpose=transpose, symmetric=symmetric, dtype=torch.float32)
    stop = Stop(tolerance=1e-5, absolute=0.0, max_steps=500)
    solution = run(known.problem, torch.zeros(5, 7), SOLVERS.resolve(name), stop)
    assert solution.converged.all(), solution
    assert error(solution.value, known.answer) < 1e-3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("max_steps", [1, 2, 4, 500])
def test_affine_residual_is_relative_and_recomputed(name, max_steps):
    known = linear(symmetric=True)
    stop = Stop(tolerance=1e-9, absolute=0.0, max_steps=max_steps)
    solution = run(known.problem, torch.randn_like(known.g), SOLVERS.resolve(name), stop)
    f = torch.einsum("bij,bj->bi", known.matrix, solution.value) + known.g
    relative = (f - solution.value).norm(dim=1) / torch.maximum(f.norm(dim=1), known.g.norm(dim=1))
    assert torch.allclose(solution.residual, relative, rtol=1e-4, atol=1e-14)
    assert torch.equal(solution.converged, relative <= 1e-9)
    assert (solution.steps <= max_steps).all()


@pytest.mark.parametrize("name", ALL)
def test_affine_work_is_counted(name):
    A, g = linear(symmetric=True).matrix, torch.randn(5, 7, dtype=torch.float64)
    calls = []

    def counted(matrix):
        def product(v):
            calls.append(v.shape[0])
            return torch.einsum("bij,bj->bi", matrix, v)

        return Linearization(
            torch.zeros_like(matrix[:, 0]),
            product,
            product,
            select_rows=lambda index: counted(matrix[index]),
        )

    problem = LinearProblem(
        MapProblem(Product(symmetric=True), [A]),
        torch.zeros_like(g),
        g,
        transpose=True,
        local=counted(A),
    )
    solution = run(
        problem,
        torch.zeros_like(g),
        SOLVERS.resolve(name),
        Stop(tolerance=1e-11, absolute=0.0, max_steps=500),
    )
    assert solution.converged.all()
    assert int(solution.evaluations.max()) == len(calls)


@pytest.mark.parametrize("name", ALL)
def test_affine_warm_start_takes_no_step(name):
    known = linear(symmetric=True)
    solution = run(known.problem, known.answer, SOLVERS.resolve(name), Stop(tolerance=1e-10))
    assert solution.converged.all()
    assert (solution.steps == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_affine_equation_with_zero_constant_has_zero_answer_at_once(name):
    known = linear(symmetric=True)
    g = known.g.clone()
    g[2] = 0
    problem = known.problem.with_constant(g)
    solution = run(
        problem,
        torch.zeros_like(known.g),
        SOLVERS.resolve(name),
        Stop(tolerance=1e-11, absolute=0.0, max_steps=500),
    )
    assert solution.converged.all()
    assert solution.steps[2] == 0
    assert torch.equal(solution.value[2], torch.zeros(7, dtype=torch.float64))
    kept = torch.tensor([0, 1, 3, 4])
    assert error(solution.value[kept], known.answer[kept]) < 1e-9


@pytest.mark.parametrize("name", ALL)
def test_affine_sample_does_not_depend_on_its_batch_mates(name):
    known = linear(symmetric=True)
    stop = Stop(tolerance=1e-11, absolute=0.0, max_steps=500)
    together = run(known.problem, torch.zeros_like(known.g), SOLVERS.resolve(name), stop)
    for sample in range(5):
        alone = run(
            known.problem.select_rows(torch.tensor([sample])),
            torch.zeros(1, 7, dtype=torch.float64),
            SOLVERS.resolve(name),
            stop,
        )
        assert alone.status[0] == together.status[sample]
        assert error(alone.value, together.value[sample : sample + 1]) < 1e-8


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
