import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev

from equipoise import (
    GRADIENTS,
    SOLVERS,
    Equilibrium,
    Implicit,
    JacobianFree,
    Phantom,
    Status,
    Stop,
    Unrolled,
)
from equipoise.testing import check_gradient
from equipoise.testing.cells import CELLS
from equipoise.testing.gradient_case import as_function, unroll
from equipoise.testing.trees import rows

FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
STOP = Stop(tolerance=1e-13, max_steps=500)
EXACT = {"eps": 3e-5, "atol": 1e-7, "rtol": 1e-7}


def fits(name: str, cell: str) -> bool:
    return cell.startswith("symmetric") or not SOLVERS[name].needs_symmetric


# Every forward solver with the default adjoint, and every solver as the adjoint of one forward
# solver; every cell with both on auto is what `check_gradient("implicit")` does.
FORWARD_PAIRS = [
    (name, "auto", cell)
    for name in FORWARD
    for cell in ("smooth", "symmetric_mask")
    if fits(name, cell)
]
ADJOINT_PAIRS = [
    # A second cell for each adjoint takes twenty seconds, and finds little more than the first.
    pytest.param(
        "anderson",
        name,
        cell,
        marks=[pytest.mark.slow] if cell == "symmetric" and fits(name, "mask") else [],
    )
    for name in SOLVERS
    for cell in ("mask", "symmetric")
    if fits(name, cell)
]
COMBINATIONS = FORWARD_PAIRS + ADJOINT_PAIRS
EVERY_PAIR = [(name, adjoint, "symmetric_mask") for name in FORWARD for adjoint in SOLVERS]
FORWARD_CELLS = [(name, cell) for name in FORWARD for cell in CELLS if fits(name, cell)]


def make(cell: str, solver: str = "auto", gradient="implicit", stop: Stop = STOP) -> Equilibrium:
    return Equilibrium(CELLS[cell](), solver, gradient, on_failure="raise", stop=stop)


def explicit(layer: Equilibrium):
    """The layer as a function of its input and parameters, and those."""
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    return as_function(layer), (x, *layer.parameters())


def close(found, expected, tolerance: float) -> bool:
    return all(
        torch.allclose(
            a, b, rtol=tolerance, atol=tolerance * max(1.0, float(b.detach().abs().max()))
        )
        for a, b in zip(found, expected, strict=True)
    )


# The closed form is `Implicit(DenseLU())`, which is checked among the adjoint solvers.
OWN = [name for name in GRADIENTS if name != "closed_form"]


def test_registry_holds_the_strategies():
    assert set(GRADIENTS) == {
        "closed_form",
        "implicit",
        "jacobian_free",
        "phantom",
        "unrolled",
    }


@pytest.mark.slow
def test_closed_form_keeps_its_promises():
    check_gradient("closed_form")


@pytest.mark.parametrize("name", OWN)
def test_gradient_keeps_its_promises(name):
    check_gradient(name)


@pytest.mark.parametrize(("solver", "adjoint", "cell"), COMBINATIONS)
def test_implicit_gradient_keeps_its_promises_with_every_solver(solver, adjoint, cell):
    skip = ["transforms_are_those_of_a_long_unroll"]  # below, for every solver and cell
    check_gradient(Implicit(solver=adjoint), solver=solver, cells={cell: CELLS[cell]}, skip=skip)


@pytest.mark.parametrize(("solver", "cell"), FORWARD_CELLS)
@pytest.mark.parametrize("name", OWN)
def test_every_pair_of_solver_and_gradient_keeps_its_promises(solver, name, cell):
    gradient = Unrolled(steps=400) if name == "unrolled" else GRADIENTS.resolve(name)
    skip = [  # what other tests check for each solver or each gradient
        "derivatives_pass_finite_differences",
        "derivatives_are_those_of_a_long_unroll",
        "samples_are_independent",
        "nan_is_passed_on",
        "failed_adjoint_is_never_zero",
    ]
    skip += ["transforms_are_those_of_a_long_unroll"] if name == "unrolled" else []
    check_gradient(gradient, solver=solver, cells={cell: CELLS[cell]}, second=False, skip=skip)


