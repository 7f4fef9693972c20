"""Steps that return the same memory at each call are solved as if they did not."""

import itertools

import pytest
import torch
from torch import nn

from equipoise import (
    SOLVERS,
    Cell,
    Equilibrium,
    Implicit,
    JacobianFree,
    Phantom,
    Stop,
    Unrolled,
    solve,
)

FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]
BATCH, WIDTH = 4, 6
TIGHT = Stop(tolerance=1e-10, max_steps=500)


class Symmetric(nn.Module):
    """`relu(z W + c) W^T` of norm 0.8, plain and with reused memory."""

    def __init__(self, buffers=1, views=False):
        super().__init__()
        W = torch.randn(WIDTH, WIDTH, dtype=torch.float64)
        self.W = nn.Parameter(W * 0.8**0.5 / torch.linalg.matrix_norm(W, 2))
        self.c = torch.randn(BATCH, WIDTH, dtype=torch.float64)
        memory = torch.zeros(buffers, 64, WIDTH, dtype=torch.float64)
        made = [part if views else part.clone() for part in (memory[i] for i in range(buffers))]
        self.ring = itertools.cycle(made)

    def plain(self, z, c):
        return torch.relu(z @ self.W + c) @ self.W.T

    def reused(self, z, c):
        out = next(self.ring)[: len(z)]
        return out.copy_(self.plain(z, c))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("solver", FORWARD)
def test_reused_memory_changes_no_value(solver, buffers, views, closed):
    net = Symmetric(buffers, views)
    z0 = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        wanted = solve(net.plain, z0, solver, TIGHT, context=net.c, symmetric=True)
        if closed:
            found = solve(lambda z: net.reused(z, net.c), z0, solver, TIGHT, symmetric=True)
        else:
            found = solve(net.reused, z0, solver, TIGHT, context=net.c, symmetric=True)
        residual = (net.plain(found.value, net.c) - found.value).norm(dim=1)
    assert wanted.converged.all()
    assert found.converged.all()
    assert (residual <= 2e-10 * found.value.norm(dim=1)).all()
    torch.testing.assert_close(found.value, wanted.value, rtol=1e-8, atol=1e-10)


def test_out_argument_is_solved():
    net, buffer = Symmetric(), torch.zeros(BATCH, WIDTH)
    W, c = net.W.detach().float(), net.c.float()

    def step(z):
        torch.addmm(c, z, W, out=buffer)
        return torch.tanh(buffer, out=buffer)

    solution = solve(step, torch.zeros(BATCH, WIDTH), "fixed_point")
    kept = solution.value.clone()
    step(torch.ones(BATCH, WIDTH))
    assert torch.equal(solution.value, kept)
    assert int(solution.steps.max()) > 1
    assert torch.allclose(torch.tanh(torch.addmm(c, kept, W)), kept, atol=1e-3)


def test_steps_that_return_their_argument_or_a_constant_are_solved():
    z0, c = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    for solver in ("fixed_point", "anderson", "broyden", "newton"):
        assert torch.equal(solve(lambda z: z, z0, solver).value, z0)
        assert torch.allclose(solve(lambda _, c: c, z0, solver, context=c).value, c, atol=1e-6)


def test_trace_and_few_steps_are_as_without_reuse():
    net = Symmetric()
    z0 = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
    for steps in (1, 2, 3):
        stop = Stop(tolerance=1e-10, max_steps=steps)
        with torch.no_grad():
            wanted = solve(net.plain, z0, "fixed_point", stop, context=net.c, trace=True)
            found = solve(net.reused, z0, "fixed_point", stop, context=net.c, trace=True)
        assert torch.equal(found.value, wanted.value)
        assert torch.equal(found.evaluations, wanted.evaluations)
        for mine, other in zip(found.trace.state, wanted.trace.state, strict=True):
            assert torch.equal(mine, other)


class ReusingCell(Cell):
    def __init__(self, net, reuse):
        super().__init__()
        self.net, self.reuse = net, reuse

    def inject(self, x):
        return x

    def step(self, z, context):
        # torch itself refuses to record what is overwritten later.
        reuse = self.reuse and not torch.is_grad_enabled()
        return (self.net.reused if reuse else self.net.plain)(z, context)


@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("solver", ["fixed_point", "auto", "newton"])
@pytest.mark.parametrize(
    "gradient", [Implicit(), Implicit("gmres"), Unrolled(200), Phantom(), JacobianFree()], ids=str
)
def test_layer_with_reused_memory_has_the_same_output_and_gradient(gradient, solver, buffers):
    net = Symmetric(buffers)
    results = []
    for reuse in (False, True):
        layer = Equilibrium(ReusingCell(net, reuse), solver, gradient, stop=TIGHT)
        x = net.c.clone().requires_grad_()
        z = layer(x)
        value = z.detach().clone()
        (grad,) = torch.autograd.grad(z, x, torch.ones_like(z))
        assert layer.last.converged.all()
        with torch.no_grad():
            kept = layer(x)
            again = kept.clone()
            layer(2 * x)
        assert layer.last.converged.all()
        torch.testing.assert_close(again, value, rtol=1e-8, atol=1e-10)
        assert torch.equal(kept, again)
        results.append((value, grad))
    (value, grad), (found, found_grad) = results
    torch.testing.assert_close(found, value, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found_grad, grad, rtol=1e-7, atol=1e-9)
