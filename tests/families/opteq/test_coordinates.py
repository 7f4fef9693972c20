"""One layer in the coordinates of its hidden units: the same equilibria for half the products."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import Implicit, Stop, Unrolled
from equipoise.families.opteq import OptEq
from equipoise.families.opteq.gram import Gram


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small layers solved in coordinates, too."""
    monkeypatch.setattr("equipoise.families.opteq.gram.MIN_SAVED", 0)


def make(
    alpha: float = 1.0, mu: float = 1.0, state: int = 5, hidden: int = 7, **options: object
) -> OptEq:
    torch.manual_seed(0)
    options = {"activation": "relu", "norm": "none", "stop": Stop(1e-10, max_steps=500), **options}
    layer = OptEq(6, state, hidden, alpha=alpha, mu=mu, **options).double()
    operator = layer.layers.operators[0]
    operator.scale_(0.95 * mu**0.5 / operator.bound(operator.weights()))
    return layer


def jacobian(layer: OptEq, x: Tensor, z: Tensor) -> Tensor:
    """The Jacobian of the step at each sample, by autograd."""
    step = layer.map(x)
    whole = torch.autograd.functional.jacobian(step, z)
    return torch.stack([whole[i, :, i] for i in range(len(z))])


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver", ["anderson", "fixed_point", "accelerated"])
@pytest.mark.parametrize(("alpha", "mu"), [(1.0, 1.0), (0.7, 1.0), (0.7, 2.5)])
def test_coordinates_give_the_steps_of_the_state(solver: str, alpha: float, mu: float) -> None:
    # Wide enough that residuals kept by Anderson are not dependent, which rounding would decide.
    layer = make(alpha, mu, 40, 50, solver=solver)
    x = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        mine = layer.solve(x)
        plain = layer.solve(x, trace=True)  # a path is followed in the state
    assert mine.converged.all()
    assert (mine.steps - plain.steps).abs().max() <= 1
    torch.testing.assert_close(mine.value, plain.value, rtol=1e-8, atol=1e-9)
    f = layer.map(x)(mine.value)
    true = (f - mine.value).norm(dim=1) / f.norm(dim=1)
    torch.testing.assert_close(mine.residual, true, rtol=1e-3, atol=1e-15)
    assert (true <= 1e-10).all()


def test_coordinates_start_where_the_solve_does() -> None:
    layer, x = make(0.8), torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        solution = layer.solve(x)
        again = layer.solve(x, z0=solution.value)
        other = layer.solve(x, z0=torch.randn(3, 5, dtype=torch.float64))
    assert again.steps.max() <= 1
    torch.testing.assert_close(other.value, solution.value, rtol=1e-8, atol=1e-8)


def test_layer_makes_one_product_for_each_evaluation() -> None:
    layer, x = make(), torch.randn(4, 6, dtype=torch.float64)
    layer(x).sum().backward()
    with Products() as forward:
        z = layer(x)
    with Products() as backward:
        z.sum().backward()
    last = layer.last
    assert last is not None
    assert last.adjoint is not None
    # Besides: injection, decoding, and the evaluation that proves the residual.
    assert forward.count <= last.evaluations.max() + 4
    # The recorded step, its pull-back, the constant term, decoding, and the residual.
    assert backward.count <= last.adjoint.evaluations.max() + 10


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize(("alpha", "mu"), [(1.0, 1.0), (0.6, 2.0)])
def test_adjoint_in_hidden_units_is_that_of_the_state(
    activation: str, alpha: float, mu: float
) -> None:
    layer = make(alpha, mu, activation=activation)
    x, g = (torch.randn(4, n, dtype=torch.float64) for n in (6, 5))
    z = layer(x).detach()
    context = layer.cell.inject(x)
    bare = [
        (c, *(tuple(s.tensor for s in group) for group in (w, t)), None) for c, w, t, _ in context
    ]
    local = layer.cell.linearize(z, bare)
    assert local is not None
    assert local.reduce is not None
    system = local.reduce(g)
    n = system.constant.shape[1]
    eye = torch.eye(n, dtype=torch.float64)
    for row, J in enumerate(jacobian(layer, x, z).numpy()):
        part = system.local.select_rows(torch.full((n,), row))
        A = part.vjp(eye)
        torch.testing.assert_close(A, A.T, rtol=0, atol=1e-14)
        y = torch.linalg.solve(eye - A, system.constant[row])
        v = system.decode(y.repeat(4, 1))[row]
        true = np.linalg.solve(np.eye(5) - J.T, g[row].numpy())
        np.testing.assert_allclose(v.detach().numpy(), true, rtol=1e-9, atol=1e-10)
        assert y.norm() <= v.norm() * (1 + 1e-12)


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_gradients_are_those_of_many_unrolled_steps(alpha: float) -> None:
    layer = make(alpha, learn_alpha=alpha < 1, activation="tanh")
    x = torch.randn(4, 6, dtype=torch.float64)
    found = []
    for gradient in (Implicit(), Unrolled(600)):
        layer.zero_grad()
        layer(x, gradient=gradient).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-7)


def test_weights_changed_behind_torch_are_noticed() -> None:
    layer, x = make(), torch.randn(4, 6, dtype=torch.float64)
    layer(x).sum().backward()
    layer.layers.operators[0].weight.data.mul_(0.3)  # no version counter sees this
    layer.zero_grad()
    z = layer(x)
    z.sum().backward()
    mine = layer.layers.operators[0].weight.grad.clone()
    torch.testing.assert_close(layer.map(x)(z), z, rtol=1e-8, atol=1e-8)
    other = make()
    other.load_state_dict(layer.state_dict())
    other(x).sum().backward()
    torch.testing.assert_close(mine, other.layers.operators[0].weight.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_coordinates_leave_extreme_sizes_to_the_state(size: float) -> None:
    layer = make(bias=False)
    x = torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        z, scaled = layer(x), layer(x * size)
    assert layer.last is not None
    assert layer.last.converged.all()
    torch.testing.assert_close(scaled / size, z, rtol=1e-7, atol=1e-9)


def test_gram_is_formed_where_it_pays() -> None:
    layer = OptEq(8, 64, 64)
    operator = layer.layers.operators[0]
    gram, weights = Gram(), operator.weights()
    assert gram.find(operator, weights, 1, stays=False) is None
    first = gram.find(operator, weights, 1, stays=True)
    torch.testing.assert_close(first, weights[0] @ weights[0].T)
    assert gram.find(operator, weights, 128, stays=False) is first
    operator.scale_(2.0)
    torch.testing.assert_close(gram.find(operator, weights, 128, stays=False), 4 * first)
    tall = OptEq(8, 4, 8).layers.operators[0]
    assert Gram().find(tall, tall.weights(), 10**6, stays=True) is None
    for twin in (copy.deepcopy(gram), pickle.loads(pickle.dumps(gram))):
        assert twin._known is None
