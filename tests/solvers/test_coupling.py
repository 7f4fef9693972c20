"""Samples that depend on each other without a word are refused, or solved rightly anyhow."""

import pytest
import torch
from torch import nn

from equipoise import SOLVERS, Cell, ConvergenceError, Equilibrium, Implicit, Stop, solve
from equipoise.solvers.coupling import CHECK_PERIOD, FIRST_CHECKS, CheckSchedule

FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
GENERAL = [name for name in FORWARD if not SOLVERS[name].needs_symmetric]
BATCH, WIDTH = 8, 6
STOP = Stop(tolerance=1e-6, max_steps=300)


def attention(v):
    weights = torch.softmax(v @ v.mT / WIDTH**0.5, dim=1)
    return weights @ v


def pairs(v):
    return v.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


MIXERS = {
    "attention over the batch": attention,
    "mean": lambda v: v.mean(dim=0, keepdim=True).expand_as(v),
    "cumsum": lambda v: v.cumsum(dim=0) / BATCH,
    "roll": lambda v: v.roll(1, dims=0),
    "max": lambda v: v.amax(dim=0, keepdim=True).expand_as(v),
    "sort": lambda v: v.sort(dim=0).values,
    "pairs": pairs,
    "batch normalisation": lambda v: 0.3 * (v - v.mean(0)) / (v.var(0, correction=0) + 0.3).sqrt(),
    "reshape": lambda v: v.reshape(WIDTH, BATCH).T,
}


def samples(dtype=torch.float64):
    """Inputs and rates from easy to slow, so that samples end at different times."""
    c = torch.randn(BATCH, WIDTH, dtype=dtype)
    rate = torch.linspace(0.02, 0.9, BATCH, dtype=dtype)[torch.randperm(BATCH), None]
    return c, rate


def mixed_step(mixer, strength=1.0):
    def step(z, context):
        c, rate = context
        return rate * torch.tanh(MIXERS[mixer](z)) * strength + c

    return step


def worst(step, z, context):
    f = step(z, context)
    return float(((f - z).norm(dim=1) / f.norm(dim=1)).max())


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("solver", GENERAL)
@pytest.mark.parametrize("mixer", MIXERS)
def test_coupling_is_refused_or_solved(mixer, solver, closure):
    context, step = samples(), mixed_step(mixer)
    z0 = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    try:
        if closure:
            solution = solve(lambda z: step(z, context), z0, solver, STOP)
        else:
            solution = solve(step, z0, solver, STOP, context=context)
    except (ValueError, RuntimeError) as error:
        # A mixer that cannot work on fewer samples fails by itself.
        said = [str(error), *getattr(error, "__notes__", [])]
        pytest.fail(said[0]) if not any("coupled" in text for text in said) else None
        return
    f = step(solution.value, context)
    residual = (f - solution.value).norm(dim=1) / f.norm(dim=1)
    assert (residual[solution.converged] <= 2 * STOP.tolerance).all()
    assert not closure or solution.converged.any()


@pytest.mark.parametrize("mixer", sorted(MIXERS.keys() - {"max", "pairs", "reshape"}))
def test_plain_steps_with_coupling_are_refused(mixer):
    z0 = torch.zeros(BATCH, WIDTH)
    with pytest.raises(ValueError, match=r"^coupled must be True for a step whose samples depend"):
        solve(mixed_step(mixer), z0, "fixed_point", context=samples(torch.float32))


def test_weak_coupling_is_refused_too():
    step = mixed_step("mean", strength=0.05)
    with pytest.raises(ValueError, match="coupled must be True"):
        solve(
            lambda z, context: step(z, context) + 0.5 * context[1] * z,
            torch.zeros(BATCH, WIDTH, dtype=torch.float64),
            "fixed_point",
            Stop(tolerance=1e-8, max_steps=300),
            context=samples(),
        )


