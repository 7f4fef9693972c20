"""Complex states, contexts and parameters: solved and differentiated like pairs of real numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from equipoise import (
    SOLVERS,
    Cell,
    Equilibrium,
    Implicit,
    JacobianFree,
    Phantom,
    Shared,
    Stop,
    Unrolled,
    frobenius_penalty,
    solve,
    spectral_radius,
)
from equipoise.layers import ChangeOfVariable, Regularized, Skip
from equipoise.testing.gradient_case import as_function, unroll

STOP = Stop(tolerance=1e-13, max_steps=500)
FORWARD = [name for name in SOLVERS if not SOLVERS[name].linear]


def matrix(rows: int, columns: int, norm: float) -> Tensor:
    drawn = torch.randn(rows, columns, dtype=torch.complex128)
    return norm * drawn / torch.linalg.matrix_norm(drawn, 2)


def squash(u: Tensor) -> Tensor:
    """The gradient of `sqrt(1 + |u|^2)`, which is not holomorphic."""
    return u / (1 + u.abs().square()).sqrt()


class Modulus(Cell):
    """`z = squash(W z + V conj(z) + x + b)`: conjugates and magnitudes, linear over the reals."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.W = nn.Parameter(matrix(width, width, 0.3))
        self.V = nn.Parameter(matrix(width, width, 0.1))
        self.b = nn.Parameter(torch.randn(width, dtype=torch.complex128))

    def inject(self, x: Tensor) -> Tensor:
        return x + self.b

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return squash(z @ self.W.T + z.conj() @ self.V.T + context)


class Hermitian(Cell):
    """`z = W^H squash(W z + x)`, whose Jacobian is Hermitian and positive semidefinite."""

    symmetric = True

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(matrix(3, 2, 0.8))

    def inject(self, x: Tensor) -> Tensor:
        return x

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return x.new_zeros(len(x), 2)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return squash(z @ self.W.T + context) @ self.W.conj()


class Fourier(Cell):
    """`z = tanh(irfft(w rfft(z)) + x)`: a real state with complex weights."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(0.4 * torch.randn(3, dtype=torch.complex128))
        self.shared = shared

    def inject(self, x: Tensor) -> Any:
        return x, Shared(1.0 * self.w) if self.shared else None

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        u, w = context
        w = self.w if w is None else w
        return torch.tanh(torch.fft.irfft(torch.fft.rfft(z) * w, n=z.shape[-1]) + u)


class Mixed(Cell):
    """A complex and a real tensor as the state, of odd width, and a complex shared context."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(matrix(2, 3, 0.4))

    def inject(self, x: Tensor) -> Any:
        return {"x": x, "phase": Shared(torch.exp(1j * self.W.abs().sum()))}

    def initial(self, x: Tensor, context: Any) -> Any:
        return torch.zeros_like(x[:, 0].real), torch.zeros_like(x[:, :2])

    def step(self, z: Any, context: Any) -> Any:
        size, wave = z
        turned = squash(torch.stack([size + 0j, wave[:, 0], wave[:, 1].conj()], 1) @ self.W.T)
        new = 0.5 * context["phase"] * turned + context["x"][:, :2]
        return 0.5 * new.abs().sum(dim=1).tanh(), new

    def readout(self, z: Any, context: Any) -> Tensor:
        return torch.cat([z[0][:, None] + 0j, z[1]], dim=1)


CELLS = {
    "modulus": (Modulus, (2,), torch.complex128),
    "hermitian": (Hermitian, (3,), torch.complex128),
    "fourier": (Fourier, (5,), torch.float64),
    "mixed": (Mixed, (2,), torch.complex128),
}


def make(name: str, samples: int = 2) -> tuple[Cell, Tensor]:
    torch.manual_seed(3)
    kind, shape, dtype = CELLS[name]
    return kind(), torch.randn(samples, *shape, dtype=dtype, requires_grad=True)


def layer_of(cell: Cell, solver: str = "auto", gradient: Any = "implicit") -> Equilibrium:
    return Equilibrium(cell, solver, gradient, on_failure="raise", stop=STOP)


