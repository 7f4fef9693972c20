import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise import SOLVERS, Equilibrium, Implicit, Shared, Stop, solve
from equipoise.testing.cells import SymmetricMaskCell
from equipoise.testing.trees import rows

STOP = Stop(tolerance=1e-12, max_steps=1000)
FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
GENERAL = [name for name in FORWARD if not SOLVERS[name].needs_symmetric]
CLOSE = 1e-8
ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "identity": lambda u: u,
    "softshrink": torch.nn.functional.softshrink,
}


def examples(count: int):
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


@st.composite
def networks(draw):
    """Weights of norm at most 0.9, offsets and a start, all float64."""
    batch, width = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    W = torch.randn(width, width, generator=generator, dtype=torch.float64)
    W *= draw(st.floats(0.0, 0.9)) / torch.linalg.matrix_norm(W, 2)
    size = 10.0 ** draw(st.integers(-3, 3))
    c = size * torch.randn(batch, width, generator=generator, dtype=torch.float64)
    start = size * torch.randn(batch, width, generator=generator, dtype=torch.float64)
    return W, c, start, draw(st.sampled_from(sorted(ACTIVATIONS))), generator


def answer(W, c, start, activation, solver, *, symmetric=False):
    phi = ACTIVATIONS[activation]

    def step(z, context):
        weight, offset = context
        return phi(z @ weight.T + offset) @ weight if symmetric else phi(z @ weight.T + offset)

    solution = solve(step, start, solver, STOP, context=(Shared(W), c), symmetric=symmetric)
    assert solution.converged.all(), solution
    residual = (step(solution.value, (W, c)) - solution.value).norm(dim=1)
    assert (residual <= 1e-14 + 1.001e-12 * step(solution.value, (W, c)).norm(dim=1)).all()
    return solution.value


def agree(a, b, c) -> bool:
    return bool((a - b).abs().max() <= CLOSE * max(1.0, float(c.abs().max())))


@examples(80)
@given(networks(), st.sampled_from(GENERAL))
def test_answer_is_permuted_with_the_batch(network, solver):
    W, c, start, activation, generator = network
    order = torch.randperm(len(c), generator=generator)
    before = answer(W, c, start, activation, solver)
    assert agree(answer(W, c[order], start[order], activation, solver), before[order], c)


@examples(80)
@given(networks(), st.sampled_from(GENERAL))
def test_answer_is_permuted_with_the_hidden_units(network, solver):
    W, c, start, activation, generator = network
    order = torch.randperm(W.shape[0], generator=generator)
    before = answer(W, c, start, activation, solver)
    after = answer(W[order][:, order], c[:, order], start[:, order], activation, solver)
    assert agree(after, before[:, order], c)


@examples(80)
@given(networks(), st.sampled_from(GENERAL), st.sampled_from([0.0, 1.0, -3.0, 1e3]))
def test_answer_does_not_depend_on_the_start(network, solver, scale):
    W, c, start, activation, _ = network
    first = answer(W, c, start, activation, solver)
    assert agree(answer(W, c, scale * start, activation, solver), first, c)


@examples(80)
@given(networks(), st.sampled_from(GENERAL), st.sampled_from(GENERAL))
def test_answer_does_not_depend_on_the_solver(network, one, other):
    W, c, start, activation, _ = network
    assert agree(answer(W, c, start, activation, one), answer(W, c, start, activation, other), c)


@examples(60)
@given(networks(), st.sampled_from(FORWARD))
def test_answer_of_a_symmetric_cell_does_not_depend_on_the_solver(network, solver):
    W, c, start, activation, _ = network
    expected = answer(W, c, start, activation, "fixed_point", symmetric=True)
    assert agree(answer(W, c, start, activation, solver, symmetric=True), expected, c)


@examples(60)
@given(networks(), st.sampled_from(GENERAL), st.integers(1, 5))
def test_repeated_samples_get_one_answer(network, solver, times):
    W, c, start, activation, _ = network
    once = answer(W, c, start, activation, solver)
    again = answer(W, c.repeat(times, 1), start.repeat(times, 1), activation, solver)
    assert agree(again, once.repeat(times, 1), c)


@examples(60)
@given(networks(), st.sampled_from(GENERAL), st.integers(-8, 8))
def test_positively_homogeneous_network_scales_with_its_offset(network, solver, power):
    W, c, start, _, _ = network
    factor = 2.0**power
    before = answer(W, c, start, "relu", solver)
    assert agree(answer(W, factor * c, start, "relu", solver) / factor, before, c)


@examples(40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.sampled_from(list(SOLVERS)),
    st.sampled_from(list(SOLVERS)),
)
def test_gradient_does_not_depend_on_the_adjoint_solver(seed, batch, one, other):
    torch.manual_seed(seed)
    cell, x = (
        SymmetricMaskCell(width=4, hidden=5),
        torch.randn(batch, 2, dtype=torch.float64, requires_grad=True),
    )
    g = torch.randn(batch, 4, dtype=torch.float64)
    found = []
    for name in (one, other):
        layer = Equilibrium(cell, "newton", Implicit(solver=name), on_failure="raise", stop=STOP)
        (grad,) = torch.autograd.grad(layer(x), x, g)
        found.append(rows(grad))
    assert agree(found[0], found[1], g)
