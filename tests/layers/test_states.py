"""Iterates along the path of a solve, with gradients, for losses on them."""

from __future__ import annotations

import pytest
import torch
from cells import AffineCell, TanhCell, bounded, unroll
from torch import Tensor, nn

from equipoise import Equilibrium, Implicit, JacobianFree, Phantom, Unrolled

FLOAT = torch.float64


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=FLOAT, requires_grad=True)


def step_at(cell: TanhCell, z: Tensor, x: Tensor) -> Tensor:
    return cell.step(z, cell.inject(x))


def test_states_are_the_iterates_of_the_solver(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.9), "fixed_point", tolerance=1e-10, max_steps=500)
    z, states = layer(x, states=[1, 3, 7])
    torch.testing.assert_close(z, layer(x), rtol=0, atol=0)
    for step, state in zip([1, 3, 7], states, strict=True):
        torch.testing.assert_close(state, unroll(layer.cell, x, step), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", ["anderson", "broyden", "newton"])
def test_states_of_every_solver_lie_on_its_traced_path(solver: str, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.9), solver, tolerance=1e-10)
    path = layer.solve(x, trace=True).trace.state
    solution = layer.solve(x, states=[1, 2])
    for step, state in zip([1, 2], solution.states, strict=True):
        torch.testing.assert_close(state, path[step], rtol=0, atol=0)


def test_finished_sample_stays_where_it_ended() -> None:
    A = torch.eye(1, dtype=FLOAT)
    rates = torch.tensor([[0.0], [0.0], [0.0], [0.9]], dtype=FLOAT)

    class Rates(AffineCell):
        def step(self, z: Tensor, context: Tensor) -> Tensor:
            return context[:, :1] * z + 1

    layer = Equilibrium(Rates(A), "fixed_point", tolerance=1e-8, max_steps=400)
    z0 = torch.zeros(4, 1, dtype=FLOAT)
    z, (early, late, never) = layer(rates, z0, states=[2, 20, 399])
    torch.testing.assert_close(early[:3], z[:3], rtol=0, atol=0)
    torch.testing.assert_close(late[:3], z[:3], rtol=0, atol=0)
    torch.testing.assert_close(late[3, 0], torch.tensor((1 - 0.9**20) / 0.1, dtype=FLOAT))
    torch.testing.assert_close(never, z, rtol=0, atol=0)


def test_implicit_state_has_the_implicit_derivative_at_that_state(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.8), "fixed_point", tolerance=1e-12, max_steps=500)
    _, (state,) = layer(x, states=[2])
    g = torch.randn_like(state)
    found = torch.autograd.grad(state, [x, *layer.parameters()], g)
    # The definition, with a dense Jacobian: (I - J(z_2))^-T g, pulled back through the step at z_2.
    at = state.detach()
    J = torch.func.vmap(
        torch.func.jacrev(lambda z, one: step_at(layer.cell, z[None], one[None])[0])
    )(at, x.detach())
    v = torch.linalg.solve(torch.eye(4, dtype=FLOAT) - J.mT, g)
    wanted = torch.autograd.grad(step_at(layer.cell, at, x), [x, *layer.parameters()], v)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gradient", [JacobianFree(), Phantom(3, 0.7)])
def test_cheap_state_is_a_few_recorded_steps_from_it(gradient: object, x: Tensor) -> None:
    layer = Equilibrium(TanhCell(norm=0.8), "fixed_point", gradient, tolerance=1e-12, max_steps=500)
    _, (state,) = layer(x, states=[2])
    z = unroll(layer.cell, x, 2).detach()
    if isinstance(gradient, Phantom):
        for _ in range(3):
            z = z.lerp(step_at(layer.cell, z, x), 0.7)
    else:
        z = step_at(layer.cell, z, x)
    torch.testing.assert_close(state, z, rtol=1e-12, atol=1e-12)
    inputs = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(state.square().sum(), inputs),
        torch.autograd.grad(z.square().sum(), inputs),
    )


def test_unrolled_states_are_the_recorded_iterates(x: Tensor) -> None:
    layer = Equilibrium(TanhCell(), gradient=Unrolled(30))
    z, states = layer(x, states=[2, 30])
    inputs = [x, *layer.parameters()]
    for step, state in zip([2, 30], states, strict=True):
        found = torch.autograd.grad(state.square().sum(), inputs, retain_graph=True)
        wanted = torch.autograd.grad(unroll(layer.cell, x, step).square().sum(), inputs)
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(states[-1], z, rtol=0, atol=0)