@pytest.mark.parametrize(("solver", "adjoint", "cell"), EVERY_PAIR)
def test_implicit_gradient_equals_autograd_through_a_long_unroll(solver, adjoint, cell):
    layer = make(cell, solver, Implicit(solver=adjoint))
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    z, long = layer(x), unroll(layer.cell, x)
    assert torch.allclose(z, long, atol=1e-11)
    g = torch.randn_like(z)
    assert close(torch.autograd.grad(z, wanted, g), torch.autograd.grad(long, wanted, g), 1e-9)
    assert layer.solves.backward.counts[Status.CONVERGED] == 3


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives_equal_those_of_a_long_unroll(cell):
    layer = make(cell)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    parameters = list(layer.parameters())
    g = torch.randn_like(layer(x))

    def mixed(z):
        (first,) = torch.autograd.grad((z.square() * g).sum(), x, create_graph=True)
        return torch.autograd.grad(
            first.square().sum(), [x, *parameters], allow_unused=True, materialize_grads=True
        )

    assert close(mixed(layer(x)), mixed(unroll(layer.cell, x, 300)), 1e-8)


@pytest.mark.parametrize("cell", ["smooth", "symmetric_mask"])
def test_reverse_over_forward_equals_forward_over_reverse(cell):
    layer = make(cell)
    x = torch.randn(1, 2, dtype=torch.float64)

    def loss(x):
        return layer(x).pow(3).sum()

    assert torch.allclose(jacrev(jacfwd(loss))(x), jacfwd(jacrev(loss))(x), atol=1e-9)
    assert torch.allclose(jacrev(jacfwd(loss))(x), jacrev(jacrev(loss))(x), atol=1e-9)


def test_mixed_derivative_in_input_and_weight_matches_finite_differences():
    layer = make("smooth")
    function, (x, *tensors) = explicit(layer)

    def slope(W):
        z = function(x, W, *tensors[1:])
        return torch.autograd.grad(z.sum(), x, create_graph=True)[0]

    W = tensors[0]
    assert gradcheck(slope, (W,), **EXACT)
    assert gradcheck(slope, (W,), check_forward_ad=True, check_backward_ad=False, **EXACT)


def test_third_derivative_of_a_scalar_equilibrium_matches_the_closed_form():
    # z = a z^2 / 2 + x has the root z = (1 - sqrt(1 - 2 a x)) / a near zero.
    class Quadratic(CELLS["smooth"]):
        def inject(self, x):
            return x

        def step(self, z, context):
            return 0.4 * z.square() + context

    layer = Equilibrium(Quadratic(), "newton", Implicit(), stop=STOP)
    x = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)

    def derivatives(z):
        found = []
        for _ in range(3):
            (z,) = torch.autograd.grad(z.sum(), x, create_graph=True)
            found.append(z)
        return found

    assert close(derivatives(layer(x)), derivatives((1 - (1 - 1.6 * x).sqrt()) / 0.8), 1e-9)


def jacobians(layer: Equilibrium, x):
    """For each sample the step's Jacobians at the equilibrium, in state (n, n) and input (n, d)."""
    cell = layer.cell
    z = unroll(layer.cell, x).detach()
    one = [(z[i : i + 1], x[i : i + 1].detach()) for i in range(len(x))]
    in_state = [jacrev(lambda s, u=u: cell.step(s, cell.inject(u)))(s)[0, :, 0] for s, u in one]
    in_input = [jacrev(lambda v, s=s: cell.step(s, cell.inject(v)))(u)[0, :, 0] for s, u in one]
    return torch.stack(in_state), torch.stack(in_input)


