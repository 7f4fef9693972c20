"""Whether what a cell says of itself is true."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.layers.certificate import Certificate
from equipoise.layers.declarations import contributions_of, part_weights_of
from equipoise.layers.problem import Minimization
from equipoise.solvers import FixedPoint, Stop
from equipoise.testing.cell_case import CellCase
from equipoise.testing.contract import require, require_close
from equipoise.testing.trees import bare, leaves, pick

__all__ = ["DECLARATION_CHECKS"]

DENSE = 64
"""States of at most this many numbers are checked by their whole Jacobian."""


def _jacobians(case: CellCase) -> Iterable[Tensor]:
    """The Jacobian in the state of one row, at several points, if the state is small."""
    for z in case.points():
        row = z[:1]
        context = case.bare if case.cell.coupled else bare(pick(case.context, slice(0, 1)))

        def step(z: Tensor, context: Any = context) -> Tensor:
            return case.layout.pack(case.cell.step(case.layout.unpack(z), context))

        yield torch.func.jacrev(step)(row).detach().reshape(row.shape[1], row.shape[1])


def _products(case: CellCase, z: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[..., Any]]:
    def push(v: Tensor) -> Tensor:
        pushed: Tensor = torch.func.jvp(case.flat_step, (z,), (v,))[1]
        return pushed.detach()

    return push, torch.func.vjp(case.flat_step, z)[1]


def _declared_symmetry_holds(case: CellCase) -> str | None:
    if not case.cell.symmetric:
        return "the cell does not declare it"
    remedy = "Set symmetric = False, or write the step as the gradient of a convex function."
    if case.layout.width <= DENSE:
        for J in _jacobians(case):
            unit = max(1.0, float(J.abs().max()))
            gap, lowest = float((J - J.mT).abs().max()), float(torch.linalg.eigvalsh(J)[0])
            require(
                gap <= 1e-10 * unit,
                f"{case.name}.symmetric",
                "be True only if the Jacobian of step in the state is symmetric",
                f"entries that differ by {gap:.1e}",
                remedy,
            )
            require(
                lowest >= -1e-10 * unit,
                f"{case.name}.symmetric",
                "be True only if the Jacobian of step in the state is positive semidefinite",
                f"the eigenvalue {lowest:.3g}",
                remedy,
            )
        return None
    for z in case.points():
        push, pull = _products(case, z)
        for _ in range(4):
            v = torch.nn.functional.normalize(torch.randn_like(z), dim=1)
            there, back = push(v), pull(v)[0].detach()
            require_close(
                there,
                back,
                1e-9,
                f"{case.name}.symmetric",
                "be True only if the Jacobian of step in the state is symmetric",
                remedy,
            )
            lowest = float((v * there).sum(dim=1).min())
            require(
                lowest >= -1e-10,
                f"{case.name}.symmetric",
                "be True only if the Jacobian of step in the state is positive semidefinite",
                f"a direction with <v, J v> = {lowest:.3g}",
                remedy,
            )
    return None


def _declared_lipschitz_bound_holds(case: CellCase) -> str | None:
    declared = case.cell.lipschitz()
    if declared is None:
        return "the cell declares none"
    bound = float(declared.detach() if isinstance(declared, Tensor) else declared)
    _require_bound(case, bound, f"{case.name}.lipschitz", "bound the Lipschitz constant of step")
    return None


def _require_bound(case: CellCase, bound: float, subject: str, rule: str) -> None:
    """Raise if the step expands by more than `bound` between any two of some random states."""
    require(bound >= 0, subject, f"{rule} by a number of at least 0", f"{bound}")
    largest = 0.0
    with torch.no_grad():
        for z in case.points():
            for scale in (1e-4, 0.1, 1.0, 10.0):
                other = z + scale * torch.randn_like(z)
                moved = (case.flat_step(other) - case.flat_step(z)).norm(dim=1)
                largest = max(largest, float((moved / (other - z).norm(dim=1)).max()))
    if case.layout.width <= DENSE:
        norms = [float(torch.linalg.matrix_norm(J, 2)) for J in _jacobians(case)]
        largest = max(largest, *norms)
    else:
        for z in case.points():
            push, pull = _products(case, z)
            v = torch.randn_like(z)
            for _ in range(10):  # the power method approaches the norm from below
                v = torch.nn.functional.normalize(pull(push(v))[0].detach(), dim=1)
            largest = max(largest, float(push(v).norm(dim=1).max()))
    require(
        largest <= bound * (1 + 1e-7) + 1e-9,
        subject,
        f"{rule} from above",
        f"{bound:.6g} where the step expands by {largest:.6g}",
        "Return a proven bound, or None.",
    )


def _linearization_is_autograds(case: CellCase) -> str | None:
    cell = case.cell
    for point in case.points():
        z = case.layout.unpack(point)
        with torch.no_grad():
            local = cell.linearize(z, case.bare)
        if local is None:
            return "it is left to autograd"
        v = torch.randn_like(point)
        push, pull = _products(case, point)
        wanted = {"value": case.flat_step(point), "jvp": push(v), "vjp": pull(v)[0]}
        parts: list[tuple[Any, Any]] = [(local, slice(None))]
        if local.select_rows is not None and not cell.coupled:
            last = len(point) - 1
            parts.append((local.select_rows(torch.tensor([last])), slice(last, last + 1)))
        for part, index in parts:
            state = case.layout.unpack(v[index] if not cell.coupled else v)
            found = {"value": part.value, "jvp": part.jvp(state), "vjp": part.vjp(state)}
            for name, value in found.items():
                some = "" if index == slice(None) else " after select_rows"
                require_close(
                    case.layout.pack(value, "linearize"),
                    wanted[name][index],
                    1e-9,
                    f"{case.name}.linearize",
                    f"give autograd's {name}{some}",
                )
    if cell.linearize_keeps_graph:
        _require_graph(case)
    return None


def _require_graph(case: CellCase) -> None:
    """Raise unless the value that `linearize` records has the history of the step."""
    cell = case.cell
    context = bare(cell.inject(case.x))
    z = case.layout.unpack(case.points()[-1])
    local = cell.linearize(z, context)
    recorded = None if local is None else local.graph
    rule = "give graph, the value with its history down to context and weights"
    require(
        recorded is not None and recorded.requires_grad,
        f"{case.name}.linearize",
        f"{rule}, when gradients are enabled",
        "no graph",
        "Set linearize_keeps_graph = False, or return the recorded value.",
    )
    assert recorded is not None
    value = cell.step(z, context)
    g = [torch.randn_like(leaf) for leaf in leaves(value)]
    tensors = [tensor for tensor in cell.parameters() if tensor.requires_grad]
    found, wanted = (
        torch.autograd.grad(
            leaves(tree), tensors, g, allow_unused=True, materialize_grads=True, retain_graph=True
        )
        for tree in (recorded, value)
    )
    require_close(found, wanted, 1e-9, f"{case.name}.linearize", rule)


def _certificate_is_true(case: CellCase) -> str | None:
    certificate: object = case.cell.certificate()
    require(
        isinstance(certificate, Certificate),
        f"{case.name}.certificate",
        "return a Certificate",
        type(certificate).__name__,
    )
    assert isinstance(certificate, Certificate)
    if certificate.lipschitz == math.inf:
        return "it certifies no Lipschitz constant"
    _require_bound(
        case, certificate.lipschitz, f"{case.name}.certificate", "bound the Lipschitz constant"
    )
    if not certificate.contracts:
        return None
    layer = case.layer(case.cell)
    with torch.no_grad():
        layer(case.x)
        assert layer.last is not None
        end = case.layout.pack(layer.last.value)
        for z in case.points():
            residual = (case.flat_step(z) - z).norm(dim=1)
            apart = (z - end).norm(dim=1)
            excess = float((apart / certificate.error(residual).clamp_min(1e-12)).max())
            require(
                excess <= 1 + 1e-6,
                f"{case.name}.certificate",
                "bound the distance to the equilibrium by certificate.error",
                f"a distance of {excess:.3g} times the bound",
                "A certificate that contracts promises one equilibrium for every input.",
            )
    return None


def _norms_are_numbers(case: CellCase) -> None:
    norms = case.cell.norms()
    require(
        isinstance(norms, dict)
        and all(isinstance(name, str) for name in norms)
        and all(isinstance(norm, float) and norm >= 0 for norm in norms.values()),
        f"{case.name}.norms",
        "return numbers of at least 0 by name",
        f"{norms}",
        "Convert tensors by float(...).",
    )


def _contributions_belong_to_parts(case: CellCase) -> None:
    weights = part_weights_of(case.cell)
    own = {id(weight) for weight in case.cell.parameters()}
    require(
        all(id(weight) in own for part in weights.values() for weight in part),
        f"{case.name}.part_weights",
        "return parameters of the cell",
        "other tensors",
    )
    with torch.no_grad():
        z = case.layout.unpack(case.points()[-1])
        found = contributions_of(case.cell, z, case.bare)
    require(
        found.keys() <= weights.keys() and all(value >= 0 for value in found.values()),
        f"{case.name}.contributions",
        "return numbers of at least 0 by the names of part_weights",
        f"{found}",
    )


def _projection_keeps_its_promise(case: CellCase) -> str | None:
    if not case.cell.projects:
        return "the cell does not project"
    cell = copy.deepcopy(case.cell)
    cell.project_()
    held = cell.certificate().holds
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(10)
    cell.project_()
    require(
        cell.certificate().holds or not held,
        f"{case.name}.project_",
        "bring weights of any size back to where the certificate holds",
        f"after a tenfold growth: {cell.certificate()}".replace("\n", " "),
        "Project onto the set that certificate() asks for.",
    )
    before = [parameter.detach().clone() for parameter in cell.parameters()]
    cell.project_()
    require_close(
        list(cell.parameters()),
        before,
        1e-6,
        f"{case.name}.project_",
        "leave weights alone that it has projected",
        "A projection is idempotent.",
    )
    return None


def _problem_is_solved_by_the_equilibrium(case: CellCase) -> str | None:
    try:
        problem = case.cell.problem(case.x)
    except ValueError as error:
        return str(error).rstrip(".")
    require(
        isinstance(problem.describe(), str) and problem.describe(),
        f"{case.name}.problem",
        "describe itself in sentences",
        f"{problem.describe()!r}",
    )
    layer = case.layer(case.cell, Stop(tolerance=1e-10, max_steps=300))
    layer.solver = FixedPoint()
    with torch.no_grad():
        layer(case.x, trace=True)
    assert layer.last is not None
    descent = problem.descent(layer.last.trace)
    if descent is not None:
        first, last = descent.value[0], descent.value[-1]
        finite = np.isfinite(first)
        require(
            np.isfinite(last).all() and (last <= first + 1e-8 * (1 + abs(first)))[finite].all(),
            f"{case.name}.problem",
            "have a descent whose value falls along a solve",
            f"{last.tolist()} at the end and {first.tolist()} at the start",
        )
    if isinstance(problem, Minimization):
        states = [case.layout.unpack(z) for z in case.points()]
        end = layer.last.value
        near = [end + scale * torch.randn_like(end) for scale in (1e-3, 0.1)]
        values = problem.along([end, *near, *states]).value
        values = np.where(np.isnan(values), np.inf, values)
        require(
            (values[0] <= values[1:].min(axis=0) + 1e-7 * (1 + abs(values[0]))).all(),
            f"{case.name}.problem",
            "be minimised by the equilibrium",
            f"{values[0].tolist()} there and {values[1:].min(axis=0).tolist()} elsewhere",
        )
    return None


DECLARATION_CHECKS = (
    _declared_symmetry_holds,
    _declared_lipschitz_bound_holds,
    _linearization_is_autograds,
    _certificate_is_true,
    _norms_are_numbers,
    _contributions_belong_to_parts,
    _projection_keeps_its_promise,
    _problem_is_solved_by_the_equilibrium,
)
