"""The thesis's statements about training as checks."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.analysis.training_path import gradient_descent, gradient_flow
from equipoise.core.errors import ConvergenceError
from equipoise.families.monotone.conditions import (
    Start,
    condition_1,
    condition_2,
    condition_2_mended,
    largest_step,
    mended_step,
    start_of,
)
from equipoise.families.monotone.equilibrium_checks import monotone_margin, spectral
from equipoise.families.monotone.kernel import monotone_forms
from equipoise.families.monotone.subject import MONOTONE, PAPER

__all__ = ["theorem_3_3_1", "theorem_3_3_5", "theorem_3_3_5_mended"]

STEPS = 20
TIME = 4.0
"""How long the flow is followed, in units of 1/lambda_0^2."""
MAX_STIFFNESS = 30.0
"""The time of the flow times the largest eigenvalue of `K`, at most."""
ROUNDING = 1e-4


@dataclass(frozen=True)
class Moment:
    """The weights and predictions after so many steps of gradient descent."""

    weights: dict[str, Tensor]
    W: Tensor
    z: Tensor
    output: Tensor

    def error(self, y: Tensor) -> float:
        """`|yhat - y|`."""
        return float((self.output - y).norm())


def _start(case: Case) -> Start:
    return start_of(case.network, monotone_forms(case.network, case.x), case.y)


@torch.no_grad()
def _descend(case: Case, step: float) -> list[Moment]:
    """Descend by the gradients of autograd, keeping what each lemma speaks of."""
    network = copy.deepcopy(case.network)
    moments = []
    for _ in range(STEPS + 1):
        weights = {
            "A": network.operator.A,
            "B": network.operator.B,
            "U": network.U,
            "u": network.u,
        }
        z = network.equilibrium(case.x)
        kept = {name: one.detach().clone() for name, one in weights.items()}
        moments.append(Moment(kept, network.W.clone(), z, z @ network.u))
        with torch.enable_grad():
            loss = (network(case.x)[:, 0] - case.y).square().sum() / 2
            slopes = torch.autograd.grad(loss, list(weights.values()))
        for one, slope in zip(weights.values(), slopes, strict=True):
            one.sub_(slope, alpha=step)
    return moments


def _size(one: Tensor) -> float:
    return spectral(one) if one.dim() == 2 else float(one.norm())


def _hypotheses(start: Start, moments: list[Moment], y: Tensor, step: float) -> list[Inequality]:
    """Hypotheses 1 and 3 of the induction, along the path."""
    first = moments[0].weights
    balls = [
        Inequality(
            f"hypothesis 1: {name} in its ball",
            largest(*(_size(one.weights[name] - first[name]) for one in moments)),
            "<=",
            start.radii[name],
        )
        for name in first
    ]
    factor = 1 - step * start.lambda_0**2 / 4
    worst = largest(
        *(
            (one.error(y) / moments[0].error(y)) ** 2 / factor**k
            for k, one in enumerate(moments)
            if factor > 0
        )
    )
    return [*balls, Inequality("hypothesis 3: loss over its bound", worst, "<=", 1.0, ROUNDING)]


def _common(case: Case) -> tuple[Start, float, list[Moment], list[Inequality]]:
    start = _start(case)
    step = mended_step(start)
    moments = _descend(case, step)
    return start, step, moments, _hypotheses(start, moments, case.y, step)


def _bars(start: Start) -> tuple[float, float, float, float]:
    return start.bar("U"), start.bar("u"), start.bar("A"), start.m


@register_check(
    "monotone-theorem-3.3.1",
    "if lambda_0 = sigma_min(Z(0)) meets Condition 1 and n >= N, the gradient flow has "
    "L(t) <= exp(-lambda_0^2 t/2) L(0)",
    paper=PAPER,
    number="Theorem 3.3.1",
    subject=MONOTONE,
)
def theorem_3_3_1(case: Case) -> Finding:
    """Follow the flow."""
    start = _start(case)
    rate = start.lambda_0**2 / 2
    stiffness = float(torch.linalg.eigvalsh(monotone_forms(case.network, case.x).kernel())[-1])
    time = min(TIME / max(2 * rate, 1e-12), MAX_STIFFNESS / stiffness)
    try:
        path = gradient_flow(case.network, case.x, case.y, time=time, points=10, tolerance=1e-7)
    except ConvergenceError as error:
        return Finding([monotone_margin(case.network), *condition_1(start)], [], str(error))
    worst = path.worst_ratio(lambda when: path.loss[0] * math.exp(-rate * when))
    measured = math.log(path.loss[0] / max(path.loss[-1], 1e-300)) / time
    return Finding(
        [monotone_margin(case.network), *condition_1(start)],
        [Inequality("largest L(t)/(exp(-lambda_0^2 t/2) L(0))", worst, "<=", 1.0, ROUNDING)],
        f"The rate is at least {rate:.3g} by lambda_0, and {measured:.3g} as measured; the "
        f"smallest PL* constant on the way is {min(path.pl):.3g}.",
    )


def _descent_rate(case: Case, start: Start, step: float) -> tuple[Inequality, str]:
    factor = 1 - step * start.lambda_0**2 / 4
    try:
        path = gradient_descent(case.network, case.x, case.y, step_size=step, steps=STEPS)
    except ConvergenceError as error:
        return Inequality("largest L(k+1)/L(k)", math.nan, "<=", factor), str(error)
    worst = largest(*(b / a for a, b in pairwise(path.loss)))
    note = f"The loss falls by {1 - factor:.3g} a step by lambda_0, and by {1 - worst:.3g} or more "
    return (
        Inequality("largest L(k+1)/L(k)", worst, "<=", factor, 1e-9),
        f"{note}as measured, with the step {step:.3g}.",
    )


@register_check(
    "monotone-theorem-3.3.5",
    "if lambda_0 meets Condition 2, n >= N and the step is short, gradient descent has "
    "L(k+1) <= (1 - step lambda_0^2/4) L(k)",
    paper=PAPER,
    number="Theorem 3.3.5",
    subject=MONOTONE,
)
def theorem_3_3_5(case: Case) -> Finding:
    """Descend with the largest step that the theorem allows."""
    start = _start(case)
    rate, note = _descent_rate(case, start, min(largest_step(start), mended_step(start)))
    return Finding(
        [monotone_margin(case.network), *condition_2(start)],
        [rate],
        f"As printed; no network with m >= 1 meets (3.18). {note}",
    )


@register_check(
    "monotone-theorem-3.3.5-mended",
    "if P <= lambda_0^2/16, the weights stay in their balls, n >= N and the step is at most "
    "lambda_0^2/(8 C^2), gradient descent has L(k+1) <= (1 - step lambda_0^2/4) L(k)",
    paper=PAPER,
    number="Theorem 3.3.5, mended",
    subject=MONOTONE,
)
def theorem_3_3_5_mended(case: Case) -> Finding:
    """Descend with the largest step that the mended theorem allows."""
    start = _start(case)
    rate, note = _descent_rate(case, start, mended_step(start))
    return Finding([monotone_margin(case.network), *condition_2_mended(start)], [rate], note)


@register_check(
    "monotone-lemma-3.3.7",
    "in the balls a step of gradient descent changes U, u, A, B and W by at most step |X|_F |e| "
    "times bar_u/m, bar_U/m, 2 bar_U bar_u bar_A/m^2, 2 bar_U bar_u/m^2, ...",
    paper=PAPER,
    number="Lemma 3.3.7",
    subject=MONOTONE,
)
def lemma_3_3_7(case: Case) -> Finding:
    """Measure all steps."""
    start, step, moments, hypotheses = _common(case)
    U, u, A, m = _bars(start)
    bounds = {
        "U": u / m,
        "u": U / m,
        "A": 2 * U * u * A / m**2,
        "B": 2 * U * u / m**2,
        "W": 4 * U * u * (A**2 + step * start.lambda_0**2 * A**2 / 16 + 1) / m**2,
    }
    worst = dict.fromkeys(bounds, 0.0)
    for one, after in pairwise(moments):
        unit = step * start.X * one.error(case.y)
        for name, bound in bounds.items():
            change = after.W - one.W if name == "W" else after.weights[name] - one.weights[name]
            worst[name] = largest(worst[name], _size(change) / (unit * bound))
    return Finding(
        hypotheses[:-1],
        [
            Inequality(f"largest step of {name} over its bound", ratio, "<=", 1.0)
            for name, ratio in worst.items()
        ],
    )


@register_check(
    "monotone-proposition-5",
    "if hypotheses 1 and 3 hold up to a step they hold after it, and |W(k) - W(0)| <= "
    "16 |X|_F |e(0)| (3 bar_A^2 + 2) bar_U bar_u/(lambda_0^2 m^2)",
    paper=PAPER,
    number="Proposition 5",
    subject=MONOTONE,
)
def proposition_5(case: Case) -> Finding:
    """Measure the path of `W`."""
    start, _, moments, hypotheses = _common(case)
    U, u, A, m = _bars(start)
    far = largest(*(spectral(one.W - moments[0].W) for one in moments))
    bound = 16 * start.X * start.error * (3 * A**2 + 2) * U * u / (start.lambda_0**2 * m**2)
    return Finding(
        [*start.balls(8.0), hypotheses[-1]],
        [*hypotheses[:-1], Inequality("|W(k) - W(0)|", far, "<=", bound)],
    )


@register_check(
    "monotone-proposition-6",
    "if hypotheses 1 and 3 hold, sigma_min(Z(k)) >= lambda_0/2",
    paper=PAPER,
    number="Proposition 6",
    subject=MONOTONE,
)
def proposition_6(case: Case) -> Finding:
    """Measure the smallest singular value along the path."""
    start, _, moments, hypotheses = _common(case)
    least = smallest(*(float(torch.linalg.svdvals(one.z)[-1]) for one in moments))
    return Finding(
        [*condition_2_mended(start), *hypotheses],
        [Inequality("sigma_min(Z(k))", least, ">=", start.lambda_0 / 2)],
        "With 16 where (3.17) prints 8.",
    )


def _constants(start: Start) -> tuple[float, float]:
    """`C_11` and `C_12`, with the powers of `1/m` that are printed as 1."""
    U, u, A, m = _bars(start)
    total = u**2 / m**2 + 4 * (U * u) ** 2 * (1 + A**2) / m**4 + U**2 / m**2
    return start.X**2 * total, start.X**2 * (U * u * A) ** 2 / (4 * m**4)


@register_check(
    "monotone-lemma-3.3.8",
    "|yhat(k+1) - yhat(k)|^2/2 <= L(k) (step C_11 + step^2 lambda_0^2 C_12)^2",
    paper=PAPER,
    number="Lemma 3.3.8",
    subject=MONOTONE,
)
def lemma_3_3_8(case: Case) -> Finding:
    """Measure all steps."""
    start, step, moments, hypotheses = _common(case)
    first, second = _constants(start)
    bound = step * first + (step * start.lambda_0) ** 2 * second
    worst = largest(
        *(
            float((after.output - one.output).norm()) / (one.error(case.y) * bound)
            for one, after in pairwise(moments)
        )
    )
    return Finding(
        hypotheses,
        [Inequality("largest change of yhat over its bound", worst, "<=", 1.0)],
        "With lambda_0^4 where the last term prints lambda_0, and the powers of 1/m.",
    )


@register_check(
    "monotone-lemma-3.3.9",
    "(yhat(k+1) - Z(k)^T u(k+1))^T e(k) <= 2 L(k) (step (C_11 - bar_U^2 |X|_F^2) + "
    "step^2 lambda_0^2 C_12)",
    paper=PAPER,
    number="Lemma 3.3.9",
    subject=MONOTONE,
)
def lemma_3_3_9(case: Case) -> Finding:
    """Measure all steps."""
    start, step, moments, hypotheses = _common(case)
    first, second = _constants(start)
    rest = first - (start.bar("U") * start.X / start.m) ** 2
    bound = step * rest + (step * start.lambda_0) ** 2 * second
    worst = largest(
        *(
            float((after.output - one.z @ after.weights["u"]) @ (one.output - case.y))
            / one.error(case.y) ** 2
            for one, after in pairwise(moments)
        )
    )
    return Finding(
        hypotheses,
        [Inequality("largest I_2/(2 L(k))", worst, "<=", bound)],
        "With the powers of 1/m that are printed as 1.",
    )


@register_check(
    "monotone-lemma-3.3.10",
    "if n >= N, (Z(k)^T u(k+1) - yhat(k))^T e(k) <= -step lambda_0^2 L(k)/2",
    paper=PAPER,
    number="Lemma 3.3.10",
    subject=MONOTONE,
)
def lemma_3_3_10(case: Case) -> Finding:
    """Measure all steps."""
    start, step, moments, hypotheses = _common(case)
    worst = largest(
        *(
            float((one.z @ after.weights["u"] - one.output) @ (one.output - case.y))
            / (one.error(case.y) ** 2 / 2)
            for one, after in pairwise(moments)
        )
    )
    least = smallest(*(float(torch.linalg.svdvals(one.z)[-1]) for one in moments))
    return Finding(
        [
            start.width(),
            *hypotheses,
            Inequality("hypothesis 2: sigma_min(Z(k))", least, ">=", start.lambda_0 / 2),
        ],
        [Inequality("largest I_3/L(k)", worst, "<=", -step * start.lambda_0**2 / 2)],
    )
