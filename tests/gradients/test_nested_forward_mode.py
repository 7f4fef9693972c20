"""Forward mode in forward mode is refused where torch gets it wrong, and right elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cells import TanhCell, unroll
from torch import Tensor

from equipoise import Equilibrium, JacobianFree, Phantom, Unrolled, fixed_point, root

FLOAT = torch.float64
forward, reverse = torch.func.jacfwd, torch.func.jacrev
Function = Callable[[Tensor], Tensor]


def layer() -> Function:
    return Equilibrium(TanhCell(), tolerance=1e-12)


def function() -> Function:
    def solve(x: Tensor) -> Tensor:
        return fixed_point(lambda z, x: 0.5 * z.sin() + x, torch.zeros_like(x), x, tolerance=1e-12)

    return solve


def zero() -> Function:
    def solve(x: Tensor) -> Tensor:
        return root(lambda z, x: z**3 + z - x, torch.zeros_like(x), x, tolerance=1e-12)

    return solve


@pytest.mark.parametrize("make", [layer, function, zero])
def test_nested_forward_mode_is_refused(make: Callable[[], Function]) -> None:
    solve, x = make(), torch.randn(1, 3, dtype=FLOAT)

    def loss(x: Tensor) -> Tensor:
        return solve(x).sum()

    def derivative(x: Tensor) -> Tensor:
        return torch.func.jvp(loss, (x,), (torch.ones_like(x),))[1]

    for second in (forward(forward(loss)), forward(derivative), forward(reverse(forward(loss)))):
        with pytest.raises(ValueError, match=r"^Implicit must be in one forward-mode .*hessian"):
            second(x)


@pytest.mark.parametrize("make", [layer, function, zero])
def test_one_forward_mode_is_right_in_any_order(make: Callable[[], Function]) -> None:
    solve, x = make(), torch.randn(1, 3, dtype=FLOAT)

    def loss(x: Tensor) -> Tensor:
        return solve(x).sum()

    wanted = reverse(reverse(loss))(x)
    for second in (torch.func.hessian(loss), forward(reverse(loss)), reverse(forward(loss))):
        torch.testing.assert_close(second(x), wanted, rtol=1e-7, atol=1e-9)
    third = reverse(forward(reverse(loss)))(x)
    torch.testing.assert_close(third, reverse(reverse(reverse(loss)))(x), rtol=1e-6, atol=1e-8)


def test_forward_mode_elsewhere_does_not_matter() -> None:
    solve, x = layer(), torch.randn(1, 3, dtype=FLOAT)
    fixed = solve(x).detach()

    def loss(x: Tensor, at: Tensor) -> Tensor:
        return (x.square() * solve(at).sum()).sum()

    found = forward(forward(loss))(x, x.clone()).view(3, 3)
    torch.testing.assert_close(found, 2 * fixed.sum() * torch.eye(3, dtype=FLOAT))


@pytest.mark.parametrize("gradient", [Unrolled(60), Phantom(), JacobianFree()])
def test_recorded_steps_may_be_nested(gradient: Any) -> None:
    solve, x = Equilibrium(TanhCell(), gradient=gradient), torch.randn(1, 3, dtype=FLOAT)

    def loss(x: Tensor) -> Tensor:
        return solve(x).sum()

    torch.testing.assert_close(forward(forward(loss))(x), reverse(reverse(loss))(x))


def test_second_derivative_is_that_of_the_unrolled_loop() -> None:
    cell, x = TanhCell(), torch.randn(1, 3, dtype=FLOAT)
    found = torch.func.hessian(lambda x: Equilibrium(cell, tolerance=1e-12)(x).sum())(x)
    wanted = torch.autograd.functional.hessian(lambda x: unroll(cell, x, 200).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
