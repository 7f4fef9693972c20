"""What every layer promises, whatever it is made of."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, jacrev

from equipoise import Equilibrium, Implicit, Stop, Unrolled
from equipoise.families.opteq import OptEq, OptEqCell, OptEqConv2d
from equipoise.layers import ChangeOfVariable, Regularized, Skip
from equipoise.operators import Composed, separable
from equipoise.prox import Incay, MatrixActivation, Tanh

STOP = Stop(tolerance=1e-13, max_steps=1000)
EXACT = {"eps": 3e-5, "atol": 2e-6, "rtol": 1e-5, "fast_mode": True}
ROTATION = torch.linalg.qr(
    torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
)[0]


def dense(hidden, activation="tanh", **options):
    return OptEq(3, 3, hidden, activation, stop=STOP, on_failure="raise", **options)


def conv(hidden, *args, **options):
    return OptEqConv2d(
        2, 2, hidden, *args, activation="softplus", stop=STOP, on_failure="raise", **options
    )


def changed(change):
    return Equilibrium(change(dense(4).layers), stop=STOP, on_failure="raise")


def double_separable():
    operators = [Composed([separable(2, 2, 3, multiplier=2), separable(2, 3)]) for _ in range(2)]
    cell = OptEqCell(operators, [torch.nn.Conv2d(2, 3, 1) for _ in range(2)], [Tanh()] * 2)
    return Equilibrium(cell, stop=STOP, on_failure="raise")


LAYERS = {
    "one": lambda: dense(4),
    "one_relu": lambda: dense(4, "relu"),
    "one_scaled": lambda: dense(4, "sigmoid", mu=0.3),
    "wide": lambda: OptEq(2, 5, 3, "elu", stop=STOP, on_failure="raise"),
    "deep": lambda: dense([4, 2, 3]),
    "deep_relu": lambda: dense([4, 2], "relu", alpha=0.6),
    "mixed": lambda: dense([4, 2], ["relu", "softplus"]),
    "learned_alpha": lambda: dense([4, 2], alpha=[0.5, 0.9], learn_alpha=True),
    "no_control": lambda: dense([4, 2], norm="none"),
    "project": lambda: dense([4, 2], norm="project"),
    "matrix": lambda: dense(
        2, MatrixActivation(torch.tensor([[0.5, 0.2], [0.2, 0.7]], dtype=torch.float64))
    ),
    "conv": lambda: conv(3),
    "conv_deep": lambda: conv([3, 2]),
    "conv_circular": lambda: conv([3, 2], padding="circular"),
    "conv_even": lambda: conv(2, 2),
    "conv_groups": lambda: conv(4, groups=2),
    "conv_separable": lambda: conv([3, 2], separable=True),
    "conv_double_separable": double_separable,
    "skip": lambda: changed(lambda cell: Skip(cell, 0.4)),
    "rotated": lambda: changed(
        lambda cell: ChangeOfVariable(cell, matrix=ROTATION, scale=1.5, shift=0.2)
    ),
    "stretched": lambda: changed(
        lambda cell: ChangeOfVariable(
            cell, matrix=torch.diag(torch.tensor([1.0, 2.0, 0.5])).double()
        )
    ),
    "regularized_l2": lambda: changed(lambda cell: Regularized(cell, "l2", 0.3)),
    "regularized_incay": lambda: changed(lambda cell: Regularized(cell, Incay(epsilon=2.0), 0.1)),
    "regularized_function": lambda: changed(
        lambda cell: Regularized(cell, lambda z: z.pow(4).sum(dim=1) / 4, 0.05)
    ),
    "regularized_decorrelation": lambda: dense([4, 2], regularizer="decorrelation", strength=0.02),
    "regularized_conv": lambda: conv(3, regularizer="l2", strength=0.2),
}
NOT_COUPLED = [name for name in LAYERS if name != "regularized_decorrelation"]
CURVED = [name for name in LAYERS if "relu" not in name and name != "mixed"]


def make(name):
    """A layer whose norms are near or beyond what control allows, and an input for it."""
    torch.manual_seed(5)
    layer = LAYERS[name]().double()
    cell = next(part for part in layer.modules() if isinstance(part, OptEqCell))
    for operator in cell.operators:
        operator.scale_(
            (1.7 if cell.norm == "scale" else 0.95)
            * cell.limit(0)
            / operator.bound(operator.weights())
        )
    inputs = 2 if name == "wide" else 3
    shape = (2, 2, 3, 4) if "conv" in name else (2, inputs)
    return layer, torch.randn(shape, dtype=torch.float64, requires_grad=True)


def explicit(layer):
    names = [name for name, _ in layer.named_parameters()]
    return lambda x, *tensors: functional_call(layer, dict(zip(names, tensors, strict=True)), (x,))


def context_of(layer, x):
    """The injection as a step gets it."""
    from equipoise.core.tree import Structure

    structure = Structure(layer.cell.inject(x), "inject")
    return structure.rebuild(structure.leaves)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_solves_its_equation(name):
    layer, x = make(name)
    z = layer(x)
    assert layer.last.converged.all()
    assert torch.allclose(layer.map(x)(z), z, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_passes_gradcheck(name):
    layer, x = make(name)
    assert gradcheck(explicit(layer), (x, *layer.parameters()), **EXACT)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_passes_forward_mode_gradcheck(name):
    layer, x = make(name)
    inputs = (x, *layer.parameters())
    assert gradcheck(
        explicit(layer), inputs, check_forward_ad=True, check_backward_ad=False, **EXACT
    )


@pytest.mark.parametrize("name", CURVED)
def test_layer_passes_gradgradcheck(name):
    layer, x = make(name)
    x = x[:1].detach().requires_grad_() if "decorrelation" not in name else x
    assert gradgradcheck(
        explicit(layer), (x, *layer.parameters()), eps=3e-5, atol=2e-5, rtol=1e-3, fast_mode=True
    )


@pytest.mark.parametrize("name", LAYERS)
def test_implicit_gradient_is_that_of_a_long_unroll(name):
    layer, x = make(name)
    direct = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    layer.gradient = Unrolled(400)
    unrolled = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for found, expected in zip(direct, unrolled, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LAYERS)
def test_declared_linearisation_is_autograds(name):
    layer, x = make(name)
    context = context_of(layer, x.detach())
    z = torch.randn_like(layer(x)).detach()
    local = layer.cell.linearize(z, context)
    if local is None:
        pytest.skip("left to autograd")
    v = torch.randn_like(z)
    value, pull = torch.func.vjp(lambda z: layer.cell.step(z, context), z)
    _, push = torch.func.jvp(lambda z: layer.cell.step(z, context), (z,), (v,))
    assert torch.allclose(local.value, value)
    assert torch.allclose(local.vjp(v), pull(v)[0])
    assert torch.allclose(local.jvp(v), push)
    some = local.select_rows(torch.tensor([1]))
    assert torch.allclose(some.vjp(v[1:]), pull(v)[0][1:])


@pytest.mark.parametrize("name", LAYERS)
def test_declared_symmetry_and_bound_are_true(name):
    layer, x = make(name)
    if layer.cell.coupled:
        pytest.skip("the batch is one problem")
    x = x[:1].detach()
    z = layer(x).detach()
    jacobian = jacrev(layer.map(x))(z).reshape(z.numel(), z.numel()).detach()
    if layer.cell.symmetric:
        assert torch.allclose(jacobian, jacobian.T, atol=1e-12)
        assert torch.linalg.eigvalsh(jacobian)[0] > -1e-12
    if layer.cell.lipschitz() is not None:
        assert torch.linalg.matrix_norm(jacobian, 2) <= layer.cell.lipschitz() * (1 + 1e-12)


@pytest.mark.parametrize("name", NOT_COUPLED)
def test_samples_do_not_see_each_other(name):
    layer, x = make(name)
    assert torch.allclose(layer(x)[1:], layer(x[1:]), atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_saves_loads_and_moves_to_float32(name):
    layer, x = make(name)
    z = layer(x).detach()
    other = LAYERS[name]().double()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), z)
    single = other.float()
    single.stop = Stop(tolerance=1e-5)
    single.gradient = Implicit(tolerance=1e-5)
    found = single(x.detach().float())
    found.sum().backward()
    assert torch.allclose(found.double(), z, atol=1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in single.parameters())