@pytest.mark.parametrize("solver", FORWARD)
@pytest.mark.parametrize(("steps", "damping"), [(1, 1.0), (1, 0.5), (5, 0.5), (4, 1.0), (7, 0.3)])
def test_phantom_gradient_is_its_truncated_series(solver, steps, damping):
    cell = "symmetric" if SOLVERS[solver].needs_symmetric else "smooth"
    layer = make(cell, solver, Phantom(steps=steps, damping=damping))
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    g = torch.randn_like(z)
    (found,) = torch.autograd.grad(z, x, g)
    J, D = jacobians(layer, x)
    M = (1 - damping) * torch.eye(J.shape[1], dtype=torch.float64) + damping * J
    series = sum(torch.linalg.matrix_power(M, k) for k in range(steps)) * damping
    expected = torch.einsum("bi,bij,bjk->bk", g, series, D)
    assert torch.allclose(found, expected, atol=1e-10)


def test_phantom_gradient_tends_to_the_implicit_one():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    exact = make("smooth")
    (truth,) = torch.autograd.grad(exact(x).sum(), x)
    errors = []
    for steps in (1, 5, 20, 200):
        layer = make("smooth", gradient=Phantom(steps=steps))
        layer.load_state_dict(exact.state_dict())
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        errors.append(float((found - truth).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("solver", FORWARD)
def test_jacobian_free_gradient_is_that_of_one_step(solver):
    cell = "symmetric" if SOLVERS[solver].needs_symmetric else "smooth"
    layer = make(cell, solver, JacobianFree())
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    z = layer(x)
    g = torch.randn_like(z)
    found = torch.autograd.grad(z, [x, *layer.parameters()], g)
    _, D = jacobians(layer, x)
    assert torch.allclose(found[0], torch.einsum("bi,bij->bj", g, D), atol=1e-11)
    cell = layer.cell
    one = cell.step(unroll(layer.cell, x).detach(), cell.inject(x))
    assert close(found, torch.autograd.grad(one, [x, *layer.parameters()], g), 1e-11)


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("cell", ["smooth", "mask", "symmetric", "tree"])
def test_unrolled_gradient_is_that_of_its_iterate(cell, damping):
    layer = Equilibrium(
        CELLS[cell](), gradient=Unrolled(steps=6, damping=damping), on_failure="ignore", stop=STOP
    )
    function, inputs = explicit(layer)
    assert gradcheck(function, inputs, check_forward_ad=True, **EXACT)
    assert gradgradcheck(function, inputs, **EXACT)
    x = inputs[0]
    z, witness = layer(x), unroll(layer.cell, x, 6, damping)
    g = torch.randn_like(z)
    assert torch.allclose(z, witness, atol=1e-14)
    assert close(torch.autograd.grad(z, inputs, g), torch.autograd.grad(witness, inputs, g), 1e-13)
    assert (layer.last.steps == 6).all()
    again = layer.map(x)(layer.last.value)
    converged = (rows(again) - rows(layer.last.value)).norm(dim=1) <= 1e-14 + 1e-13 * rows(
        again
    ).norm(dim=1)
    assert torch.equal(layer.last.converged, converged)
    assert not converged.all()


@pytest.mark.parametrize("cell", ["smooth", "mask", "symmetric", "tree"])
def test_unrolled_gradient_tends_to_the_implicit_one(cell):
    exact = make(cell)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    (truth,) = torch.autograd.grad(exact(x).sum(), x)
    errors = []
    for steps in (2, 10, 50, 500):
        layer = Equilibrium(
            CELLS[cell](), gradient=Unrolled(steps=steps), on_failure="ignore", stop=STOP
        )
        layer.load_state_dict(exact.state_dict())
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        errors.append(float((found - truth).abs().max()))
    assert errors[0] > 1e-3
    assert errors[2] < errors[0] / 10
    assert errors[-1] < 1e-9


def test_gradient_of_an_affine_cell_is_the_inverse():
    class Linear(CELLS["smooth"]):
        def inject(self, x):
            return x

        def step(self, z, context):
            return z @ self.W.T + context

    layer = Equilibrium(Linear(width=4), stop=STOP)
    x = torch.randn(1, 4, dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - layer.cell.W.detach())
    assert torch.allclose(layer(x), x @ inverse.T, atol=1e-12)
    assert torch.allclose(jacrev(layer)(x)[0, :, 0], inverse, atol=1e-11)
