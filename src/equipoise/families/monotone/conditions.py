"""What the convergence theorems ask of the start: Conditions 1 and 2, inequality by inequality.

`lambda_0` is the smallest singular value of `Z(0)`; a bar is a norm at the start plus the radius of
the ball in which that weight shall stay, `X` the Frobenius norm of the samples, `e = |yhat - y|`.

Condition 2 as printed cannot be met where the proof is valid: its last inequality asks for
`lambda_0^2 >= 20 X^2 bar_U^2`, while `lambda_0 <= |Z| <= X |U|/m`, and the proof drops powers of
`1/m`, which needs `m >= 1` (see the errata). `condition_2_mended` keeps them, and counts what is of
second order in the step against the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.analysis.check import Inequality
from equipoise.families.monotone.kernel import MonotoneForms, MonotoneRegression

__all__ = [
    "Start",
    "condition_1",
    "condition_2",
    "condition_2_mended",
    "largest_step",
    "mended_step",
    "start_of",
]

FRACTIONS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Radii that are tried, as fractions of the norms at the start."""


@dataclass(frozen=True)
class Start:
    """The numbers in which the conditions are stated.

    Attributes:
        m: The margin.
        units: `n`.
        samples: `N`.
        X: The Frobenius norm of the samples.
        lambda_0: The smallest singular value of `Z(0)`.
        error: `|yhat(0) - y| = sqrt(2 L(0))`.
        norms: Norms of `A`, `B`, `U` and `u` at the start.
        radii: Radii of their balls.
    """

    m: float
    units: int
    samples: int
    X: float
    lambda_0: float
    error: float
    norms: dict[str, float]
    radii: dict[str, float]

    def bar(self, name: str) -> float:
        """The largest norm in the ball around a weight."""
        return self.norms[name] + self.radii[name]

    def balls(self, factor: float) -> list[Inequality]:
        """(3.8), or (3.16) with 8 for the factor 4: the weights stay in their balls."""
        U, u, A = (self.bar(name) for name in ("U", "u", "A"))
        m, scale = self.m, factor * self.X * self.error
        needs = {
            "A": 2 * U * u * A / (m**2 * self.radii["A"]),
            "B": 2 * U * u / (m**2 * self.radii["B"]),
            "U": u / (m * self.radii["U"]),
            "u": U / (m * self.radii["u"]),
        }
        return [
            Inequality(f"lambda_0^2, for {name} to stay near", self.lambda_0**2, ">=", scale * need)
            for name, need in needs.items()
        ]

    def width(self) -> Inequality:
        """The width: at least as many units as samples."""
        return Inequality("n >= N", self.units, ">=", self.samples)

    def coupling(self) -> tuple[float, float]:
        """`P` and `C`: what the weights other than `u`, and all, move the outputs by.

        `|(Z(k+1) - Z(k))^T u| <= step P |e|` and `|yhat(k+1) - yhat(k)| <= step C |e|` in the
        balls, for steps of at most `4/lambda_0^2`.
        """
        U, u, A = (self.bar(name) for name in ("U", "u", "A"))
        P = u**2 / self.m**2 + 4 * (U * u) ** 2 * (1.25 * A**2 + 1) / self.m**4
        return self.X**2 * P, self.X**2 * (P + U**2 / self.m**2)


def start_of(network: MonotoneRegression, forms: MonotoneForms, y: Tensor) -> Start:
    """Return the numbers at a network's present weights, with the radii that suit them best.

    Args:
        network: The network.
        forms: Its closed forms.
        y: Targets.
    """
    weights = {
        "A": network.operator.A,
        "B": network.operator.B,
        "U": network.U,
        "u": network.u[None],
    }
    norms = {
        name: float(torch.linalg.matrix_norm(one.detach(), 2)) for name, one in weights.items()
    }
    singular = torch.linalg.svdvals(forms.z)
    starts = [
        Start(
            network.operator.margin,
            len(network.u),
            len(forms.x),
            float(forms.x.norm()),
            float(singular[-1]),
            float((forms.output - y).norm()),
            norms,
            {name: max(fraction * norm, 1e-300) for name, norm in norms.items()},
        )
        for fraction in FRACTIONS
    ]
    return max(starts, key=lambda one: min(each.relative_margin for each in condition_1(one)))


def condition_1(start: Start) -> list[Inequality]:
    """Return Condition 1 (eqs. 3.8 and 3.9) and `n >= N`, each with its margin."""
    U, u, A, m = start.bar("U"), start.bar("u"), start.bar("A"), start.m
    spread = 4 * ((U * A) ** 2 + U**2) / m**2 + 1
    need = 8 * start.X**2 * start.error * u / m**2 * spread
    return [
        start.width(),
        *start.balls(4.0),
        Inequality("(3.9) lambda_0^3", start.lambda_0**3, ">=", need),
    ]


def condition_2(start: Start) -> list[Inequality]:
    """Return Condition 2 as printed (eqs. 3.16 to 3.18), `n >= N` and `m >= 1`."""
    U, u, A = start.bar("U"), start.bar("u"), start.bar("A")
    square = start.X**2
    third = 8 * square * start.error * u * (1 + 6 * (U * A) ** 2 + 4 * U**2)
    last = 20 * square * (u**2 + 4 * (u * U * A) ** 2 + 4 * (u * U) ** 2 + U**2)
    return [
        start.width(),
        Inequality("m >= 1, for the dropped powers of 1/m", start.m, ">=", 1.0),
        *start.balls(8.0),
        Inequality("(3.17) lambda_0^3", start.lambda_0**3, ">=", third),
        Inequality("(3.18) lambda_0^2", start.lambda_0**2, ">=", last),
    ]


def largest_step(start: Start) -> float:
    """Return the largest step that Theorem 3.3.5 allows, as printed."""
    U, u, A = start.bar("U"), start.bar("u"), start.bar("A")
    total = u**2 + 4 * (U * u) ** 2 + 4 * (U * u * A) ** 2 + U**2
    return min(
        4 / start.lambda_0**2,
        1 / (start.X**2 * total),
        0.5 / (start.X * start.lambda_0 * U * u * A),
        1 / (6 * start.lambda_0**2 * (u * A) ** 2),
    )


def condition_2_mended(start: Start) -> list[Inequality]:
    """Return a condition under which the rate of Theorem 3.3.5 follows.

    `L(k+1) <= L(k) (1 + step^2 C^2 + 2 step P - step lambda_0^2/2)` as in the proof, which is at
    most `1 - step lambda_0^2/4` if `P <= lambda_0^2/16` and `step <= lambda_0^2/(8 C^2)`. That
    `Z` stays within `lambda_0/2` of its start takes 16 where (3.17) has 8.
    """
    U, u, A, m = start.bar("U"), start.bar("u"), start.bar("A"), start.m
    spread = 1 / m**2 + (6 * (U * A) ** 2 + 4 * U**2) / m**4
    return [
        start.width(),
        *start.balls(8.0),
        Inequality(
            "lambda_0^3, for Z to stay near",
            start.lambda_0**3,
            ">=",
            16 * start.X**2 * start.error * u * spread,
        ),
        Inequality("lambda_0^2 >= 16 P", start.lambda_0**2, ">=", 16 * start.coupling()[0]),
    ]


def mended_step(start: Start) -> float:
    """Return the largest step for `condition_2_mended`."""
    _, C = start.coupling()
    if not start.lambda_0:
        return math.inf
    return min(4 / start.lambda_0**2, start.lambda_0**2 / (8 * C**2))
