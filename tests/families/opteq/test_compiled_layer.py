"""Solves of one layer for a few samples in compiled loops end as they do without these."""

import os

import pytest
import torch

from equipoise import Implicit, OptEq
from equipoise.families.opteq import cell as cell_module
from equipoise.solvers import Status, Stop
from equipoise.solvers.kernels import without_kernels

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(
    os.environ.get("EQUIPOISE_KERNELS") == "0", reason="kernels are switched off"
)


def make(norm=0.97, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"alpha": 1.0, "gradient": Implicit("conjugate_gradient"), **options}
    layer = OptEq(7, 40, 50, norm="none", **options).to(dtype)
    (operator,) = layer.layers.operators
    operator.scale_(norm / operator.bound(operator.weights()))
    return layer


@pytest.fixture
def runs(monkeypatch):
    """How many steps compiled loops made, forward and backward."""
    made = {"values": 0, "products": 0}

    def counted(name, found):
        def find(*args):
            runs = found(*args)
            for field in ("anderson", "conjugate"):
                kernel = None if runs is None else getattr(runs, field)
                if kernel is not None:

                    def count(*numbers, kernel=kernel):
                        result = kernel(*numbers)
                        made[name] += result[1]
                        return result

                    object.__setattr__(runs, field, count)
            return runs

        return find

    for name in made:
        found = counted(name, getattr(cell_module, f"run_{name}"))
        monkeypatch.setattr(cell_module, f"run_{name}", found)
    return made


def solve_both(layer, x, **options):
    found = []
    for _ in range(2):
        layer.zero_grad()
        solution = layer.solve(x, **options)
        solution.value.square().sum().backward()
        gradient = layer.layers.operators[0].weight.grad.clone()
        found.append((solution, solution.adjoint, gradient))
        if len(found) == 1:
            context = without_kernels()
            context.__enter__()
    context.__exit__(None, None, None)
    return found


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_values_gradients_and_statuses_are_equal(samples, dtype, training, runs):
    layer = make(dtype=dtype).train(training)
    x = torch.randn(samples, 7, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    fast, slow = solve_both(layer, x, tolerance=tolerance, max_steps=200)
    assert runs["values"] > 3
    assert runs["products"] > 3
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert ours.all_converged
        assert theirs.all_converged
        assert (ours.steps - theirs.steps).abs().max() <= 1
        assert (ours.residual <= tolerance).all()
    torch.testing.assert_close(
        fast[0].value,
        slow[0].value,
        rtol=0,
        atol=50 * tolerance * float(slow[0].value.detach().norm()),
    )
    torch.testing.assert_close(
        fast[2], slow[2], rtol=0, atol=100 * tolerance * float(slow[2].norm())
    )


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 11])
def test_steps_that_run_out_run_out_alike(steps, runs):
    layer = make(norm=0.9999, on_failure="ignore", dtype=torch.float64)
    x = torch.randn(2, 7, dtype=torch.float64)
    fast, slow = solve_both(layer, x, stop=Stop(1e-12, max_steps=steps))
    assert runs["values"] >= steps - 1
    for ours, theirs in ((fast[0], slow[0]), (fast[1], slow[1])):
        assert torch.equal(ours.status, theirs.status)
        assert torch.equal(ours.steps, theirs.steps)
        assert (ours.status == Status.MAX_STEPS).all()
    torch.testing.assert_close(fast[0].value, slow[0].value, rtol=1e-6, atol=1e-8)


def test_what_cannot_converge_ends_alike():
    """A weight of norm above 1: the loop stops where residuals no longer fall."""
    layer = make(norm=1.6, on_failure="ignore")
    x = torch.randn(3, 7)
    fast, slow = solve_both(layer, x, stop=Stop(1e-5, max_steps=60, patience=10))
    assert torch.equal(fast[0].status, slow[0].status)
    assert not fast[0].all_converged


def test_a_sample_that_is_not_finite_ends_alone():
    layer = make(on_failure="ignore").eval()
    x = torch.randn(3, 7)
    x[1, 2] = torch.nan
    with torch.no_grad():
        found = layer.solve(x)
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


@pytest.mark.parametrize("options", [{"alpha": 0.8}, {"activation": "tanh"}, {"mu": 2.0}], ids=str)
def test_other_layers_do_without(options, runs):
    layer = make(**options)
    layer(torch.randn(2, 7)).sum().backward()
    assert runs == {"values": 0, "products": 0}


def test_a_cell_with_a_hook_does_without(runs):
    """The hook changes the step, which loops would know nothing of."""
    layer = make()
    x = torch.randn(1, 7)
    layer.cell.register_forward_hook(lambda *given: 0.5 * given[2])
    with torch.no_grad():
        z = layer(x)
        assert runs["values"] == 0
        torch.testing.assert_close(layer.map(x)(z), z, rtol=1e-3, atol=1e-3)


def test_evaluations_are_counted(runs):
    layer = make().eval()
    with torch.no_grad():
        found = layer.solve(torch.randn(1, 7), tolerance=1e-5)
    assert runs["values"] > 3
    assert found.steps.item() + 1 <= found.evaluations.item() <= found.steps.item() + 3
