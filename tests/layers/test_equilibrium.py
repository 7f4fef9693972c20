from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cells import AffineCell, CoupledCell, ScaledCell, TanhCell, bounded, unroll
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.parallel import DistributedDataParallel

from equipoise import (
    SOLVERS,
    Anderson,
    Broyden,
    Cell,
    ConjugateGradient,
    ConvergenceError,
    ConvergenceWarning,
    Equilibrium,
    FixedPoint,
    Implicit,
    JacobianFree,
    Linearization,
    Neumann,
    Newton,
    Phantom,
    Shared,
    Status,
    Stop,
    Unrolled,
)
from equipoise.solvers.auto import pick_forward

FLOAT = torch.float64


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=FLOAT, requires_grad=True)


def gradients_of(function, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function().square().sum(), inputs)


# names, objects and automatic choices


@pytest.mark.parametrize("name", ["fixed_point", "anderson", "broyden", "newton"])
def test_solver_is_given_by_name_or_object(name: str, x: Tensor) -> None:
    cell = TanhCell()
    by_name, by_object = Equilibrium(cell, name), Equilibrium(cell, SOLVERS[name]())
    assert by_name.solver == by_object.solver == SOLVERS[name]()
    torch.testing.assert_close(by_name(x), by_object(x), rtol=0, atol=0)
    torch.testing.assert_close(by_name(x), unroll(cell, x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("implicit", Implicit()),
        ("phantom", Phantom()),
        ("jacobian_free", JacobianFree()),
        ("unrolled", Unrolled()),
    ],
)
def test_gradient_is_given_by_name_or_object(name: str, strategy: Any, x: Tensor) -> None:
    cell = TanhCell()
    by_name, by_object = Equilibrium(cell, gradient=name), Equilibrium(cell, gradient=strategy)
    assert by_name.gradient == by_object.gradient == strategy
    found, wanted = (
        gradients_of(lambda layer=layer: layer(x), [x, *cell.parameters()])
        for layer in (by_name, by_object)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_pickers_read_what_is_declared() -> None:
    assert isinstance(pick_forward(symmetric=False, lipschitz=None), Anderson)
    assert isinstance(pick_forward(symmetric=False, lipschitz=0.9), Anderson)
    assert pick_forward(symmetric=True, lipschitz=None) == Anderson()
    for symmetric in (True, False):
        assert pick_forward(symmetric=symmetric, lipschitz=0.3) == FixedPoint()
        assert pick_forward(symmetric=symmetric, lipschitz=0.0) == FixedPoint()


@pytest.mark.parametrize(
    "bound",
    [0.2, torch.tensor(0.2), nn.Parameter(torch.tensor(0.2))],
    ids=["float", "tensor", "trainable"],
)
def test_auto_takes_plain_iteration_for_a_declared_small_bound(bound: Any, x: Tensor) -> None:
    cell = TanhCell(norm=0.2)
    cell.lipschitz = lambda: bound
    auto, plain = Equilibrium(cell), Equilibrium(cell, FixedPoint(), Implicit(Neumann()))
    torch.testing.assert_close(auto(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(
        gradients_of(lambda: auto(x), [x]), gradients_of(lambda: plain(x), [x]), rtol=0, atol=0
    )


def test_auto_takes_what_the_pickers_say_when_nothing_is_declared(x: Tensor) -> None:
    cell = TanhCell()
    auto = Equilibrium(cell)
    assert auto.solver is None
    auto(x).sum().backward()
    forward, adjoint = auto.last.solver, auto.last.adjoint.solver
    assert forward == pick_forward(symmetric=False, lipschitz=None)
    named = Equilibrium(cell, forward, Implicit(adjoint))
    torch.testing.assert_close(auto(x), named(x), rtol=0, atol=0)
    torch.testing.assert_close(
        gradients_of(lambda: auto(x), [x]), gradients_of(lambda: named(x), [x]), rtol=0, atol=0
    )


def test_auto_takes_conjugate_gradient_for_a_symmetric_cell(x: Tensor, monkeypatch) -> None:
    A = torch.diag(torch.tensor([0.9, 0.5, 0.1], dtype=FLOAT))
    monkeypatch.setattr("equipoise.solvers.auto.dense_pays", lambda *_: False)
    auto, named = (
        Equilibrium(AffineCell(A, symmetric=True), gradient=Implicit(s))
        for s in ("auto", ConjugateGradient())
    )
    torch.testing.assert_close(
        gradients_of(lambda: auto(x), [x]), gradients_of(lambda: named(x), [x]), rtol=0, atol=0
    )
    assert auto.last.adjoint.steps.max() <= 3


def test_repr_shows_the_settings() -> None:
    text = repr(Equilibrium(TanhCell(), Broyden(memory=7), Phantom(steps=3), tolerance=1e-5))
    assert "Broyden(memory=7)" in text
    assert "Phantom(steps=3" in text
    assert "tolerance=1e-05" in text
    assert "solver=auto" in repr(Equilibrium(TanhCell()))


# values, starts and paths


def test_layer_solves_an_affine_cell_exactly(x: Tensor) -> None:
    cell = AffineCell(bounded(3, 3, 0.9))
    z = Equilibrium(cell, tolerance=1e-12)(x)
    torch.testing.assert_close(z, cell.exact(x), rtol=1e-9, atol=1e-9)


def test_layer_passes_gradcheck_in_input_and_weights(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *tensors: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, tensors, strict=True)), (x,))

    assert gradcheck(call, (x, *weights))
    assert gradgradcheck(call, (x, *weights))
    assert gradcheck(layer, (x,), check_forward_ad=True)


def test_warm_start_needs_no_step_at_the_equilibrium(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.9), "fixed_point")
    z = layer(x)
    cold = layer.last.steps
    again = layer(x, z.detach())
    assert layer.last.steps.max() == 0
    assert cold.min() > 2
    torch.testing.assert_close(again, z, rtol=0, atol=0)
    assert again.data_ptr() != z.data_ptr()


