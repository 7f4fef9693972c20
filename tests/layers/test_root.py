"""Roots of plain functions: classical systems beside SciPy, honesty, and derivatives."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from cells import bounded
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from equipoise import (
    ConvergenceError,
    ConvergenceWarning,
    Implicit,
    JacobianFree,
    Status,
    Stop,
    root,
)

FLOAT = torch.float64
Problem = tuple[Callable[[Tensor], Tensor], list[float]]


# Moré, Garbow & Hillstrom (1981), on one vector


def rosenbrock(z: Tensor) -> Tensor:
    return torch.stack([1 - z[0], 10 * (z[1] - z[0] ** 2)])


def freudenstein_roth(z: Tensor) -> Tensor:
    x, y = z
    return torch.stack([-13 + x + ((5 - y) * y - 2) * y, -29 + x + ((y + 1) * y - 14) * y])


def powell_singular(z: Tensor) -> Tensor:
    a, b, c, d = z
    return torch.stack(
        [a + 10 * b, math.sqrt(5) * (c - d), (b - 2 * c) ** 2, math.sqrt(10) * (a - d) ** 2]
    )


def powell_badly_scaled(z: Tensor) -> Tensor:
    return torch.stack([1e4 * z[0] * z[1] - 1, (-z[0]).exp() + (-z[1]).exp() - 1.0001])


def helical_valley(z: Tensor) -> Tensor:
    angle = torch.atan2(z[1], z[0]) / (2 * math.pi)
    radius = z[:2].square().sum().sqrt()
    return torch.stack([10 * (z[2] - 10 * angle), 10 * (radius - 1), z[2]])


def trigonometric(z: Tensor) -> Tensor:
    i = torch.arange(1, len(z) + 1, dtype=z.dtype)
    return len(z) - z.cos().sum() + i * (1 - z.cos()) - z.sin()


def brown_almost_linear(z: Tensor) -> Tensor:
    return torch.cat([z[:-1] + z.sum() - (len(z) + 1), z.prod()[None] - 1])


def boundary_value(z: Tensor) -> Tensor:
    h = 1 / (len(z) + 1)
    t = h * torch.arange(1, len(z) + 1, dtype=z.dtype)
    padded = nn.functional.pad(z, (1, 1))
    return 2 * z - padded[:-2] - padded[2:] + h**2 * (z + t + 1) ** 3 / 2


def integral_equation(z: Tensor) -> Tensor:
    h = 1 / (len(z) + 1)
    t = h * torch.arange(1, len(z) + 1, dtype=z.dtype)
    kernel = torch.minimum(t[:, None], t) * (1 - torch.maximum(t[:, None], t))
    return z + h * kernel @ (z + t + 1) ** 3 / 2


def broyden_tridiagonal(z: Tensor) -> Tensor:
    padded = nn.functional.pad(z, (1, 1))
    return (3 - 2 * z) * z - padded[:-2] - 2 * padded[2:] + 1


def broyden_banded(z: Tensor) -> Tensor:
    index = torch.arange(len(z))
    near = (index[:, None] - index <= 5) & (index[:, None] - index >= -1)
    near &= index[:, None] != index
    return z * (2 + 5 * z**2) + 1 - near.to(z.dtype) @ (z * (1 + z))


def bratu(z: Tensor) -> Tensor:
    h = 1 / (len(z) + 1)
    padded = nn.functional.pad(z, (1, 1))
    return 2 * z - padded[:-2] - padded[2:] - h**2 * 2 * z.exp()


def chandrasekhar(z: Tensor) -> Tensor:
    mu = (torch.arange(len(z), dtype=z.dtype) + 0.5) / len(z)
    kernel = mu[:, None] / (mu[:, None] + mu) / (2 * len(z))
    return z - 1 / (1 - 0.9 * kernel @ z)


CLASSICAL: dict[str, Problem] = {
    "Rosenbrock": (rosenbrock, [-1.2, 1.0]),
    "Freudenstein and Roth": (freudenstein_roth, [6.0, 5.0]),
    "Powell, badly scaled": (powell_badly_scaled, [0.0, 1.0]),
    "helical valley": (helical_valley, [-1.0, 0.0, 0.0]),
    "trigonometric": (trigonometric, [0.25] * 4),
    "Brown, almost linear": (brown_almost_linear, [0.5] * 10),
    "boundary value": (boundary_value, [0.1 * i / 11 * (i / 11 - 1) for i in range(1, 11)]),
    "integral equation": (integral_equation, [i / 11 * (i / 11 - 1) for i in range(1, 11)]),
    "Broyden, tridiagonal": (broyden_tridiagonal, [-1.0] * 10),
    "Broyden, banded": (broyden_banded, [-1.0] * 10),
    "Bratu": (bratu, [0.0] * 20),
    "Chandrasekhar": (chandrasekhar, [1.0] * 20),
}


def newton_exact(function: Callable[[Tensor], Tensor], z: Tensor, steps: int = 20) -> Tensor:
    """The root beside `z`, by dense Newton steps."""
    for _ in range(steps):
        z = z - torch.linalg.solve(torch.func.jacrev(function)(z), function(z))
    return z


@pytest.mark.parametrize("name", CLASSICAL)
def test_classical_root_is_a_root_and_that_of_scipy_where_it_is_one(name: str) -> None:
    function, start = CLASSICAL[name]
    z0 = torch.tensor(start, dtype=FLOAT)
    found = root(function, z0, coupled=True, tolerance=1e-10, max_steps=300, return_solution=True)
    assert found.status.tolist() == [Status.CONVERGED], repr(found)
    z = found.value
    torch.testing.assert_close(z, newton_exact(function, z, 3), rtol=1e-7, atol=1e-9)
    theirs = scipy.optimize.root(
        lambda v: function(torch.from_numpy(v)).numpy(), np.array(start), tol=1e-12
    )
    if theirs.success:
        beside = newton_exact(function, torch.from_numpy(theirs.x), 3)
        scale = beside.norm()
        # A system may have several roots; ours must be one of them, and is theirs in these.
        if name not in ("trigonometric", "Brown, almost linear"):
            assert (z - beside).norm() <= 1e-6 * scale


def test_singular_root_is_found_or_reported() -> None:
    found = root(
        powell_singular,
        torch.tensor([3.0, -1.0, 0.0, 1.0], dtype=FLOAT),
        coupled=True,
        on_failure="ignore",
        return_solution=True,
    )
    if found.status[0] == Status.CONVERGED:
        assert found.value.norm() <= 1e-6
    assert found.value.norm() < 0.1


@pytest.mark.parametrize("solver", ["newton", "broyden", "anderson", "auto"])
def test_rows_are_problems_of_their_own(solver: str) -> None:
    a = torch.tensor([[2.0, 3.0], [5.0, 7.0], [1e6, 1e-6]], dtype=FLOAT)
    z = root(lambda z, a: z**2 - a, torch.ones(3, 2, dtype=FLOAT) + a / 2, a, solver=solver,
             tolerance=1e-8)  # fmt: skip
    torch.testing.assert_close(z[:2], a[:2].sqrt(), rtol=1e-7, atol=0)
    torch.testing.assert_close(z[2, 0], a[2, 0].sqrt(), rtol=1e-7, atol=0)


# honesty


@pytest.mark.parametrize("solver", ["newton", "broyden"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-6, 1e-3, 1e3, 1e6, 1e12, 1e30])
def test_root_does_not_depend_on_the_scale_of_the_function(scale: float, solver: str) -> None:
    function, start = CLASSICAL["Broyden, tridiagonal"]
    z0 = torch.tensor(start, dtype=FLOAT)
    plain, scaled = (
        root(lambda z, s=s: s * function(z), z0, coupled=True, solver=solver, return_solution=True)
        for s in (1.0, scale)
    )
    assert plain.converged.all()
    assert scaled.converged.all()
    torch.testing.assert_close(scaled.value, plain.value, rtol=1e-6, atol=0)
    assert torch.equal(scaled.steps, plain.steps)


def test_root_does_not_depend_on_the_scale_of_the_state() -> None:
    for scale in (1e-12, 1e-3, 1e3, 1e12):
        z = root(lambda z, s=scale: (z / s) ** 3 - 2, torch.full((1,), scale, dtype=FLOAT))
        torch.testing.assert_close(z / scale, torch.full((1,), 2 ** (1 / 3), dtype=FLOAT),
                                   rtol=2e-4, atol=0)  # fmt: skip


@pytest.mark.parametrize("start", [-5.0, 1.0, 20.0, 60.0])
def test_root_far_from_the_start_is_not_called_early(start: float) -> None:
    z = root(lambda z: z.exp() - 2, torch.full((1,), start, dtype=FLOAT), max_steps=200)
    torch.testing.assert_close(z, torch.full((1,), math.log(2), dtype=FLOAT), rtol=2e-4, atol=0)


@pytest.mark.parametrize(
    ("function", "start"),
    [
        (lambda z: z**2 + 1, 1.3),  # no root
        (lambda z: 1 / (z - 1), 1.00001),  # a pole, where Newton's steps are short
        (lambda z: (z - 1) ** -3, 1.00001),
        (lambda z: (-z).exp(), 1.0),  # a root at infinity
        (lambda z: 1e-9 * (z**2 + 1), 1.3),
        (lambda z: torch.where(z > 1, z, z - 3), 0.0),  # a jump
    ],
)
def test_what_is_no_root_is_never_called_one(function: Any, start: float) -> None:
    z0 = torch.tensor([start], dtype=FLOAT)
    found = root(function, z0, on_failure="ignore", return_solution=True)
    assert found.status[0] != Status.CONVERGED
    with pytest.raises(ConvergenceError, match=r"^root: 1 of 1 samples"):
        root(function, z0, on_failure="raise")
    with pytest.warns(ConvergenceWarning):
        root(function, z0)


@pytest.mark.parametrize("start", [3.0, 1e-3, 1e6])
def test_root_at_zero_converges(start: float) -> None:
    found = root(lambda z: z * (1 + z**2), torch.tensor([start], dtype=FLOAT), return_solution=True)
    assert found.converged.all()
    assert found.value.abs() <= 1e-12 * start
    assert found.residual <= 1e-4
    exact = root(lambda z: z - 2, torch.tensor([2.0], dtype=FLOAT), return_solution=True)
    assert exact.converged.all()
    assert exact.steps == 0


def test_random_polynomials_never_give_a_false_root() -> None:
    false = 0
    converged = 0
    for degree in (2, 3, 4, 5):
        coefficients = torch.randn(40, degree + 1, dtype=FLOAT)

        def polynomial(z: Tensor, c: Tensor) -> Tensor:
            powers = torch.stack([z**k for k in range(c.shape[1])], dim=-1)
            return (powers * c).sum(-1)

        found = root(
            polynomial, torch.randn(40, dtype=FLOAT) * 3, coefficients, on_failure="ignore",
            return_solution=True,
        )  # fmt: skip
        for z, c, status in zip(found.value, coefficients, found.status, strict=True):
            if status == Status.CONVERGED:
                converged += 1
                roots = np.roots(c.numpy()[::-1])
                nearest = np.abs(roots - z.item()).min()
                false += nearest > 2e-3 * max(abs(z.item()), 1e-3)
    assert false == 0
    assert converged > 80


@pytest.mark.parametrize("solver", ["newton", "broyden"])
@pytest.mark.parametrize(
    ("function", "start", "dtype"),
    [
        (lambda z: torch.sigmoid(z) - 0.2, 50.0, torch.float32),
        (lambda z: torch.sigmoid(z) - 0.2, 10.0, torch.float32),
        (lambda z: 0 * z + 1, 1e9, torch.float32),
        (lambda z: 0 * z + 1, 1e17, FLOAT),
        (lambda z: torch.tanh(z) + 0.5, 1e8, torch.float32),
        (lambda z: torch.tanh(z) - 0.5, 1e18, FLOAT),
        (lambda z: (z - 1) / (z - 1.001), 2.0, torch.float32),  # tends to 1
    ],
)
def test_small_steps_of_a_large_state_are_no_root(
    function: Any, start: float, dtype: torch.dtype, solver: str
) -> None:
    z0 = torch.tensor([start], dtype=dtype)
    found = root(function, z0, solver=solver, on_failure="ignore", return_solution=True)
    assert not found.converged.any() or function(found.value).abs() <= 1e-3


@pytest.mark.parametrize("solver", ["newton", "broyden"])
@pytest.mark.parametrize(
    ("square", "start", "dtype"),
    [
        (1e-6, 1e4, torch.float32),
        (1e-6, 1e6, torch.float32),
        (1e-20, 1e8, FLOAT),
        (-1e-12, 1e3, torch.float32),  # no root
    ],
)
def test_root_much_smaller_than_the_start_is_found_relative_to_itself(
    square: float, start: float, dtype: torch.dtype, solver: str
) -> None:
    found = root(
        lambda z: z**2 - square, torch.tensor([start], dtype=dtype), solver=solver,
        tolerance=1e-6, on_failure="ignore", return_solution=True,
    )  # fmt: skip
    assert found.converged.item() is (square > 0)
    if square > 0:
        wanted = torch.full_like(found.value, math.sqrt(square))
        torch.testing.assert_close(found.value.abs(), wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("norm", ["leaf", "element"])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_large_leaf_does_not_hide_a_small_one(dtype: torch.dtype, norm: Any) -> None:
    found = root(
        lambda z: {"a": z["a"] - 1e6, "b": z["b"] ** 2 - 1e-6},
        {"a": torch.full((1,), 1e6, dtype=dtype), "b": torch.ones(1, dtype=dtype)},
        stop=Stop(1e-5, norm=norm),
        return_solution=True,
    )
    assert found.converged.all()
    torch.testing.assert_close(
        found.value["b"], torch.full((1,), 1e-3, dtype=dtype), rtol=2e-5, atol=0
    )


def test_element_that_is_zero_beside_others_converges() -> None:
    matrix = torch.tensor([[1.0, 0.3], [0.1, 3.0]])
    found = root(
        lambda z: z @ matrix.T - matrix[:, 0],
        torch.tensor([[5.0, 2.0]]),
        stop=Stop(norm="element"),
        return_solution=True,
    )
    assert found.converged.all()
    torch.testing.assert_close(found.value, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("start", [1.000004, 1.0000001, 1.00001])
@pytest.mark.parametrize("power", [1, 2, 3, 0.5])
def test_poles_in_single_precision_are_no_roots(power: float, start: float) -> None:
    z0 = torch.tensor([start])
    found = root(lambda z: (z - 1).abs() ** -power, z0, on_failure="ignore", return_solution=True)
    assert not found.converged.any()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
def test_least_value_that_is_not_zero_is_no_root(dtype: torch.dtype) -> None:
    centre, above = torch.tensor(197.0, dtype=dtype), torch.logspace(-6, -3, 40, dtype=dtype)
    found = root(
        lambda z: (z - centre) ** 2 + above, torch.full((40,), 1e4, dtype=dtype),
        on_failure="ignore", return_solution=True,
    )  # fmt: skip
    # Complex roots are nearer to the real numbers than a sixteenth of the tolerance, or none is.
    assert (above.sqrt()[found.converged] <= 1e-4 * 197 / 16).all()


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT])
@pytest.mark.parametrize("power", [2, 3])
@pytest.mark.parametrize("start", [3.0, 1e-3, 1e6])
def test_multiple_root_at_zero_is_zero(power: int, start: float, dtype: torch.dtype) -> None:
    z0 = torch.tensor([start], dtype=dtype)
    found = root(lambda z: z**power, z0, return_solution=True)
    assert found.converged.all()
    assert found.value == 0
    assert found.residual == 0


def test_random_functions_never_give_a_false_root() -> None:
    """The witness: a change of sign near the root, where `|g|` is small, or a value of zero."""
    generator = np.random.default_rng(0)
    converged = 0
    for dtype in (torch.float32, FLOAT):
        count = 20

        def spread(low: int, high: int, count: int = count) -> Tensor:
            sizes = 10 ** generator.uniform(low, high, count)
            return torch.from_numpy(generator.normal(size=count) * sizes)

        a, b, start = spread(-3, 3), spread(-3, 3), spread(-8, 8)
        near = b * (1 + torch.from_numpy(10 ** generator.uniform(-9, -2, count)))
        functions: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
            lambda z, a, b: torch.sigmoid(a * (z - b)) - 0.3,
            lambda z, a, b: torch.tanh(a * z + b) - 0.5,
            lambda z, a, b: (z - a) / (z - b),
            lambda z, a, b: a / (z - b) ** 2,
            lambda z, a, b: z**3 - a * z + b,
        ]
        for function in functions:
            for z0 in (start, near):
                z = root(
                    function, z0.to(dtype), a.to(dtype), b.to(dtype), on_failure="ignore",
                    return_solution=True,
                )  # fmt: skip
                at = z.value.double()[z.converged]
                p, q = (own.to(dtype).double()[z.converged] for own in (a, b))
                around = at + 4e-4 * at.abs() * torch.linspace(-1, 1, 2001, dtype=FLOAT)[:, None]
                g = function(around, p, q)
                crossing = (g[1:].sign() != g[:-1].sign()) & (
                    torch.minimum(g[1:].abs(), g[:-1].abs())
                    <= torch.minimum(g[0].abs(), g[-1].abs())
                )
                zero = function(z.value, a.to(dtype), b.to(dtype))[z.converged] == 0
                assert (crossing.any(dim=0) | zero).all()
                converged += int(z.converged.sum())
    assert converged > 60


# derivatives


def quadratic(z: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return z @ A.T + 0.1 * z**3 - b


@pytest.fixture
def system() -> tuple[Tensor, Tensor, Tensor]:
    A = (torch.eye(3, dtype=FLOAT) + bounded(3, 3, 0.4)).requires_grad_()
    b = torch.randn(4, 3, dtype=FLOAT, requires_grad=True)
    return torch.zeros(4, 3, dtype=FLOAT), A, b


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_derivatives_are_those_of_the_implicit_function_theorem(
    scale: float, system: tuple[Tensor, ...]
) -> None:
    z0, A, b = system
    z = root(lambda z, A, b: scale * quadratic(z, A, b), z0, A, b, tolerance=1e-12)
    g = torch.randn_like(z)
    found = torch.autograd.grad(z, [A, b], g)
    at = z.detach()
    J = A.detach() + torch.diag_embed(0.3 * at**2)
    v = torch.linalg.solve(J.mT, g)  # dz = -J^-1 (dA z - db)
    wanted = -v.T @ at, v
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


def test_derivatives_agree_with_finite_differences(system: tuple[Tensor, ...]) -> None:
    z0, A, b = (tensor.detach()[:2, :2].clone() for tensor in system)
    A.requires_grad_(), b.requires_grad_()

    def call(A: Tensor, b: Tensor) -> Tensor:
        return root(quadratic, z0, A, b, tolerance=1e-12)

    assert gradcheck(call, (A, b), check_forward_ad=True)
    assert gradgradcheck(call, (A, b))


def test_root_works_under_transforms(system: tuple[Tensor, ...]) -> None:
    z0, A, b = (tensor.detach() for tensor in system)

    def call(b: Tensor) -> Tensor:
        return root(quadratic, z0[:1], A, b[None], tolerance=1e-12)[0]

    J = A + torch.diag_embed(0.3 * root(quadratic, z0, A, b, tolerance=1e-12) ** 2)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(
            torch.func.vmap(transform(call))(b), torch.linalg.inv(J), rtol=1e-8, atol=1e-9
        )
    several = torch.func.vmap(lambda s: root(quadratic, z0, s * A, b, tolerance=1e-12))(
        torch.tensor([1.0, 2.0], dtype=FLOAT)
    )
    torch.testing.assert_close(several[1], root(quadratic, z0, 2 * A, b, tolerance=1e-12))


def test_parameters_of_a_module_get_gradients_and_closures_are_refused(
    system: tuple[Tensor, ...],
) -> None:
    z0, A, b = system

    class Law(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A = nn.Parameter(A.detach().clone())

        def forward(self, z: Tensor, b: Tensor) -> Tensor:
            return quadratic(z, self.A, b)

    law = Law()
    root(law, z0, b, tolerance=1e-12).sum().backward()
    (wanted,) = torch.autograd.grad(root(quadratic, z0, A, b, tolerance=1e-12).sum(), A)
    torch.testing.assert_close(law.A.grad, wanted)
    with pytest.raises(ValueError, match=r"root\.f must get .* that it closes over"):
        root(lambda z: quadratic(z, A, b.detach()), z0)


@pytest.mark.parametrize("function", [lambda z, a: (z - a) ** 2, lambda z, a: z**3 - a])
def test_root_without_a_derivative_says_so(function: Any) -> None:
    a = torch.zeros(1, dtype=FLOAT, requires_grad=True)
    z = root(function, torch.full((1,), 3.0, dtype=FLOAT), a)
    with pytest.warns(ConvergenceWarning, match="the Jacobian of g is singular"):
        z.sum().backward()


def test_solution_gets_its_adjoint(system: tuple[Tensor, ...]) -> None:
    solution = root(quadratic, *system, return_solution=True)
    assert solution.adjoint is None
    solution.value.sum().backward()
    assert solution.adjoint.converged.all()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda z: root(lambda z: z[:, :1], z), r"root\.g must return the tree and the shapes"),
        (lambda z: root(lambda z: (z, z), z), r"root\.g must return the tree and the shapes"),
        (lambda z: root(torch.tanh, z, gradient=JacobianFree()), r"be 'implicit' or an Implicit"),
        (lambda z: root(torch.tanh, z, solver="newtn"), r"Did you mean 'newton'\?"),
        (lambda z: root(lambda z: z.float(), z), r"root\.g must keep the dtype and the device"),
        (lambda z: root(None, z), r"root\.f must be a function; got NoneType"),
        (lambda _: root(torch.tanh, "zero"), r"The state must be a tensor"),
    ],
)
def test_bad_calls_are_told_in_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(torch.ones(4, 3, dtype=FLOAT))


def test_settings_of_the_adjoint_are_used(system: tuple[Tensor, ...]) -> None:
    solution = root(
        quadratic, *system, gradient=Implicit("bicgstab", tolerance=1e-9), return_solution=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution.value.sum().backward()
    assert solution.adjoint.residual.max() <= 1e-9


def test_empty_batch_has_no_roots() -> None:
    assert root(torch.tanh, torch.zeros(0, 3)).shape == (0, 3)


def test_entries_that_depend_on_each_other_are_not_solved_apart() -> None:
    function, start = CLASSICAL["Chandrasekhar"]
    for solver in ("newton", "broyden", "anderson"):
        try:
            found = root(
                function,
                torch.tensor(start, dtype=FLOAT),
                solver=solver,
                on_failure="ignore",
                return_solution=True,
            )
        except ValueError as error:
            assert "root.coupled must be True" in str(error)  # noqa: PT017  either is honest
        else:
            exact = newton_exact(function, found.value)
            assert ((found.value - exact).abs() <= 1e-3 * exact.abs())[found.converged].all()


def test_trees_and_complex_states_have_roots() -> None:
    a = torch.tensor([2.0, 3.0], dtype=FLOAT, requires_grad=True)
    z = root(
        lambda z, a: {"x": z["x"] ** 2 + z["y"] - a, "y": z["y"] - z["x"]},
        {"x": torch.ones(2, dtype=FLOAT), "y": torch.ones(2, dtype=FLOAT)},
        a,
        tolerance=1e-12,
    )
    exact = ((1 + 4 * a).sqrt() - 1) / 2
    torch.testing.assert_close(z["x"], exact)
    torch.testing.assert_close(
        torch.autograd.grad(z["y"].sum(), a), torch.autograd.grad(exact.sum(), a)
    )
    c = torch.tensor([[1 + 1j, 2 - 3j]], dtype=torch.complex128, requires_grad=True)
    w = root(lambda z, c: z**2 - c, torch.ones_like(c) + 0.3j, c, tolerance=1e-12)
    torch.testing.assert_close(w, c.sqrt())
    torch.testing.assert_close(
        torch.autograd.grad(w.abs().sum(), c), torch.autograd.grad(c.sqrt().abs().sum(), c)
    )


def test_equations_of_very_different_scales_are_solved() -> None:
    generator = torch.Generator().manual_seed(0)
    A = torch.eye(3, dtype=FLOAT) + 0.1 * torch.randn(20, 3, 3, dtype=FLOAT, generator=generator)
    scales = torch.tensor([1e-6, 1.0, 1e6], dtype=FLOAT)
    b = torch.ones(20, 3, dtype=FLOAT)

    def system(z: Tensor, A: Tensor, b: Tensor) -> Tensor:
        return scales * (torch.einsum("bij,bj->bi", A, z) + z**3 - b)

    found = root(system, torch.zeros(20, 3, dtype=FLOAT), A, b, return_solution=True)
    assert found.converged.all()
    back = torch.einsum("bij,bj->bi", A, found.value) + found.value**3
    torch.testing.assert_close(back, b, rtol=1e-3, atol=1e-3)
