"""What every gradient strategy promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp

from equipoise.gradients.base import GRADIENTS, Gradient
from equipoise.layers.cell import Cell
from equipoise.layers.equilibrium import Equilibrium
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
from equipoise.testing.problems import contraction
from equipoise.testing.trees import bare, convert, leaves, rows

__all__ = ["as_function", "check_gradient", "unroll"]

STOP = Stop(tolerance=1e-13, max_steps=500)
NUMERICAL = {"eps": 3e-5, "atol": 1e-7, "rtol": 1e-7}
INEXACT = "it does not declare itself exact"
ITERATE = "Give the derivative of what attach returns, or set exact = False on the strategy."


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
    case = _Case(chosen, cells, solver)
    slow = () if second else ("second_derivatives_pass_finite_differences",)
    return run_checks("check_gradient", case.name, case, _CHECKS, skip=[*skip, *slow], seed=seed)


def unroll(cell: Cell, x: Any, steps: int = 1000, damping: float = 1.0) -> Any:
    """Return the equilibrium by plain iteration, recorded from the start.

    Args:
        cell: The cell.
        x: Its input.
        steps: Steps.
        damping: Fraction of the new value in each of them.
    """
    context = bare(cell.inject(x))
    z = cell.initial(x, context)
    for _ in range(steps):
        new = cell.step(z, context)
        z = new if damping == 1 else _mix(z, new, damping)
    return cell.readout(z, context)


def _mix(old: Any, new: Any, damping: float) -> Any:
    fresh = iter(leaves(new))
    return convert(old, lambda leaf: leaf + damping * (next(fresh) - leaf), lambda leaf: leaf)


def as_function(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a module as a function of its input and its parameters, in their order."""
    names = [name for name, _ in module.named_parameters()]

    def function(x: Any, *tensors: Tensor) -> Any:
        return functional_call(module, dict(zip(names, tensors, strict=True)), (x,))

    return function


@dataclasses.dataclass(frozen=True)
class _Case:
    gradient: Gradient
    cells: Mapping[str, Callable[[], Cell]]
    solver: str | Solver

    @property
    def name(self) -> str:
        return type(self.gradient).__name__

    def layer(self, cell: Cell, stop: Stop = STOP, solver: str | Solver | None = None) -> Any:
        chosen = self.solver if solver is None else solver
        return Equilibrium(cell, chosen, self.gradient, on_failure="ignore", stop=stop)

    def layers(self) -> Iterable[tuple[str, Any]]:
        for name, make in self.cells.items():
            yield f"the {name!r} cell", self.layer(make())


def _input(samples: int = 3) -> Tensor:
    return torch.randn(samples, 2, dtype=torch.float64, requires_grad=True)


def _copies_equal_the_original(case: _Case) -> str | None:
    return require_copies(case.gradient, case.name)


def _settings_are_validated(case: _Case) -> str | None:
    return require_settings(case.gradient, case.name)


def _value_and_status_are_true(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input().detach()
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


def _derivatives_pass_finite_differences(case: _Case) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        for forward in (False, True):
            _numerically(
                gradcheck,
                layer,
                case.name,
                f"{where} in {'forward' if forward else 'reverse'} mode",
                check_forward_ad=forward,
                check_backward_ad=not forward,
            )
    return None


def _second_derivatives_pass_finite_differences(case: _Case) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        _numerically(gradgradcheck, layer, case.name, f"{where}, second derivatives")
    return None


def _numerically(
    check: Callable[..., bool], layer: Equilibrium, name: str, where: str, **options: Any
) -> None:
    inputs = (_input(2), *layer.parameters())
    try:
        check(as_function(layer), inputs, **NUMERICAL, **options)
    except RuntimeError as error:
        sentence = " ".join(str(error).split())
        require(False, name, f"agree with finite differences on {where}", sentence[:300], ITERATE)


def _derivatives_are_those_of_a_long_unroll(case: _Case) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    reached = 0
    for where, layer in [*case.layers(), ("an easy cell", case.layer(_Wide(norm=0.4)))]:
        x = _input()
        wanted = [x, *layer.parameters()]
        z, long = layer(x), unroll(layer.cell, x)
        if not layer.last.converged.all():
            continue
        reached += 1
        g = torch.randn_like(z)
        require_close(
            torch.autograd.grad(z, wanted, g),
            torch.autograd.grad(long, wanted, g),
            1e-9,
            case.name,
            f"give the derivative of a long iteration on {where}",
            ITERATE,
        )
        if layer.last.adjoint is not None:
            require(
                layer.last.adjoint.converged,
                case.name,
                f"solve the adjoint equation of {where}",
                f"{layer.last.adjoint!r}",
            )
    return None if reached else "it reached no equilibrium to compare at"


def _transforms_are_those_of_a_long_unroll(case: _Case) -> str | None:
    if not case.gradient.exact:
        return INEXACT
    for where, layer in case.layers():
        x, t = torch.randn(2, 2, 2, dtype=torch.float64)
        layer(x)
        if not layer.last.converged.all():
            continue

        def slow(x: Tensor, cell: Cell = layer.cell) -> Any:
            return unroll(cell, x, 200)

        for found, expected in (
            (jvp(layer, (x,), (t,)), jvp(slow, (x,), (t,))),
            (jacrev(layer)(x), jacrev(slow)(x)),
            (jacfwd(layer)(x), jacrev(slow)(x)),
        ):
            require_close(found, expected, 1e-9, case.name, f"serve torch.func on {where}", ITERATE)
        fast, wanted = (hessian(lambda x, f=f: f(x).square().sum())(x[:1]) for f in (layer, slow))
        require_close(
            fast, wanted, 1e-8, case.name, f"give the second derivatives of {where}", ITERATE
        )
    return None


def _gradient_points_downhill(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input()
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


def _every_parameter_gets_a_gradient(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input()
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
        x = _input(2)
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


def _modes_agree(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input()
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


def _samples_are_independent(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input(5)
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


def _nan_is_passed_on(case: _Case) -> None:
    for where, layer in case.layers():
        x = _input()
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


class _Wide(Cell):
    """A contraction of width 8, whose adjoint no solver finishes in one step."""

    symmetric = True

    def __init__(self, norm: float = 0.7) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(contraction(12, 8, norm=norm))
        self.U = torch.nn.Parameter(torch.randn(12, 2, dtype=torch.float64))

    def inject(self, x: Tensor) -> Tensor:
        return x @ self.U.T

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return context.new_zeros(len(context), 8)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.nn.functional.softplus(z @ self.W.T + context) @ self.W

    def equilibrium(self, x: Tensor) -> Tensor:
        found: Tensor = unroll(self, x.detach())
        return found.detach()


def _failed_adjoint_is_never_zero(case: _Case) -> None:
    for cell in (_Expanding(), _Wide()):
        x = _input()
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
            require(
                not adjoint.converged.any(),
                case.name,
                "report an adjoint solve that was cut off after one step",
                f"{adjoint!r}",
            )


_CHECKS = (
    _copies_equal_the_original,
    _settings_are_validated,
    _value_and_status_are_true,
    _derivatives_pass_finite_differences,
    _second_derivatives_pass_finite_differences,
    _derivatives_are_those_of_a_long_unroll,
    _transforms_are_those_of_a_long_unroll,
    _gradient_points_downhill,
    _every_parameter_gets_a_gradient,
    _modes_agree,
    _samples_are_independent,
    _nan_is_passed_on,
    _failed_adjoint_is_never_zero,
)