def test_warm_start_gets_no_gradient_and_is_not_written_to(x: Tensor) -> None:
    z0 = torch.randn(5, 4, dtype=FLOAT, requires_grad=True)
    before = z0.detach().clone()
    z = Equilibrium(TanhCell())(x, z0)
    first, start = torch.autograd.grad(z.sum(), [x, z0], allow_unused=True)
    assert start is None or start.abs().max() == 0
    assert first.abs().max() > 0
    assert torch.equal(z0, before)


def test_trace_keeps_the_path(x: Tensor) -> None:
    cell = TanhCell()
    layer = Equilibrium(cell, "fixed_point", tolerance=1e-8)
    z = layer(x, trace=True)
    trace = layer.last.trace
    assert trace.residual.shape == (len(trace.state), 5)
    assert len(trace.state) == int(layer.last.steps.max()) + 1
    torch.testing.assert_close(trace.state[3], unroll(cell, x, 3).detach())
    torch.testing.assert_close(trace.state[-1], z.detach(), rtol=0, atol=0)
    f = cell.step(trace.state[2], cell.inject(x))
    torch.testing.assert_close(
        trace.residual[2], ((f - trace.state[2]).norm(dim=1) / f.norm(dim=1)).detach()
    )
    assert not trace.state[0].requires_grad
    layer(x)
    assert layer.last.trace is None


