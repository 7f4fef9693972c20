"""What every gradient strategy promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from equipoise.gradients.base import GRADIENTS, Gradient
from equipoise.layers.cell import Cell
from equipoise.solvers import Solver, Status, Stop
from equipoise.testing.cells import CELLS
from equipoise.testing.contract import (
    Report,
    require,
    require_close,
    require_copies,
    require_settings,
    run_checks,
)
from equipoise.testing.gradient_case import GradientCase, WideCell, draw_input, unroll
from equipoise.testing.gradient_exact import EXACT_CHECKS
from equipoise.testing.trees import rows

__all__ = ["check_gradient"]


def check_gradient(
    gradient: str | Gradient,
    *,
    cells: Mapping[str, Callable[[], Cell]] = CELLS,
    solver: str | Solver = "auto",
    second: bool = True,
    skip: Iterable[str] = (),
    seed: int = 0,
) -> Report:
    """Raise `ContractError` unless a gradient strategy keeps every promise.

    A strategy that declares itself `exact` must pass finite differences in reverse and forward
    mode, first and second, and agree with back-propagation through a long iteration; any other must
    point downhill.

    Args:
        gradient: A gradient strategy, or the name of a registered one.
        cells: Functions that make the cells to try it on, by name, for inputs of two numbers in
            float64.
        solver: The forward solver.
        second: Whether to check second derivatives, which takes most of the time.
        skip: Names of checks to leave out.
        seed: Seed of weights and inputs.
    """
    chosen = GRADIENTS.resolve(gradient)
    case = GradientCase(chosen, cells, solver)
    slow = () if second else ("second_derivatives_pass_finite_differences",)
    return run_checks("check_gradient", case.name, case, _CHECKS, skip=[*skip, *slow], seed=seed)


def _copies_equal_the_original(case: GradientCase) -> str | None:
    return require_copies(case.gradient, case.name)


def _settings_are_validated(case: GradientCase) -> str | None:
    return require_settings(case.gradient, case.name)


def _value_and_status_are_true(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input().detach()
        z = layer(x)
        again = rows(layer.map(x)(layer.last.value)).detach()
        residual = (again - rows(layer.last.value)).norm(dim=1)
        require(
            torch.equal(layer.last.converged, residual <= 1e-14 + 1e-13 * again.norm(dim=1)),
            case.name,
            f"report how the solve of {where} ended",
            f"{layer.last!r}, whose recomputed residuals reach {float(residual.max()):.1e}",
            "Solve by plan.solve.",
        )
        if layer.last.converged.all():
            require_close(
                rows(z),
                rows(unroll(layer.cell, x)),
                1e-10,
                case.name,
                f"return the equilibrium of {where}",
            )


def _gradient_points_downhill(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input()
        wanted = [x, *layer.parameters()]
        z, long = layer(x), unroll(layer.cell, x)
        g = torch.randn_like(z)
        found, truth = (
            torch.cat([part.flatten() for part in torch.autograd.grad(value, wanted, g)])
            for value in (z, long)
        )
        cosine = float(torch.nn.functional.cosine_similarity(found, truth, dim=0))
        require(
            cosine > 0,
            case.name,
            f"give a direction of descent on {where}",
            f"a cosine of {cosine:.2g} with the true gradient",
            "Check the sign and the transposes.",
        )


def _every_parameter_gets_a_gradient(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input()
        torch.autograd.backward(layer(x).square().sum())
        for name, tensor in (("the input", x), *layer.named_parameters()):
            require(
                tensor.grad is not None and tensor.grad.abs().sum() > 0,
                case.name,
                f"reach every tensor that {where} depends on",
                f"no gradient for {name}",
                "Pass all args through plan.equation.bind.",
            )
        if not case.gradient.exact:
            continue
        x = draw_input(2)
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        layer.zero_grad()
        torch.autograd.backward(first.square().sum())
        for name, tensor in layer.named_parameters():
            require(
                tensor.grad is not None and tensor.grad.abs().sum() > 0,
                case.name,
                f"carry a gradient penalty to every parameter of {where}",
                f"no gradient for {name}",
                "Keep args attached to the graph in the backward pass.",
            )


def _modes_agree(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input()
        wanted = [x, *layer.parameters()]
        found = [
            torch.autograd.grad(layer.train(mode)(x).square().sum(), wanted)
            for mode in (True, False)
        ]
        require(
            all(torch.equal(a, b) for a, b in zip(*found, strict=True)),
            case.name,
            f"give one gradient in training and in evaluation on {where}",
            "two",
        )


def _samples_are_independent(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input(5)
        z = layer(x)
        g = torch.randn_like(z)
        (together,) = torch.autograd.grad(z, x, g)
        for i in range(5):
            one = x[i : i + 1].detach().requires_grad_()
            (alone,) = torch.autograd.grad(layer(one), one, g[i : i + 1])
            require_close(
                alone,
                together[i : i + 1],
                1e-9,
                case.name,
                f"differentiate each sample of {where} as if it were alone",
            )


def _nan_is_passed_on(case: GradientCase) -> None:
    for where, layer in case.layers():
        x = draw_input()
        z = layer(x)
        g = torch.ones_like(z)
        g[1] = torch.nan
        (found,) = torch.autograd.grad(z, x, g)
        adjoint = layer.last.adjoint
        (clean,) = torch.autograd.grad(layer(x), x, torch.ones_like(z))
        require(
            # A sample whose units are all off has no gradient for NaN to reach.
            (found[1].isnan().any() or not clean[1].any()) and not found[[0, 2]].isnan().any(),
            case.name,
            f"pass NaN on to the sample of {where} that met it, and to no other",
            f"{found.tolist()}",
            "Never replace a failed adjoint by zero.",
        )
        require_close(
            found[[0, 2]], clean[[0, 2]], 1e-10, case.name, f"keep the other samples of {where}"
        )
        if adjoint is not None:
            wanted = [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
            require(
                adjoint.status.tolist() == wanted,
                case.name,
                "report NaN in the adjoint solve as NONFINITE",
                f"{adjoint!r}",
            )


class _Expanding(Cell):
    """`z = A z + x` with eigenvalues 2 and 3: the first step of an adjoint solve moves away."""

    symmetric = True

    def __init__(self) -> None:
        super().__init__()
        basis = torch.linalg.qr(torch.randn(2, 2, dtype=torch.float64))[0]
        sizes = torch.tensor([2.0, 3.0], dtype=torch.float64)
        self.A = torch.nn.Parameter((basis * sizes) @ basis.mT)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return z @ self.A.T + context

    def equilibrium(self, x: Tensor) -> Tensor:
        inverse: Tensor = torch.linalg.inv(torch.eye(2, dtype=x.dtype) - self.A)
        return (x @ inverse.mT).detach()


def _failed_adjoint_is_never_zero(case: GradientCase) -> None:
    for cell in (_Expanding(), WideCell()):
        x = draw_input()
        # The forward solve starts where it ends, so that one step is enough for it alone.
        layer = case.layer(cell, Stop(tolerance=1e-10, max_steps=1))
        z = layer(x, cell.equilibrium(x))
        (grad,) = torch.autograd.grad(z.sum(), x)
        require(
            (grad.abs().sum(dim=1) > 0).all() | grad.isnan().any(),
            case.name,
            "never give a zero gradient for an adjoint solve that failed",
            f"{grad.tolist()}",
            "Give what it has reached, its first term, or NaN.",
        )
        adjoint = layer.last.adjoint
        if adjoint is not None:
            # Elimination needs one step; then the adjoint equation must hold.
            point, v = z.detach().requires_grad_(), adjoint.value
            (pulled,) = torch.autograd.grad(cell(point, cell.inject(x)), point, v)
            require(
                ((pulled + 1 - v).norm(dim=1) <= 1e-9 * v.norm(dim=1)) | ~adjoint.converged,
                case.name,
                "report an adjoint solve that was cut off after one step",
                f"{adjoint!r}",
            )


_CHECKS = (
    _copies_equal_the_original,
    _settings_are_validated,
    _value_and_status_are_true,
    *EXACT_CHECKS,
    _gradient_points_downhill,
    _every_parameter_gets_a_gradient,
    _modes_agree,
    _samples_are_independent,
    _nan_is_passed_on,
    _failed_adjoint_is_never_zero,
)
