"""The paper's statements about Gram matrices (Lemmas 3.1 to 3.4) as checks."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.families.relu_implicit.conditions import (
    concentration,
    initialization,
    quantities,
    rounding_of,
    samples_in_general_position,
)
from equipoise.families.relu_implicit.equilibrium_checks import EXACT, unrolled_output
from equipoise.families.relu_implicit.gram import gram, limit_gram
from equipoise.families.relu_implicit.network import ReluImplicitNetwork
from equipoise.families.relu_implicit.subject import PAPER, RELU_IMPLICIT, exact_network

__all__ = ["lemma_3_1", "lemma_3_2", "lemma_3_3", "lemma_3_4"]

DELTA = 0.2
"""The probability of failure that checks of a single draw take for theirs."""


@register_check(
    "relu-implicit-lemma-3.1",
    "along the gradient flow the predictions move by d yhat/dt = -H (yhat - y), "
    "H = (gamma^2 M + 1 1^T) o Z Z^T + Q o X X^T + Phi Phi^T",
    paper=PAPER,
    number="Lemma 3.1",
    subject=RELU_IMPLICIT,
)
def lemma_3_1(case: Case) -> Finding:
    """Compare with the Jacobian of autograd through many plain steps."""
    network, x, y = case.network, case.x, case.y
    cell = network.cell
    H = gram(network, x).H
    weights = [cell.A, cell.V, network.u, network.v]
    outputs = unrolled_output(network, x)
    rows = []
    for output in outputs:
        found = torch.autograd.grad(output, weights, retain_graph=True)
        rows.append(torch.cat([one.reshape(-1) for one in found]))
    J = torch.stack(rows)
    error = (outputs - y).detach()
    # The velocity itself, by moving a little along the flow and back.
    velocity = _velocity(network, x, -(error @ J), 1e-6 / float(J.norm() * error.norm()))
    expected = -H @ error
    norm = cell.scale * float(torch.linalg.matrix_norm(cell.A.detach(), 2))
    return Finding(
        [Inequality("gamma |A|/sqrt(m)", norm, "<", 1.0)],
        [
            Inequality("|H - J J^T|/|H|", float((H - J @ J.T).norm() / H.norm()), "<=", EXACT),
            Inequality(
                "relative error of the velocity",
                float((velocity - expected).norm() / expected.norm()),
                "<=",
                1e-4,
            ),
        ],
    )


@torch.no_grad()
def _velocity(network: ReluImplicitNetwork, x: Tensor, slope: Tensor, h: float) -> Tensor:
    cell = network.cell
    weights = [cell.A, cell.V, network.u, network.v]
    parts = torch.split(slope, [one.numel() for one in weights])
    sides = []
    for sign in (1.0, -1.0):
        kept = [one.clone() for one in weights]
        for one, part in zip(weights, parts, strict=True):
            one.add_(part.reshape(one.shape), alpha=sign * h)
        sides.append(unrolled_output(network, x))
        for one, old in zip(weights, kept, strict=True):
            one.copy_(old)
    return (sides[0] - sides[1]) / (2 * h)


@register_check(
    "relu-implicit-lemma-3.2",
    "if all |x_i| = 1 and no two samples are parallel, lambda_0 = lambda_min(G_inf) > 0",
    paper=PAPER,
    number="Lemma 3.2",
    subject=RELU_IMPLICIT,
)
def lemma_3_2(case: Case) -> Finding:
    """Compute the smallest eigenvalue, and that of a Gram matrix of random features beside it."""
    eigenvalues = torch.linalg.eigvalsh(limit_gram(case.x))
    return Finding(
        samples_in_general_position(case.x),
        [
            Inequality(
                "lambda_0, beyond rounding", float(eigenvalues[0]), ">", rounding_of(eigenvalues)
            )
        ],
    )


def _wide(seed: int) -> Case:
    """Two samples at 120 degrees and a width at which `G(0)` is near its limit.

    `A` plays no part in Lemma 3.3, and is zero without memory.
    """
    width = 2048
    network = exact_network(ReluImplicitNetwork((2,), 1))
    cell = network.cell
    cell.width = width
    cell.V = nn.Parameter(torch.randn(width, 2, dtype=torch.float64))
    cell.A = nn.Parameter(torch.zeros(1, 1, dtype=torch.float64).expand(width, width))
    network.u = nn.Parameter(torch.ones(1, width, dtype=torch.float64))
    network.v = nn.Parameter(torch.ones(1, width, dtype=torch.float64))
    x = torch.tensor([[1.0, 0.0], [-0.5, math.sqrt(0.75)]], dtype=torch.float64)
    label = f"random, {width} units, 2 samples, seed {seed}"
    return Case(network, x, torch.zeros(2, dtype=torch.float64), label, seed)


@register_check(
    "relu-implicit-lemma-3.3",
    "if m is of the order n^2/lambda_0^2, |G(0) - G_inf| <= lambda_0/4 with high probability, and "
    "lambda_min(G(0)) >= 3 lambda_0/4",
    paper=PAPER,
    number="Lemma 3.3",
    subject=RELU_IMPLICIT,
    fresh=_wide,
)
@torch.no_grad()
def lemma_3_3(case: Case) -> Finding:
    """Compare `G(0)` with its limit."""
    network, x = case.network, case.x
    limit = limit_gram(x)
    phi = network.cell.inject(x)
    G = phi @ phi.T
    lambda_0 = float(torch.linalg.eigvalsh(limit)[0])
    first = float(torch.linalg.eigvalsh(G)[0])
    return Finding(
        [
            *samples_in_general_position(x),
            *initialization("V", network.cell.V),
            concentration(network.cell.width, x, DELTA),
        ],
        [
            Inequality(
                "|G(0) - G_inf|", float(torch.linalg.matrix_norm(G - limit, 2)), "<=", lambda_0 / 4
            ),
            Inequality("lambda_min(G(0))", first, ">=", 0.75 * lambda_0),
        ],
        "The width has the explicit constant of Chebyshev's inequality; the printed one is open.",
    )


@register_check(
    "relu-implicit-lemma-3.4",
    "all V with |V| <= 2c sqrt(m) within R = sqrt(m) lambda_0/(16 c |X|^2) of V(0) have "
    "|G - G(0)| <= lambda_0/4 and lambda_min(G) >= lambda_0/2",
    paper=PAPER,
    number="Lemma 3.4",
    subject=RELU_IMPLICIT,
)
def lemma_3_4(case: Case) -> Finding:
    """Look for the worst `V` on the sphere: random ones, aligned ones, and by ascent from them."""
    x, V = case.x, case.network.cell.V.detach()
    known = quantities(case.network, x, case.y)
    cell = copy.deepcopy(case.network.cell)
    phi = cell.inject(x).detach()
    G = phi @ phi.T
    left = torch.linalg.svd(V, full_matrices=False).U[:, :1]
    right = torch.linalg.svd(x, full_matrices=False).Vh[:1]
    starts = [torch.randn_like(V) for _ in range(3)] + [left @ right, -left @ right, V, -V]
    farthest, least, longest = 0.0, math.inf, 0.0
    for start in starts:
        step = start
        for _ in range(5):
            cell.V.data = V + step / torch.linalg.matrix_norm(step, 2) * known.radius
            near = cell.inject(x)
            there = near @ near.T
            distance = torch.linalg.matrix_norm(there - G, 2)
            farthest = largest(farthest, float(distance.detach()))
            least = smallest(least, float(torch.linalg.eigvalsh(there.detach())[0]))
            longest = largest(longest, float(torch.linalg.matrix_norm(cell.V.detach(), 2)))
            (slope,) = torch.autograd.grad(distance, cell.V)
            # The largest linear increase on the ball of the spectral norm is the polar factor.
            u, _, v = torch.linalg.svd(slope, full_matrices=False)
            step = u @ v
    return Finding(
        [
            *known.spectrum(),
            Inequality(
                "|V| <= 2c sqrt(m) where it was looked",
                longest,
                "<=",
                2 * known.c * math.sqrt(known.m),
            ),
        ],
        [
            Inequality("|G - G(0)|", farthest, "<=", known.lambda_0 / 4),
            Inequality("lambda_min(G)", least, ">=", known.lambda_0 / 2),
        ],
    )