def test_map_is_the_step_at_an_input(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    z = layer(x)
    torch.testing.assert_close(layer.map(x)(z), z, rtol=1e-9, atol=1e-11)


def test_constant_step_gives_the_context_and_its_gradient(x: Tensor) -> None:
    class Constant(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return context

    for solver in ("fixed_point", "anderson", "broyden", "newton"):
        layer = Equilibrium(Constant(), solver)
        torch.testing.assert_close(layer(x), layer.cell.U(x))
        (found,) = torch.autograd.grad(layer(x).sum(), x)
        torch.testing.assert_close(found, layer.cell.U.weight.sum(dim=0).expand(5, 3))


def test_constant_step_of_an_image_gives_the_context_and_its_gradient() -> None:
    class Constant(AffineCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return context

    x = torch.randn(2, 3, 4, dtype=FLOAT, requires_grad=True)
    layer = Equilibrium(Constant(torch.zeros(1, 1, dtype=FLOAT)), "fixed_point")
    z = layer(x)
    torch.testing.assert_close(z, x)
    z.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)


def test_layer_works_without_gradients_and_in_inference_mode(x: Tensor) -> None:
    for solver in ("fixed_point", "anderson", "broyden", "newton"):
        layer = Equilibrium(TanhCell(norm=0.95), solver, tolerance=1e-10)
        z = layer(x)
        evaluations = layer.last.evaluations
        with torch.no_grad():
            assert not layer(x).requires_grad
        with torch.inference_mode():
            torch.testing.assert_close(layer(x.detach()), z.detach(), rtol=1e-8, atol=1e-9)
        assert torch.equal(
            layer.last.evaluations, evaluations
        )  # the same solve, not a degenerate one


# what is remembered


def test_last_is_detached_and_tells_the_outcome(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    assert layer.last is None
    z = layer(x)
    assert torch.equal(layer.last.value, z)
    assert not layer.last.value.requires_grad
    assert layer.last.converged.all()
    # One at the start, and one look at the whole batch, since the samples ended apart.
    assert (layer.last.evaluations == layer.last.steps + 2).all()
    assert layer.last.adjoint is None
    z.sum().backward()
    assert layer.last.adjoint.converged.all()
    assert layer.last.adjoint.value.shape == (5, 4)
    assert (layer.last.adjoint.residual <= 1e-4).all()


def test_adjoint_is_the_solution_of_the_adjoint_equation(x: Tensor) -> None:
    cell = AffineCell(bounded(3, 3, 0.8))
    layer = Equilibrium(cell, tolerance=1e-12)
    g = torch.randn(5, 3, dtype=FLOAT)
    layer(x).backward(g)
    v = layer.last.adjoint.value
    torch.testing.assert_close(v - v @ cell.A.detach(), g)


def test_each_of_two_calls_gets_its_own_adjoint(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    first = layer(x)
    of_first = layer.last
    second = layer(2 * x[:3])
    of_second = layer.last
    assert of_first is not of_second
    (first.sum() + second.sum()).backward()
    assert of_first.adjoint.value.shape == (5, 4)
    assert of_second.adjoint.value.shape == (3, 4)
    assert layer.solves.backward.solves == 2


def test_outcomes_count_samples_forward_and_backward(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    for _ in range(3):
        layer(x).sum().backward()
    assert layer.solves.forward.solves == layer.solves.backward.solves == 3
    assert (
        layer.solves.forward.counts[Status.CONVERGED]
        == layer.solves.backward.counts[Status.CONVERGED]
        == 15
    )
    assert layer.solves.forward.failures == 0


# failures


def failing(on_failure: str, **options: Any) -> Equilibrium:
    return Equilibrium(
        TanhCell(norm=0.99),
        "fixed_point",
        tolerance=1e-12,
        max_steps=2,
        on_failure=on_failure,
        **options,
    )


def failing_backward(on_failure: str) -> Equilibrium:
    gradient = Implicit("neumann", tolerance=1e-12, max_steps=2)
    return Equilibrium(TanhCell(norm=0.99), gradient=gradient, on_failure=on_failure)


COUNTS = (
    r"5 of 5 samples did not converge \(worst relative residual \d\.\de[-+]\d\d after 2 steps\): "
)
SENTENCE = COUNTS + r"raise max_steps, loosen tolerance, or try solver 'newton'\.$"
BACKWARD = (
    "^Equilibrium, backward solve: "
    + COUNTS
    + (
        r"raise Implicit\(max_steps=...\), loosen Implicit\(tolerance=...\), or try "
        r"Implicit\(solver='gmres'\) or Implicit\(solver='dense'\)\.$"
    )
)


def test_failed_forward_solve_raises_with_counts_and_remedies(x: Tensor) -> None:
    layer = failing("raise")
    with pytest.raises(ConvergenceError, match=f"^Equilibrium: {SENTENCE}"):
        layer(x)
    assert layer.solves.forward.failures == 1
    assert layer.last.counts() == {Status.MAX_STEPS: 5}


def test_failed_backward_solve_raises_with_counts_and_remedies(x: Tensor) -> None:
    layer = failing_backward("raise")
    z = layer(x)
    with pytest.raises(ConvergenceError, match=BACKWARD):
        z.sum().backward()
    assert layer.solves.backward.failures == 1
    assert x.grad is None


def test_truncated_adjoint_is_reported_as_such(x: Tensor) -> None:
    layer = failing_backward("warn")
    z = layer(x)
    with pytest.warns(ConvergenceWarning, match=BACKWARD):
        z.sum().backward()
    assert (layer.last.adjoint.status == Status.MAX_STEPS).all()
    assert (layer.last.adjoint.steps == 2).all()
    assert layer.last.converged.all()


def count_warnings(action, times: int) -> list[int]:
    """At which calls a warning came."""
    found = []
    for call in range(1, times + 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
        found += [call] * len(caught)
    return found


def test_forward_warnings_come_first_and_at_tenfold_counts(x: Tensor) -> None:
    layer = failing("warn")
    assert count_warnings(lambda: layer(x), 120) == [1, 10, 100]
    assert layer.solves.forward.failures == 120
    assert layer.solves.forward.counts[Status.MAX_STEPS] == 600


def test_backward_warnings_come_first_and_at_tenfold_counts(x: Tensor) -> None:
    layer = failing_backward("warn")
    assert count_warnings(lambda: layer(x).sum().backward(), 30) == [1, 10]
    assert layer.solves.backward.failures == 30
    assert layer.solves.forward.failures == 0


def test_later_warnings_tell_how_often(x: Tensor) -> None:
    layer = failing("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            layer(x)
    assert [str(w.message).endswith("This was failure 10 in 10 solves.") for w in caught] == [
        False,
        True,
    ]


def test_ignored_failures_are_counted_in_silence(x: Tensor) -> None:
    layer = failing("ignore", gradient=Implicit("neumann", max_steps=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(x).sum().backward()
    assert caught == []
    assert layer.solves.forward.failures == layer.solves.backward.failures == 1
    assert x.grad.abs().max() > 0


def test_failure_sentence_names_each_way_of_failing() -> None:
    data = torch.tensor([[1.0, 0.1], [1.0, 1.5], [1.0, -1.0], [torch.nan, 0.5]], dtype=FLOAT)
    layer = Equilibrium(ScaledCell(), "fixed_point", max_steps=300)
    sentence = (
        "1 of 4 samples stalled and 1 of 4 samples diverged and 1 of 4 samples met NaN "
        "or infinity .*: look for NaN or infinity"
    )
    with pytest.warns(ConvergenceWarning, match=sentence):
        layer(data)
    assert layer.last.status.tolist() == [
        Status.CONVERGED,
        Status.DIVERGED,
        Status.STALLED,
        Status.NONFINITE,
    ]


def test_unreachable_tolerance_is_named() -> None:
    layer = Equilibrium(TanhCell(norm=0.9, dtype=torch.float32), tolerance=1e-9, max_steps=20)
    with pytest.warns(
        ConvergenceWarning,
        match=r"a tolerance of 1e-09 is at the limit of torch.float32: loosen it or use",
    ):
        layer(torch.randn(5, 3))


# batches


@pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian_free", "unrolled"])
@pytest.mark.parametrize("cell", [TanhCell, CoupledCell])
def test_empty_batch_gives_an_empty_result_and_zero_gradients(
    cell: type[Cell], gradient: str
) -> None:
    layer = Equilibrium(cell(), gradient=gradient, on_failure="raise")
    x = torch.zeros(0, 3, dtype=FLOAT, requires_grad=True)
    z = layer(x)
    z.sum().backward()
    assert z.shape == (0, 4)
    assert x.grad.shape == (0, 3)
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    assert grads
    assert all(g.abs().max() == 0 for g in grads)


def test_one_sample_gives_what_it_gives_in_a_batch(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    together = layer(x)
    for i in range(5):
        torch.testing.assert_close(layer(x[i : i + 1])[0], together[i], rtol=1e-9, atol=1e-12)


# an ordinary module


def test_state_dict_round_trip(x: Tensor) -> None:
    layer, other = Equilibrium(TanhCell()), Equilibrium(TanhCell())
    layer(x).sum().backward()
    assert set(layer.state_dict()) == {"cell.W", "cell.U.weight", "cell.U.bias"}
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


def test_layer_moves_to_another_dtype(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(dtype=torch.float32))
    layer(x.detach().float()).sum().backward()
    layer.to(torch.float64)
    z = layer(x)
    assert z.dtype == torch.float64
    (found,) = torch.autograd.grad(z.sum(), x)
    assert found.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_in_half_precision_is_refused_with_a_remedy(dtype: torch.dtype) -> None:
    layer = Equilibrium(TanhCell().to(dtype), tolerance=0.1)
    with pytest.raises(
        ValueError,
        match=(
            rf"^The state must be float32, float64, complex64 or complex128; got {dtype}\. "
            r"For lower precision use torch.autocast"
        ),
    ):
        layer(torch.randn(5, 3, dtype=dtype))


def test_layer_is_copied_after_a_solve_and_the_copy_is_independent(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    z = layer(x)
    between = copy.deepcopy(layer)
    z.sum().backward()
    after = copy.deepcopy(layer)
    assert between.last is after.last is None
    assert between.solves.backward.solves == 0
    assert after.solves.backward.solves == 1
    for twin in (between, after):
        torch.testing.assert_close(twin(x), z, rtol=0, atol=0)
        twin.zero_grad()
        twin(x).sum().backward()
        torch.testing.assert_close(twin.cell.W.grad, layer.cell.W.grad)
        assert twin.solves is not layer.solves


def test_layer_is_pickled_whole(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), Broyden(memory=3), Phantom(steps=2), stop=Stop(1e-6))
    z = layer(x, trace=True)
    z.sum().backward()
    twin = pickle.loads(pickle.dumps(layer))
    assert (twin.solver, twin.gradient, twin.stop) == (layer.solver, layer.gradient, layer.stop)
    torch.testing.assert_close(twin(x), z, rtol=0, atol=0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), z, rtol=0, atol=0)


def test_copies_and_pickles_leave_the_last_batch_behind() -> None:
    layer = Equilibrium(TanhCell())
    small = len(pickle.dumps(layer))
    with layer.solves.listening(lambda *_: None):
        layer(torch.randn(1000, 3, dtype=FLOAT)).sum().backward()
        data = pickle.dumps(layer)
    assert len(data) < small + 100 + 8 * sum(p.numel() for p in layer.parameters()) + 1000
    twin = pickle.loads(data)
    assert twin.last is None
    assert twin.solves.listeners == []
    assert twin.solves.forward.solves == 1
    assert layer.last.value.shape == (1000, 4)


def test_last_keeps_its_value_when_the_output_is_written_to(x: Tensor) -> None:
    layer = Equilibrium(TanhCell())
    with torch.no_grad():
        z = layer(x)
        kept = z.clone()
        z.zero_()
    assert torch.equal(layer.last.value, kept)


def test_hooks_of_the_cell_run_at_each_step(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), "fixed_point")
    calls = []
    layer.cell.register_forward_hook(lambda *_: calls.append(1))
    layer(x)
    assert len(calls) == int(layer.last.evaluations.max())


def test_hook_that_is_registered_within_a_solve_runs_from_then_on(x: Tensor) -> None:
    layer, steps, calls = Equilibrium(TanhCell(), "fixed_point"), [], []

    class Registering(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            steps.append(1)
            if len(steps) == 2:
                layer.cell.register_forward_hook(lambda *_: calls.append(1))
            return super().step(z, context)

    layer.cell = Registering()
    with torch.no_grad():
        layer(x)
    assert len(calls) == len(steps) - 2 > 0


def test_training_fits_a_target() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        Equilibrium(TanhCell(8), on_failure="ignore"), nn.Linear(8, 1, dtype=FLOAT)
    )
    x = torch.randn(64, 3, dtype=FLOAT)
    y = x[:, :1] * x[:, 1:2]
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (model(x) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert model[0].solves.forward.solves == model[0].solves.backward.solves == 60


def test_checkpointed_layer_gives_the_same_gradients(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    wanted = gradients_of(lambda: layer(x), [x, *layer.parameters()])
    found = gradients_of(
        lambda: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False),
        [x, *layer.parameters()],
    )
    torch.testing.assert_close(found, wanted)


# weights of unusual kinds


@pytest.mark.parametrize(
    "wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_parametrised_weights_get_gradients_from_two_calls(wrap, x: Tensor) -> None:
    class Wrapped(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrap(nn.Linear(4, 4, dtype=FLOAT))

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(0.5 * self.inner(z) + context)

    layer = Equilibrium(Wrapped(), tolerance=1e-8)
    first, second = layer(x), layer(2 * x)
    (first.sum() + second.sum()).backward()
    inner = [p.grad for p in layer.cell.inner.parameters()]
    assert all(g is not None and g.abs().max() > 0 for g in inner)


def test_backward_runs_twice_with_spectral_norm_in_the_step(x: Tensor) -> None:
    class Wrapped(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.parametrizations.spectral_norm(
                nn.Linear(4, 4, dtype=FLOAT), n_power_iterations=5
            )

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(0.5 * self.inner(z) + context)

    layer = Equilibrium(Wrapped(), tolerance=1e-8)
    z = layer(x)
    (first,) = torch.autograd.grad(z.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


def test_tied_weights_get_the_sum_of_their_gradients(x: Tensor) -> None:
    class Tied(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.V = self.W

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(0.5 * z @ self.W.T + 0.5 * z @ self.V + context)

    layer = Equilibrium(Tied(), tolerance=1e-12)
    found = gradients_of(lambda: layer(x), [layer.cell.W])
    wanted = gradients_of(lambda: unroll(layer.cell, x), [layer.cell.W])
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_weights_from_a_hypernetwork_pass_their_gradient_on(x: Tensor) -> None:
    class Generated(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            del self.W

        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(z @ self.W.T + context)

    code = torch.randn(2, dtype=FLOAT, requires_grad=True)
    atoms = torch.stack([bounded(4, 4, 0.2), bounded(4, 4, 0.2)])
    layer = Equilibrium(Generated(), tolerance=1e-12)

    def call(code: Tensor, x: Tensor) -> Tensor:
        layer.cell.W = torch.einsum("k,kij->ij", code, atoms)
        return layer(x)

    assert gradcheck(call, (code, x))


class SharedCell(TanhCell):
    """Normalises its weight once for each solve."""

    def inject(self, x: Tensor) -> tuple[Tensor, Shared]:
        return self.U(x), Shared(0.6 * self.W / torch.linalg.matrix_norm(self.W))

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        return torch.tanh(z @ context[1].T + context[0])


def test_shared_context_passes_its_gradient_to_the_parameter(x: Tensor) -> None:
    layer = Equilibrium(SharedCell(), tolerance=1e-12)

    def call(x: Tensor, W: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"cell.W": W}, (x,))

    W = layer.cell.W.detach().clone().requires_grad_()
    assert gradcheck(call, (x, W))
    assert gradgradcheck(call, (x, W))
    layer(x).sum().backward()
    assert layer.cell.W.grad.abs().max() > 0


def test_shared_context_survives_samples_that_leave() -> None:
    class Slow(SharedCell):
        def inject(self, x: Tensor) -> Any:
            return x[:, :4], x[:, 4:], Shared(self.W)

        def step(self, z: Tensor, context: Any) -> Tensor:
            return context[1] * torch.tanh(z @ context[2].T) + context[0]

    torch.manual_seed(0)
    x = torch.randn(16, 5, dtype=FLOAT)
    x[:, 4] = torch.linspace(0.0, 1.2, 16, dtype=FLOAT)
    layer = Equilibrium(Slow(norm=0.8), "fixed_point", tolerance=1e-10, max_steps=1000)
    z = layer(x)
    assert layer.last.steps.min() < layer.last.steps.max() / 2
    torch.testing.assert_close(
        layer.cell.step(z, (x[:, :4], x[:, 4:], layer.cell.W)), z, rtol=1e-8, atol=1e-9
    )


def test_tensor_from_elsewhere_is_refused_on_backward(x: Tensor) -> None:
    hidden = torch.randn(4, dtype=FLOAT, requires_grad=True)

    class Closed(TanhCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return torch.tanh(z @ self.W.T + context + hidden)

    sentence = (
        r"^Closed.step must use trainable tensors through its attributes or its context; got "
        r"one of shape \(4,\) from elsewhere, "
        r"whose gradient would be lost\. Make it a parameter, an attribute, or part of "
        r"inject's result\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(Closed())(x).sum().backward()
    with pytest.raises(ValueError, match=sentence):
        torch.autograd.grad(Equilibrium(Closed())(x).sum(), x, create_graph=True)


# trees


class TwoPartCell(Cell):
    """A state of a matrix and an image-like tensor that feed each other."""

    def __init__(self) -> None:
        super().__init__()
        self.A = nn.Parameter(bounded(4, 4, 0.4))
        self.B = nn.Parameter(bounded(4, 3, 0.4))

    def inject(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}

    def initial(self, x: Tensor, context: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"fast": x.new_zeros(len(x), 3), "slow": x.new_zeros(len(x), 2, 2)}

    def step(self, z: dict[str, Tensor], context: dict[str, Tensor]) -> dict[str, Tensor]:
        slow = z["slow"].flatten(1)
        return {
            "fast": torch.tanh(slow @ self.B + context["x"]),
            "slow": torch.tanh(slow @ self.A + z["fast"] @ self.B.T).view(-1, 2, 2),
        }


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
def test_tree_states_are_solved_and_differentiated(solver: str, x: Tensor) -> None:
    layer = Equilibrium(TwoPartCell(), solver, tolerance=1e-12)
    z = layer(x)
    assert list(z) == ["fast", "slow"]
    assert z["slow"].shape == (5, 2, 2)
    exact = unroll(layer.cell, x)
    torch.testing.assert_close(z, exact, rtol=1e-9, atol=1e-10)
    weights = [x, *layer.parameters()]
    found = torch.autograd.grad(z["fast"].square().sum() + z["slow"].sum(), weights)
    wanted = torch.autograd.grad(exact["fast"].square().sum() + exact["slow"].sum(), weights)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)
    assert layer.last.value["slow"].shape == layer.last.adjoint.value["slow"].shape == (5, 2, 2)


def test_tree_step_may_return_its_dict_in_another_order(x: Tensor) -> None:
    class Turned(TwoPartCell):
        def initial(self, x: Tensor, context: Any) -> dict[str, Tensor]:
            return {"a": torch.zeros_like(x), "b": torch.zeros_like(x)}

        def step(self, z: dict[str, Tensor], context: Any) -> dict[str, Tensor]:
            return {"b": 0.1 * z["a"] + 2 * context["x"], "a": 0.3 * z["b"] + context["x"]}

    z = Equilibrium(Turned(), tolerance=1e-12)(x)
    torch.testing.assert_close(z["a"], 0.3 * z["b"] + x)
    torch.testing.assert_close(z["b"], 0.1 * z["a"] + 2 * x)


# coupled cells


def test_coupled_batch_is_one_problem_with_one_status(x: Tensor) -> None:
    layer = Equilibrium(CoupledCell(), tolerance=1e-12)
    z = layer(x, trace=True)
    assert layer.last.status.shape == layer.last.steps.shape == (1,)
    assert layer.last.value.shape == layer.last.trace.state[0].shape == (5, 4)
    torch.testing.assert_close(z, unroll(layer.cell, x), rtol=1e-9, atol=1e-10)


def test_coupled_batch_passes_gradcheck(x: Tensor) -> None:
    layer = Equilibrium(CoupledCell(), tolerance=1e-12)
    assert gradcheck(layer, (x,))
    assert gradgradcheck(layer, (x,))


def test_coupled_batch_loses_no_sample(x: Tensor) -> None:
    sizes = set()

    class Watching(CoupledCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            sizes.add(len(z))
            return super().step(z, context)

    scales = torch.tensor([0.0, 1e-3, 1.0, 3.0, 10.0], dtype=FLOAT)
    layer = Equilibrium(Watching(), "fixed_point", tolerance=1e-8)
    layer(scales[:, None] * x).sum().backward()
    assert sizes == {5}


# what cells may define


class MaskedCell(TanhCell):
    """Gives its own linearisation, and counts how often it and its copies are asked."""

    asked = 0

    def __init__(self) -> None:
        super().__init__(norm=0.9)
        MaskedCell.asked = 0

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        MaskedCell.asked += 1
        value = self.step(z, context)
        return self.around(value.detach(), 1 - value.detach().square())

    def around(self, value: Tensor, slope: Tensor) -> Linearization:
        return Linearization(
            value,
            lambda v: slope * (v @ self.W.T),
            lambda v: (slope * v) @ self.W,
            select_rows=lambda rows: self.around(value[rows], slope[rows]),
        )


@pytest.mark.parametrize("solver", ["anderson", "newton"])
def test_own_linearisation_is_used_and_gives_the_same(solver: str, x: Tensor) -> None:
    layer = Equilibrium(MaskedCell(), solver, tolerance=1e-12)
    layer(x)
    assert (layer.cell.asked > 1) is (solver == "newton")
    weights = [x, *layer.parameters()]
    found = gradients_of(lambda: layer(x), weights)
    wanted = gradients_of(lambda: unroll(layer.cell, x, 600), weights)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
    assert layer.cell.asked >= 1
    assert gradcheck(layer, (x,))
    assert gradgradcheck(layer, (x,))


def test_readout_is_applied_and_differentiated(x: Tensor) -> None:
    class Reading(TanhCell):
        def __init__(self) -> None:
            super().__init__()
            self.R = nn.Parameter(torch.randn(4, 2, dtype=FLOAT))

        def readout(self, z: Tensor, context: Tensor) -> Tensor:
            return z @ self.R + context[:, :2]

    layer = Equilibrium(Reading(), tolerance=1e-12)
    z = unroll(layer.cell, x)
    wanted = z @ layer.cell.R + layer.cell.U(x)[:, :2]
    torch.testing.assert_close(layer(x), wanted, rtol=1e-9, atol=1e-10)
    assert layer.last.value.shape == (5, 4)
    weights = [x, *layer.parameters()]
    torch.testing.assert_close(
        gradients_of(lambda: layer(x), weights), torch.autograd.grad(wanted.square().sum(), weights)
    )
    assert gradcheck(layer, (x,))


# mixed precision


class RecordingCell(TanhCell):
    """Remembers in which precision its products were computed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dtype=torch.float32, **options)
        self.seen: set[torch.dtype] = set()

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        product = z @ self.W.T
        self.seen.add(product.dtype)
        return torch.tanh(product + context)


@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_does_not_spoil_a_tight_solve(backward_inside: bool) -> None:
    layer = Equilibrium(RecordingCell(norm=0.9), tolerance=1e-4, on_failure="raise")
    x = torch.randn(16, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = layer.cell.inject(x)
        assert context.dtype == torch.bfloat16
        z = layer(x)
        if backward_inside:
            z.sum().backward()
    if not backward_inside:
        z.sum().backward()
    assert z.dtype == torch.float32
    assert layer.cell.seen == {torch.float32}
    assert (layer.last.residual <= 1e-4).all()
    assert (layer.last.adjoint.residual <= 1e-4).all()
    assert x.grad.dtype == torch.float32
    exact = torch.zeros_like(z)
    for _ in range(300):
        exact = torch.tanh(exact @ layer.cell.W.T + context.detach().float())
    torch.testing.assert_close(z, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", ["fixed_point", "anderson", "broyden", "newton"])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_loose_solve_runs_under_autocast(backward_inside: bool, solver: str) -> None:
    layer = Equilibrium(RecordingCell(norm=0.5), solver, tolerance=0.2, on_failure="raise")
    x = torch.randn(16, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = layer(x)
        if backward_inside:
            z.float().sum().backward()
    if not backward_inside:
        z.float().sum().backward()
    assert torch.bfloat16 in layer.cell.seen
    torch.testing.assert_close(z.float(), unroll(layer.cell, x), rtol=0.3, atol=0.3)
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0


# several processes


def _distributed_gradients(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Equilibrium(TanhCell(), tolerance=1e-10))
    x = torch.randn(8, 3, dtype=FLOAT)[4 * rank : 4 * rank + 4]
    model(x).square().sum().backward()
    torch.save([p.grad for p in model.parameters()], f"{out}.{rank}")
    dist.barrier()
    os._exit(0)  # gloo's own teardown sometimes waits for itself for ever


def test_distributed_gradients_equal_those_of_one_process(tmp_path: Path) -> None:
    mp.spawn(
        _distributed_gradients, args=(str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2
    )
    torch.manual_seed(0)
    layer = Equilibrium(TanhCell(), tolerance=1e-10)
    x = torch.randn(8, 3, dtype=FLOAT)
    (layer(x).square().sum() / 2).backward()  # processes are averaged
    wanted = [p.grad for p in layer.parameters()]
    for rank in range(2):
        found = torch.load(tmp_path / f"out.{rank}")
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


# function transforms


def test_functional_call_uses_the_given_weights(x: Tensor) -> None:
    layer, other = (
        Equilibrium(TanhCell(), tolerance=1e-10),
        Equilibrium(TanhCell(), tolerance=1e-10),
    )
    weights = {name: p.detach() for name, p in other.named_parameters()}
    before = layer.cell.W
    torch.testing.assert_close(
        torch.func.functional_call(layer, weights, (x,)), other(x), rtol=0, atol=0
    )
    assert layer.cell.W is before


def test_function_gradient_of_the_weights_is_right(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    found = torch.func.grad(
        lambda w: torch.func.functional_call(layer, w, (x.detach(),)).square().sum()
    )(weights)
    wanted = gradients_of(lambda: unroll(layer.cell, x), list(layer.parameters()))
    torch.testing.assert_close(list(found.values()), list(wanted), rtol=1e-8, atol=1e-10)


def test_ensemble_is_solved_and_differentiated_by_vmap(x: Tensor) -> None:
    layers = [Equilibrium(TanhCell(), tolerance=1e-12) for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(layers)
    base = copy.deepcopy(layers[0]).to("meta")

    def call(weights: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (weights, buffers), (x,))

    together = torch.func.vmap(call, (0, 0, None))(weights, buffers, x)
    apart = torch.stack([layer(x) for layer in layers])
    torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-12)
    together.square().sum().backward()
    apart.square().sum().backward()
    for name, stacked in weights.items():
        wanted = torch.stack([dict(layer.named_parameters())[name].grad for layer in layers])
        torch.testing.assert_close(stacked.grad, wanted, rtol=1e-8, atol=1e-10)


def test_ensemble_gradients_by_vmap_of_grad(x: Tensor) -> None:
    layers = [Equilibrium(TanhCell(), tolerance=1e-12) for _ in range(3)]
    weights, _ = torch.func.stack_module_state(layers)
    weights = {name: tensor.detach() for name, tensor in weights.items()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layers[0], weights, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (0, None))(weights, x.detach())
    for i, layer in enumerate(layers):
        wanted = gradients_of(lambda layer=layer: unroll(layer.cell, x), list(layer.parameters()))
        torch.testing.assert_close(
            [found[name][i] for name, _ in layer.named_parameters()],
            list(wanted),
            rtol=1e-8,
            atol=1e-10,
        )


@pytest.mark.parametrize("gradient", ["implicit", "phantom", "jacobian_free", "unrolled"])
def test_gradients_of_each_sample_by_vmap_of_grad(gradient: str, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), gradient=gradient, tolerance=1e-12, on_failure="ignore")
    weights = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (sample[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x.detach())
    for i in range(5):
        wanted = gradients_of(lambda i=i: layer(x[i : i + 1]), list(layer.parameters()))
        torch.testing.assert_close(
            [found[name][i] for name in weights], list(wanted), rtol=1e-8, atol=1e-9
        )


def test_declared_bound_as_a_tensor_works_under_vmap(x: Tensor) -> None:
    class Bounded(TanhCell):
        def lipschitz(self) -> Tensor:
            return torch.linalg.matrix_norm(self.W)

    layer = Equilibrium(Bounded(norm=0.1), tolerance=1e-12)
    weights = {
        name: torch.stack([p.detach(), 0.5 * p.detach()]) for name, p in layer.named_parameters()
    }
    both = torch.func.vmap(lambda w: torch.func.functional_call(layer, w, (x,)))(weights)
    torch.testing.assert_close(both[0], layer(x), rtol=1e-9, atol=1e-10)


def test_batched_gradients_work_or_are_refused_in_a_clear_sentence(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), tolerance=1e-12)
    z = layer(x)
    seeds = torch.randn(3, *z.shape, dtype=FLOAT)
    wanted = torch.stack([torch.autograd.grad(z, x, seed, retain_graph=True)[0] for seed in seeds])
    try:
        (found,) = torch.autograd.grad(z, x, seeds, is_grads_batched=True)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        assert "torch.func" in str(error)  # noqa: PT017  either outcome is right
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


def test_newton_equals_others_on_many_samples() -> None:
    x = torch.randn(40, 3, dtype=FLOAT)
    cell = TanhCell(norm=1.5)
    wanted = Equilibrium(cell, "anderson", tolerance=1e-11, on_failure="ignore")
    found = Equilibrium(cell, Newton(), tolerance=1e-11, on_failure="ignore")
    a, b = wanted(x), found(x)
    both = wanted.last.converged & found.last.converged
    assert both.sum() >= 20
    f = cell.step(b[both], cell.inject(x[both]))
    torch.testing.assert_close(f, b[both], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        cell.step(a[both], cell.inject(x[both])), a[both], rtol=1e-9, atol=1e-9
    )


def test_a_new_kind_of_failure_is_heard_of_at_once():
    layer = Equilibrium(TanhCell(), "fixed_point", tolerance=1e-12, max_steps=1)
    x = torch.randn(5, 3, dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        layer(x)
    with pytest.warns(ConvergenceWarning, match="met NaN or infinity"):
        layer(x * torch.nan)