def derivatives(z: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """First derivatives of a loss and the products of its Hessian with them."""
    weight = torch.linspace(-1, 1, z.numel(), dtype=torch.float64).view(z.shape)
    loss = (z * weight).abs().square().sum() + (z * weight).real.sum()
    first = torch.autograd.grad(loss, tensors, create_graph=True)
    size = sum(g.abs().square().sum() for g in first)
    return [*first, *torch.autograd.grad(size, tensors)]


def fits(name: str, cell: str) -> bool:
    return cell == "hermitian" or not SOLVERS[name].needs_symmetric


@pytest.mark.parametrize("name", CELLS)
def test_complex_derivatives_are_those_of_a_long_unroll(name: str) -> None:
    cell, x = make(name)
    tensors = [x, *cell.parameters()]
    expected = derivatives(unroll(cell, x, 100), tensors)
    for solver in FORWARD:
        if fits(solver, name):
            found = derivatives(layer_of(cell, solver)(x), tensors)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("adjoint", list(SOLVERS))
def test_complex_adjoints_are_exact(adjoint: str) -> None:
    for name in ("modulus", "hermitian"):
        if fits(adjoint, name):
            cell, x = make(name, samples=1)
            layer = layer_of(cell, gradient=Implicit(adjoint))
            function, tensors = as_function(layer), (x, *cell.parameters())
            assert gradcheck(function, tensors, fast_mode=True, check_forward_ad=True)
            expected = derivatives(unroll(cell, x, 100), [*tensors])
            for a, b in zip(derivatives(layer(x), [*tensors]), expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_complex_gradients_pass_gradcheck(name: str) -> None:
    cell, x = make(name, samples=1)
    for gradient in ("implicit", Unrolled(5)):
        layer = Equilibrium(cell, "auto", gradient, on_failure="ignore", stop=STOP)
        function, tensors = as_function(layer), (x, *cell.parameters())
        assert gradcheck(function, tensors, fast_mode=True, check_forward_ad=True)
        assert gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("name", CELLS)
def test_complex_inexact_gradients_come_to_the_exact_one(name: str) -> None:
    cell, x = make(name)
    tensors = [x, *cell.parameters()]
    weight = torch.randn_like(layer_of(cell)(x))

    def gradient(kind: Any) -> tuple[Tensor, ...]:
        z = layer_of(cell, gradient=kind)(x)
        return torch.autograd.grad((z * weight).real.sum(), tensors)

    for a, b in zip(gradient(Phantom(120, 1.0)), gradient("implicit"), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    for a, b in zip(gradient(JacobianFree()), gradient(Phantom(1, 1.0)), strict=True):
        torch.testing.assert_close(a, b)


def test_complex_shared_context_gets_its_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, dtype=torch.float64)
    found = []
    for shared in (False, True):
        torch.manual_seed(1)
        cell = Fourier(shared)
        layer_of(cell)(x).square().sum().backward()
        found.append(cell.w.grad)
    assert found[0] is not None
    torch.testing.assert_close(found[1], found[0])


def test_complex_tensor_from_elsewhere_is_refused() -> None:
    elsewhere = torch.full((3,), 0.3 + 0.1j, dtype=torch.complex128, requires_grad=True)

    class Closing(Fourier):
        def step(self, z: Tensor, context: Any) -> Tensor:
            return super().step(z, (context[0], elsewhere))

    layer = layer_of(Closing())
    with pytest.raises(ValueError, match=r"must use trainable tensors .* of shape \(3,\)"):
        layer(torch.randn(2, 5, dtype=torch.float64, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("name", CELLS)
def test_complex_ensembles_are_solved_under_vmap(name: str) -> None:
    cell, x = make(name)
    function = as_function(layer_of(cell))
    members = [torch.stack([p, 0.8 * p]).detach() for p in cell.parameters()]

    def loss(*tensors: Tensor) -> Tensor:
        return function(x.detach(), *tensors).abs().square().sum()

    which = tuple(range(len(members)))
    found = torch.func.vmap(torch.func.grad(loss, argnums=which))(*members)
    for k in range(2):
        own = [tensor[k].clone().requires_grad_() for tensor in members]
        expected = torch.autograd.grad(loss(*own), own)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a[k], b, atol=1e-9, rtol=1e-9)


def test_complex_samples_leave_the_batch_with_their_context() -> None:
    torch.manual_seed(0)

    class Slow(Cell):
        """`z = a z + x`, with a rate of its own for each sample."""

        def inject(self, x: Any) -> Any:
            return x

        def initial(self, x: Any, context: Any) -> Tensor:
            return torch.zeros_like(x[1])

        def step(self, z: Tensor, context: Any) -> Tensor:
            rate, constant = context
            return rate[:, None] * z + constant

    angle = torch.exp(1j * torch.linspace(0, 3, 8, dtype=torch.float64))
    rate = (torch.linspace(0.05, 0.9, 8, dtype=torch.float64) * angle).requires_grad_()
    constant = torch.randn(8, 3, dtype=torch.complex128, requires_grad=True)
    layer = layer_of(Slow(), "fixed_point", Implicit("fixed_point"))
    z = layer((rate, constant))
    expected = constant / (1 - rate[:, None])
    torch.testing.assert_close(z, expected, atol=1e-10, rtol=1e-10)
    assert layer.last.steps.max() > 5 * layer.last.steps.min()
    found = torch.autograd.grad(z.abs().square().sum(), (rate, constant))
    for a, b in zip(
        found, torch.autograd.grad(expected.abs().square().sum(), (rate, constant)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("coupled", [False, True])
def test_complex_functions_are_solved(coupled: bool) -> None:
    torch.manual_seed(0)
    A, b = matrix(3, 3, 0.6).to(torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    solution = solve(
        lambda z: z @ A.T + b, torch.zeros_like(b), "anderson", coupled=coupled, trace=True
    )
    assert bool(solution.converged.all())
    assert solution.residual.dtype == torch.float32
    assert solution.trace.state[-1].dtype == torch.complex64
    expected = torch.linalg.solve(torch.eye(3) - A, b.mT).mT
    torch.testing.assert_close(solution.value, expected, atol=1e-3, rtol=1e-3)
    empty = solve(lambda z: z @ A.T, b[:0], coupled=coupled)
    assert empty.value.shape == (0, 3)


@pytest.mark.parametrize("name", CELLS)
def test_complex_spectrum_and_penalty_are_those_of_the_real_jacobian(name: str) -> None:
    cell, x = make(name, samples=1)
    z = layer_of(cell)(x.detach()) if name != "mixed" else None
    if z is None:
        layer = layer_of(cell)
        layer(x.detach())
        z = layer.last.value
    step = layer_of(cell).map(x.detach())
    leaves = list(z) if isinstance(z, tuple) else [z]
    pieces = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]

    def real_step(*parts: Tensor) -> Tensor:
        state = [
            torch.view_as_complex(part) if t.is_complex() else part
            for part, t in zip(parts, leaves, strict=True)
        ]
        value = step(tuple(state) if isinstance(z, tuple) else state[0])
        values = value if isinstance(value, tuple) else (value,)
        return torch.cat(
            [(torch.stack([v.real, v.imag], -1) if v.is_complex() else v).flatten() for v in values]
        )

    blocks = torch.autograd.functional.jacobian(real_step, tuple(pieces))
    jacobian = torch.cat([block.flatten(1) for block in blocks], dim=1)
    radius = torch.linalg.eigvals(jacobian).abs().max()
    torch.testing.assert_close(spectral_radius(step, z).value[0], radius)
    source = torch.Generator().manual_seed(0)
    penalty = frobenius_penalty(step, z, samples=1000, generator=source)
    expected = jacobian.square().sum() / len(jacobian)
    torch.testing.assert_close(penalty[0], expected, rtol=0.1, atol=0.0)


def test_complex_states_go_through_wrappers() -> None:
    cell, x = make("modulus")
    z = layer_of(cell)(x.detach())
    torch.testing.assert_close(layer_of(Skip(cell, 0.5))(x.detach()), z)
    Q = torch.randn(2, 2, dtype=torch.float64) + 3 * torch.eye(2, dtype=torch.float64)
    changed = ChangeOfVariable(cell, matrix=Q, shift=0.5)
    torch.testing.assert_close(changed.change(layer_of(changed, "newton")(x.detach())), z)


def test_regularized_refuses_a_complex_state() -> None:
    cell, x = make("modulus")
    sentence = "Regularized.cell must have a real state; got torch.complex128. Let its state be"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        layer_of(Regularized(cell, "l1"))(x)