def test_states_pass_through_the_readout_and_count_as_no_solve(x: Tensor) -> None:
    class Doubled(TanhCell):
        def readout(self, z: Tensor, context: Tensor) -> Tensor:
            return 2 * z

    layer = Equilibrium(Doubled(), "fixed_point")
    solution = layer.solve(x, states=[1])
    torch.testing.assert_close(solution.states[0], 2 * step_at(layer.cell, 0 * solution.value, x))
    assert layer.solves.forward.solves == 1
    assert layer.last.states is None  # no graph outlives the call


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ([0], r"states must be a whole number from 1 to 100; got 0"),
        ([101], r"states must be a whole number from 1 to 100; got 101"),
        ([3, 2], r"states must rise; got \[3, 2\]"),
        ([2, 2], r"states must rise"),
        (3, r"states must be a list of steps; got int"),
    ],
)
def test_impossible_states_are_refused(states: object, sentence: str, x: Tensor) -> None:
    with pytest.raises(ValueError, match=sentence):
        Equilibrium(TanhCell())(x, states=states)


def test_states_beyond_the_recorded_steps_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match="from 1 to 20; got 21"):
        Equilibrium(TanhCell(), gradient="unrolled")(x, states=[21])
    layer = Equilibrium(TanhCell(), gradient=Unrolled(150), on_failure="ignore")
    layer(x, states=[150])  # `max_steps`, which is 100, does not hold for it
    with pytest.raises(ValueError, match="outside of vmap"):
        torch.func.vmap(lambda one: Equilibrium(layer.cell)(one[None], states=[1])[0])(x.detach())


@pytest.mark.parametrize(
    ("core", "steps"),
    [
        ("indexing", [2, 4, 8, 12]),
        # The gradient's own step is made in between, and the solver goes on from there.
        ("sliced", [2, 5, 10, 15]),
    ],
)
def test_states_are_those_of_torchdeq(core: str, steps: list[int], x: Tensor) -> None:
    torchdeq = pytest.importorskip("torchdeq")
    cell = TanhCell(norm=0.9)
    deq = torchdeq.get_deq(
        core=core,
        f_solver="fixed_point_iter",
        f_max_iter=12,
        f_tol=1e-14,
        grad=1,
        indexing=[2, 4, 8],
    )
    context = cell.inject(x)
    theirs, _ = deq(lambda z: cell.step(z, context), torch.zeros(5, 4, dtype=FLOAT))
    layer = Equilibrium(
        cell, "fixed_point", JacobianFree(), 1e-14, max_steps=steps[-1], on_failure="ignore"
    )
    _, states = layer(x, states=steps)
    for ours, their in zip(states, theirs, strict=True):
        torch.testing.assert_close(ours, their)
        torch.testing.assert_close(
            torch.autograd.grad(ours.square().sum(), [x, *cell.parameters()], retain_graph=True),
            torch.autograd.grad(their.square().sum(), [x, *cell.parameters()], retain_graph=True),
        )


def test_correction_loss_trains_a_model_that_is_right_after_few_steps() -> None:
    x = torch.randn(64, 3, dtype=FLOAT)
    target = torch.sin(2 * x[:, :1])

    def error_after_two_steps(correct: bool) -> float:
        torch.manual_seed(1)
        layer = Equilibrium(
            TanhCell(8, norm=0.9), "fixed_point", JacobianFree(), on_failure="ignore"
        )
        head = nn.Linear(8, 1, dtype=FLOAT)
        optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], 2e-2)
        for _ in range(150):
            z, states = layer(x, states=[2])
            loss = (head(z) - target).square().mean()
            if correct:
                loss = loss + 0.8 * (head(states[0]) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _, (state,) = layer(x, states=[2])
        return (head(state) - target).square().mean().item()

    assert error_after_two_steps(True) < 0.5 * error_after_two_steps(False)


def test_states_keep_no_other_iterates() -> None:
    layer = Equilibrium(
        AffineCell(bounded(4, 4, 0.99)), "fixed_point", Implicit("gmres"), 1e-9, max_steps=2000
    )
    solution = layer.solve(torch.randn(3, 4, dtype=FLOAT), states=[5, 9])
    assert solution.trace is None
    assert len(solution.states) == 2
