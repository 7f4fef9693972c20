"""Batches of one layer, in hidden units, whose steps run ahead of the monitor between products."""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise import Implicit, OptEq
from equipoise.solvers import Anderson, Status, Stop
from equipoise.solvers.kernels import find_kernels, without_kernels

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    os.environ.get("EQUIPOISE_KERNELS") == "0", reason="kernels are switched off"
)
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-11}


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch):
    """Have small layers solved in coordinates, too."""
    monkeypatch.setattr("equipoise.families.opteq.gram.MIN_SAVED", 0)


@pytest.fixture
def made(monkeypatch):
    """How many steps and looks kernels made ahead of the monitor, and how often a rest was due."""
    from equipoise.solvers import row_kernels

    with torch.no_grad():  # compiled before they are replaced
        assert all(find_kernels(torch.zeros(1, 1, dtype=dtype)) for dtype in CLOSE)
    found = {"forward": 0, "rests": 0, "backward": 0, "ended": 0}
    mix_on, go_on, end_rows = row_kernels.mix_on, row_kernels.go_on, row_kernels.end_rows

    def count_mix(*args):
        result = mix_on(*args)
        found["forward"] += result == 2
        found["rests"] += result == 1
        return result

    def count_go(*args):
        found["backward"] += 1
        return go_on(*args)

    def count_ends(*args):
        result = end_rows(*args)
        found["ended"] += max(result, 0)
        return result

    monkeypatch.setattr(row_kernels, "mix_on", count_mix)
    monkeypatch.setattr(row_kernels, "go_on", count_go)
    monkeypatch.setattr(row_kernels, "end_rows", count_ends)
    return found


def make(norm=0.97, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"alpha": 1.0, "gradient": Implicit("conjugate_gradient"), **options}
    layer = OptEq(7, 60, 50, norm="none", **options).to(dtype)
    (operator,) = layer.layers.operators
    operator.scale_(norm * layer.layers.mu**0.5 / operator.bound(operator.weights()))
    return layer.eval()  # where K is kept, so that it pays for one sample


def inputs(samples, dtype):
    """Inputs of very different sizes and directions, so that samples end at different steps."""
    x = torch.randn(samples, 7, dtype=dtype)
    return x * torch.logspace(-2, 2, samples, dtype=dtype)[:, None]


def solve_both(layer, x, **options):
    found = []
    for plain in (False, True):
        layer.zero_grad()
        with without_kernels() if plain else torch.enable_grad():
            solution = layer.solve(x, **options)
            solution.value.square().sum().backward()
        found.append((solution, solution.adjoint, layer.layers.operators[0].weight.grad.clone()))
    return found


@pytest.mark.parametrize("samples", [1, 3, 5, 40])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    ("alpha", "mu", "activation"), [(1.0, 1.0, "relu"), (0.7, 2.5, "relu"), (1.0, 1.0, "tanh")]
)
def test_solves_are_those_without_kernels(samples, dtype, alpha, mu, activation, made):
    layer = make(0.95, dtype, alpha=alpha, mu=mu, activation=activation)
    tolerance = CLOSE[dtype]
    fast, slow = solve_both(layer, inputs(samples, dtype), tolerance=tolerance, max_steps=300)
    assert made["forward"] >= 3
    assert made["backward"] >= 3
    assert made["ended"] > 0 or samples <= 4
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert ours.all_converged
        assert theirs.all_converged
        assert (ours.residual <= tolerance).all()
        assert (ours.steps - theirs.steps).abs().max() <= 1
        assert (ours.evaluations - theirs.evaluations).abs().max() <= 2
        torch.testing.assert_close(ours.scale, theirs.scale, rtol=100 * tolerance, atol=0)
    for ours, theirs in ((fast[0].value, slow[0].value), (fast[2], slow[2])):
        atol = 100 * tolerance * float(theirs.detach().norm())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def test_samples_end_at_steps_of_their_own(made):
    layer = make(dtype=torch.float64)
    fast, slow = solve_both(layer, inputs(40, torch.float64), tolerance=1e-9, max_steps=300)
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert torch.equal(ours.steps, theirs.steps)
        assert torch.equal(ours.evaluations, theirs.evaluations)
        assert len(ours.steps.unique()) > 2
        torch.testing.assert_close(ours.residual, theirs.residual, rtol=1e-4, atol=1e-13)
    assert made["ended"] == 80


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 11])
def test_steps_that_run_out_run_out_alike(steps, made):
    layer = make(0.9999, torch.float64, on_failure="ignore")
    fast, slow = solve_both(layer, inputs(6, torch.float64), stop=Stop(1e-14, max_steps=steps))
    assert made["forward"] >= steps - 1
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert torch.equal(ours.status, theirs.status)
        assert torch.equal(ours.steps, theirs.steps)
        assert torch.equal(ours.evaluations, theirs.evaluations)
        assert (ours.status == Status.MAX_STEPS).all()
    torch.testing.assert_close(fast[0].value, slow[0].value, rtol=1e-6, atol=1e-8)


def test_samples_that_mixing_does_not_help_rest_alike(made):
    solver = Anderson(memory=2, damping=0.01)
    layer = make(0.999, torch.float64, on_failure="ignore", solver=solver)
    fast, slow = solve_both(layer, inputs(6, torch.float64), stop=Stop(1e-10, max_steps=60))
    assert made["rests"] > 0
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert torch.equal(ours.status, theirs.status)
        assert torch.equal(ours.steps, theirs.steps)
    torch.testing.assert_close(fast[0].value, slow[0].value, rtol=1e-5, atol=1e-7)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice(made):
    layer, x = make(dtype=torch.float64), inputs(9, torch.float64)
    counts = []
    for plain in (False, True):
        with torch.no_grad(), without_kernels() if plain else torch.no_grad():
            layer(x)
            with Products() as products:
                layer(x)
        counts.append(products.count)
    assert made["forward"] > 3
    assert counts[0] == counts[1]


def test_infinity_in_one_sample_is_its_own():
    layer, x = make(on_failure="ignore"), inputs(9, torch.float32)
    x[4, 0] = torch.inf
    with torch.no_grad():
        fast = layer.solve(x)
        with without_kernels():
            slow = layer.solve(x)
    assert torch.equal(fast.status, slow.status)
    assert fast.status[4] == Status.NONFINITE
    assert int(fast.converged.sum()) == 8