class TimeFirst(Cell):
    """Attention over the wrong axis: of (batch, time, width) it takes the batch for time."""

    def __init__(self, coupled=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.coupled = coupled

    def inject(self, x):
        return x

    def step(self, z, c):
        return torch.tanh(c + 0.9 * self.attention(z, z, z, need_weights=False)[0])


def tokens():
    return torch.randn(BATCH, 5, WIDTH) * torch.logspace(-3, 0.5, BATCH)[:, None, None]


def test_layer_refuses_attention_in_the_wrong_layout():
    layer = Equilibrium(TimeFirst(), "fixed_point")
    with pytest.raises(ValueError, match=r"^TimeFirst\.coupled must be True"):
        layer(tokens())


def test_layer_refuses_coupling_each_time_once_it_is_proven():
    layer = Equilibrium(TimeFirst(), "fixed_point")
    x = tokens()
    for _ in range(FIRST_CHECKS + 4):
        with pytest.raises(ValueError, match=r"^TimeFirst\.coupled must be True"):
            layer(x)
    with pytest.raises(ValueError, match=r"^TimeFirst\.coupled must be True"):
        layer.eval()(x)


def test_mask_of_the_whole_batch_is_named_when_rows_leave():
    class Masked(TimeFirst):
        def inject(self, x):
            self.mask = (torch.rand_like(x) > 0.5).to(x)
            return x

        def step(self, z, c):
            return c + torch.linspace(0.1, 0.5, WIDTH) * self.mask * z * c.abs().clamp(max=1)

    with pytest.raises(RuntimeError) as caught:
        Equilibrium(Masked(), "fixed_point", tolerance=1e-6)(100 * tokens())
    assert "such as a dropout mask, pass that on from inject" in caught.value.__notes__[0]


def test_declared_coupling_is_solved():
    layer = Equilibrium(TimeFirst(coupled=True), "fixed_point", tolerance=1e-6)
    x = tokens()
    z = layer(x)
    residual = (layer.map(x)(z) - z).detach()
    assert float(residual.norm()) < 2e-6 * float(z.detach().norm())


def test_random_step_is_not_called_coupled():
    z0 = torch.zeros(BATCH, WIDTH)

    def step(z, context):
        c, rate = context
        noise = torch.rand(()) if len(z) == BATCH and float(z.norm()) > 1 else 0.0
        return rate * z + c + noise

    c, _ = samples(torch.float32)
    rate = torch.full((BATCH, 1), 0.3)
    rate[0] = 0.9
    with torch.random.fork_rng():
        solution = solve(step, z0, "fixed_point", context=(c, rate))
    assert not solution.converged[1:].any()


def test_check_leaves_buffers_alone():
    class Counting(Cell):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.rows = []

        def inject(self, x):
            return x

        def step(self, z, c):
            self.calls += 1
            self.rows.append(len(z))
            return 0.3 * torch.tanh(z) + c

    layer = Equilibrium(Counting(), "fixed_point", tolerance=1e-6)
    x = torch.randn(BATCH, WIDTH)
    x[0] *= 1e-6
    with torch.no_grad():
        layer(x)
    assert int(layer.last.steps.min()) < int(layer.last.steps.max())
    assert layer.cell.rows[-1] == BATCH
    assert int(layer.cell.calls) == len(layer.cell.rows) - 1
    assert int(layer.last.evaluations.max()) == len(layer.cell.rows)


def test_layer_checks_its_first_solves_and_then_some():
    schedule = CheckSchedule()
    due = [schedule.due("a") for _ in range(64)]
    assert [i for i, is_due in enumerate(due) if is_due] == [
        *range(FIRST_CHECKS),
        *range(CHECK_PERIOD, 64, CHECK_PERIOD),
    ]
    assert schedule.due("b")


class MixedAdjoint(Cell):
    """Samples are independent in the value (the mean of `z - z` is zero), not in the derivative."""

    def inject(self, x):
        return x

    def step(self, z, context):
        with torch.no_grad():
            copy = z.clone()
        return context[:, -1:] * z + 0.5 * (z - copy).mean(dim=0) + context

    def initial(self, x, context):
        return torch.zeros_like(x)


@pytest.mark.parametrize("solver", ["neumann", "anderson", "gmres", "bicgstab", "newton"])
def test_coupled_adjoint_is_refused_or_solved(solver):
    cell = MixedAdjoint()
    layer = Equilibrium(
        cell,
        "fixed_point",
        Implicit(solver),
        tolerance=1e-8,
        max_steps=500,
        on_failure="raise",
    )
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    x[:, -1] = torch.linspace(0.01, 0.4, BATCH)
    x.requires_grad_()
    g = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    z = layer(x)
    try:
        z.backward(g)
    except ConvergenceError:
        return
    except ValueError as error:
        pytest.fail(str(error)) if "MixedAdjoint.coupled must be" not in str(error) else None
        return
    J = torch.autograd.functional.jacobian(lambda v: cell.step(v, x.detach()), z.detach())
    n = BATCH * WIDTH
    v = torch.linalg.solve(torch.eye(n, dtype=g.dtype) - J.reshape(n, n).T, g.flatten()).view_as(g)
    leaf = x.detach().requires_grad_()
    (expected,) = torch.autograd.grad(cell.step(z.detach(), leaf), leaf, v)
    assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-7)
