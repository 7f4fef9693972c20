"""The paper's statements about training (Lemmas 3.5 and 3.6, Theorems 3.1 and 3.2) as checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.analysis.training_path import TrainingPath, gradient_descent, gradient_flow
from equipoise.core.errors import ConvergenceError
from equipoise.families.relu_implicit.conditions import (
    Quantities,
    concentration,
    initialization,
    quantities,
    samples_in_general_position,
)
from equipoise.families.relu_implicit.gram import gram
from equipoise.families.relu_implicit.network import ReluImplicitNetwork
from equipoise.families.relu_implicit.spectrum_checks import DELTA
from equipoise.families.relu_implicit.subject import PAPER, RELU_IMPLICIT, exact_network

__all__ = ["lemma_3_5", "lemma_3_6", "theorem_3_1", "theorem_3_2"]

TIME = 4.0
"""How long the flow is followed, in units of 1/lambda_0."""
MAX_STIFFNESS = 30.0
"""The time of the flow times the largest eigenvalue of `H`, at most."""
STEPS = 60
"""Of gradient descent."""
TOLERANCE = 1e-7
"""Of the integration: targets near the predictions leave few digits of the gradient."""
ROUNDING = 1e-4
"""Relative, of integrated losses."""
MENDED = "|u(t)| is bounded by its distance from u(0): the printed bound is below |u(0)|."


def _theorem_case(seed: int) -> Case:
    """Two samples at 150 degrees, and a width at which `G(0)` is near its limit."""
    width = 840
    network = exact_network(ReluImplicitNetwork((2,), width, gamma=0.1))
    x = torch.tensor([[1.0, 0.0], [-math.sqrt(0.75), 0.5]], dtype=torch.float64)
    with torch.no_grad():
        y = network(x)[:, 0] + 1e-3 * torch.randn(2, dtype=torch.float64)
    return Case(network, x, y, f"random, {width} units, 2 samples, seed {seed}", seed)


def _measure(start: ReluImplicitNetwork, x: Tensor, model: nn.Module) -> Mapping[str, float]:
    """What Lemmas 3.5 and 3.6 bound."""
    assert isinstance(model, ReluImplicitNetwork)
    phi = model.cell.inject(x)
    return {
        "G": float(torch.linalg.eigvalsh(phi @ phi.T)[0]),
        "u": float((model.u - start.u).norm()),
        "v": float((model.v - start.v).norm()),
        "V": float(torch.linalg.matrix_norm(model.cell.V, 2)),
        "A": float(torch.linalg.matrix_norm(model.cell.A, 2)),
    }


def _flow(case: Case, known: Quantities, *, watch: bool) -> TrainingPath | None:
    """The flow; None where it leaves all bounds."""
    if case.network.cell.norm() >= 1:
        return None
    measure = partial(_measure, case.network, case.x) if watch else None
    stiffness = float(torch.linalg.eigvalsh(gram(case.network, case.x).H)[-1])
    # Far from the theorems the problem is stiff, and would take forever.
    time = min(TIME / max(known.lambda_0, 1e-12), MAX_STIFFNESS / stiffness)
    try:
        return gradient_flow(
            case.network,
            case.x,
            case.y,
            time=time,
            points=10,
            tolerance=TOLERANCE,
            measure=measure,
        )
    except ConvergenceError:
        return None


def _descent(case: Case, step: float, *, watch: bool) -> TrainingPath | None:
    """Gradient descent; None where it leaves all bounds."""
    if case.network.cell.norm() >= 1:
        return None
    measure = partial(_measure, case.network, case.x) if watch else None
    try:
        return gradient_descent(
            case.network, case.x, case.y, step_size=step, steps=STEPS, every=6, measure=measure
        )
    except ConvergenceError:
        return None


def _bounds(known: Quantities, path: TrainingPath | None, k: float) -> list[Inequality]:
    """(i) to (v) of both lemmas; `k` is 1 for the flow, 2 for descent."""
    if path is None:
        return []
    reach = known.over_lambda(k * math.sqrt(known.n) * known.error)
    norm = 2 * known.c * math.sqrt(known.m)
    return [
        Inequality("(i) lambda_min(G(t))", smallest(*path.further["G"]), ">=", known.lambda_0 / 2),
        Inequality("(ii) |u(t) - u(0)|", largest(*path.further["u"]), "<=", 8 * known.c * reach),
        Inequality("(iii) |v(t) - v(0)|", largest(*path.further["v"]), "<=", 4 * known.c * reach),
        Inequality("(iv) |V(t)|", largest(*path.further["V"]), "<=", norm),
        Inequality("(v) |A(t)|", largest(*path.further["A"]), "<=", norm),
    ]


def _rate(
    known: Quantities, path: TrainingPath | None, *, flow: bool, step: float = 0.0
) -> Inequality:
    """The loss over its bound, at the worst time."""
    rate = known.lambda_0 if flow else -math.log1p(-step * known.lambda_0 / 2) / step
    worst = math.nan
    if path is not None:
        first = path.loss[0]
        worst = path.worst_ratio(lambda time: first * math.exp(-rate * time))
    bound = "exp(-lambda_0 t)" if flow else "(1 - step lambda_0/2)^k"
    return Inequality(f"largest |e|^2/({bound} |e(0)|^2)", worst, "<=", 1.0, ROUNDING)


def _rates(known: Quantities, path: TrainingPath | None) -> str:
    """The predicted rate beside the measured one."""
    if path is None:
        return "Training was not followed: the step does not contract, or the loss is not finite."
    span = path.time[-1] - path.time[0]
    last = path.loss[-1]
    if not (last > 0 and span > 0):
        return "The loss reached zero."
    measured = math.log(path.loss[0] / last) / span
    return (
        f"lambda_0 is {known.lambda_0:.3g}, and the rate of |e|^2 {measured:.3g} as "
        f"measured; the weights went {max(path.distance):.2g}."
    )


def _step_size(known: Quantities) -> float:
    return 0.5 * max(known.lambda_0, 1e-6) / known.n**2


@register_check(
    "relu-implicit-lemma-3.5",
    "in the gradient flow of a wide network lambda_min(G) >= lambda_0/2, the weights stay near "
    "their start, and |e(t)|^2 <= exp(-lambda_0 t) |e(0)|^2",
    paper=PAPER,
    number="Lemma 3.5",
    subject=RELU_IMPLICIT,
)
def lemma_3_5(case: Case) -> Finding:
    """Follow the flow."""
    known = quantities(case.network, case.x, case.y)
    path = _flow(case, known, watch=True)
    return Finding(
        [*known.spectrum(), *known.scale(), *known.width(descent=False)],
        [*_bounds(known, path, 1.0), _rate(known, path, flow=True)],
        f"{MENDED} {_rates(known, path)}",
    )


@register_check(
    "relu-implicit-theorem-3.1",
    "a wide random network reaches loss zero along the gradient flow, |e(t)|^2 <= "
    "exp(-lambda_0 t) |e(0)|^2, with high probability",
    paper=PAPER,
    number="Theorem 3.1",
    subject=RELU_IMPLICIT,
    fresh=_theorem_case,
)
def theorem_3_1(case: Case) -> Finding:
    """Follow the flow."""
    known = quantities(case.network, case.x, case.y)
    path = _flow(case, known, watch=False)
    return Finding(
        [*_assumptions(case, known), *known.width(descent=False)],
        [_rate(known, path, flow=True)],
        _rates(known, path),
    )


@register_check(
    "relu-implicit-lemma-3.6",
    "in gradient descent of a wide network with a step of the order lambda_0/n^2 lambda_min(G) >= "
    "lambda_0/2, the weights stay near their start, and |e(k)|^2 <= (1 - step lambda_0/2)^k "
    "|e(0)|^2",
    paper=PAPER,
    number="Lemma 3.6",
    subject=RELU_IMPLICIT,
)
def lemma_3_6(case: Case) -> Finding:
    """Descend."""
    known = quantities(case.network, case.x, case.y)
    step = _step_size(known)
    path = _descent(case, step, watch=True)
    return Finding(
        [*known.spectrum(), *known.scale(), *known.width(descent=True), known.step(step)],
        [*_bounds(known, path, 2.0), _rate(known, path, flow=False, step=step)],
        f"{MENDED} {_rates(known, path)}",
    )


@register_check(
    "relu-implicit-theorem-3.2",
    "a wide random network reaches loss zero by gradient descent, |e(k)|^2 <= "
    "(1 - step lambda_0/2)^k |e(0)|^2, with high probability",
    paper=PAPER,
    number="Theorem 3.2",
    subject=RELU_IMPLICIT,
    fresh=_theorem_case,
)
def theorem_3_2(case: Case) -> Finding:
    """Descend."""
    known = quantities(case.network, case.x, case.y)
    step = _step_size(known)
    path = _descent(case, step, watch=False)
    return Finding(
        [*_assumptions(case, known), *known.width(descent=True), known.step(step)],
        [_rate(known, path, flow=False, step=step)],
        _rates(known, path),
    )


def _assumptions(case: Case, known: Quantities) -> list[Inequality]:
    cell = case.network.cell
    return [
        *initialization("A", cell.A),
        *initialization("V", cell.V),
        *samples_in_general_position(case.x),
        *known.scale(),
        concentration(cell.width, case.x, DELTA),
    ]
