"""OptEq's statements about compositions of layers and their equilibria as checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.families.opteq.conjugate import envelope, invert, objective_value
from equipoise.families.opteq.potential import Potential
from equipoise.families.opteq.subject import (
    OPTEQ,
    PAPER,
    SMALL,
    Composition,
    assumption_2,
    equilibrium_of,
    points,
    residual_of,
)

__all__ = ["corollary_1", "lemma_3", "lemma_7", "lemma_10", "theorem_2", "theorem_3"]

ENVELOPE = 1e-6
"""What searches leave of an equality, relative to the sizes in it."""


def _blocks(composition: Composition, z: Tensor) -> list[Tensor]:
    """`[z_1, ..., z_(L-1), z_0]` with `z_0 = z`."""
    found, w = [], z
    for number in range(len(composition.potentials) - 1):
        w = composition.apply(number, w)
        found.append(w)
    return [*found, z]


@register_check(
    "opteq-lemma-3",
    "the outputs of all layers at an equilibrium are an equilibrium of one layer of many blocks, "
    "each of which acts on the block before it",
    paper=PAPER,
    number="Lemma 3",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_3(case: Case) -> Finding:
    """Write the blocks' own equation out: each block is its layer at the block before."""
    composition: Composition = case.network
    z = equilibrium_of(composition, composition.start)
    blocks = _blocks(composition, z)
    gaps = [
        float((composition.apply(number, blocks[number - 1]) - blocks[number]).norm())
        for number in range(len(blocks))
    ]
    size = 1 + max(float(own.norm()) for own in blocks)
    return Finding(
        [residual_of(composition, z)],
        [Inequality("largest residual of a block", largest(*gaps) / size, "<=", SMALL)],
        "with alpha W~^T s(W~ P z~ + c~) + (1 - alpha) P z~; the journal leaves out the inner P",
    )


@register_check(
    "opteq-theorem-2",
    "the blocks z~ of an equilibrium solve 0 in dPhi(z~) + (I - P) z~, with Phi the sum of the "
    "envelopes alpha M_phi_l^(1 - alpha)",
    paper=PAPER,
    number="Theorem 2",
    subject=OPTEQ,
)
@torch.no_grad()
def theorem_2(case: Case) -> Finding:
    """Differentiate the envelopes by inverting each layer: `dPhi_l(z_l) = F_l^-1(z_l) - z_l`."""
    hypotheses = assumption_2(case)
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])
    composition: Composition = case.network
    z = equilibrium_of(composition, composition.start)
    blocks = _blocks(composition, z)
    size, worst, slope = 1 + float(z.norm()), 0.0, 0.0
    for number, potential in enumerate(composition.potentials):
        alpha, own, before = composition.alphas[number], blocks[number], blocks[number - 1]
        if alpha == 1:
            # y - f(y) is in dphi(f(y)): what is left is that the block is its layer's value.
            worst = largest(worst, float((potential.prox(before) - own).norm()))
            continue
        inverse = invert(potential, own, 1 - alpha, before)
        worst = largest(worst, float((inverse - before).norm()))
        slope = largest(slope, _slope_error(potential, own, alpha, inverse - own))
    return Finding(
        [*hypotheses, residual_of(composition, z)],
        [
            Inequality("distance of 0 from dPhi + (I - P) z~", worst / size, "<=", ENVELOPE),
            Inequality(
                "alpha M(z + d) - alpha M(z - d) against 2 <F^-1(z) - z, d>", slope, "<=", 1e-4
            ),
        ],
    )


@register_check(
    "opteq-corollary-1",
    "the two blocks of an equilibrium of two layers minimise alpha M_1(z_1) + alpha M_2(z_0) + "
    "|z_1 - z_0|^2/2",
    paper=PAPER,
    number="Corollary 1",
    subject=OPTEQ,
)
@torch.no_grad()
def corollary_1(case: Case) -> Finding:
    """Compare with points near and far, and look at the middle between two of them."""
    composition: Composition = case.network
    count = len(composition.potentials)
    hypotheses = [
        *assumption_2(case),
        Inequality("layers, and 2", count, "<=", 2.0),
        Inequality("layers, and 2", count, ">=", 2.0),
    ]
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])
    z = equilibrium_of(composition, composition.start)
    first, last = _blocks(composition, z)

    def value(z1: Tensor, z0: Tensor) -> Tensor:
        total = (z1 - z0).square().sum(dim=1) / 2
        for own, alpha, at in zip(
            composition.potentials, composition.alphas, (z1, z0), strict=True
        ):
            if alpha == 1:
                total = total + objective_value(own, at, 1e-8)
            else:
                total = total + alpha * envelope(own, at, 1 - alpha)
        return total

    least, lowest, bent = value(first, last), torch.inf, torch.inf
    states = points(case, 6)
    for own, other in zip(states[::2], states[1::2], strict=True):
        for scale in (0.01, 0.1, 1.0):
            there = value(first + scale * own, last + scale * other)
            size = 1 + there.abs()
            lowest = smallest(
                lowest, float(torch.where(there == torch.inf, there, (there - least) / size).min())
            )
            middle = value(first + scale * own / 2, last + scale * other / 2)
            above = ((there + least) / 2 - middle) / size
            bent = smallest(bent, float(torch.where(there == torch.inf, there, above).min()))
    return Finding(
        [*hypotheses, residual_of(composition, z)],
        [
            Inequality("the function elsewhere less that at the blocks", lowest, ">=", 0.0, 1e-8),
            Inequality("mean of two values less the value between", bent, ">=", 0.0, 1e-8),
        ],
    )


@register_check(
    "opteq-theorem-3",
    "as alpha tends to 0, all blocks tend to the solution of L y = sum_l f_l(y), the wide network",
    paper=PAPER,
    number="Theorem 3",
    subject=OPTEQ,
)
@torch.no_grad()
def theorem_3(case: Case) -> Finding:
    """Solve with alpha 0.1 and 0.001, and compare with the wide network's solution."""
    composition: Composition = case.network
    least = min(own.smoothness for own in composition.potentials)
    hypotheses = [*assumption_2(case), Inequality("smallest L_s |W|^2/mu", least, "<", 1.0)]
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])

    def wide(y: Tensor) -> Tensor:
        values = [own.prox(y) for own in composition.potentials]
        return torch.stack(values).mean(dim=0)

    y = equilibrium_of(wide, composition.start)
    found, distances = [residual_of(wide, y)], []
    for alpha in (0.1, 0.001):
        own = replace(composition, alphas=(alpha,) * len(composition.alphas))
        z = equilibrium_of(_per_step(own, alpha), y)
        blocks = torch.stack(_blocks(own, z))
        distances.append(float((blocks - y).norm(dim=2).max()))
    size = 1 + float(y.norm(dim=1).max())
    limit = largest(distances[0] / 20, 1e-9 * size)
    return Finding(
        [*hypotheses, *found],
        [
            Inequality(
                "distance of a block at alpha 0.001, a 20th of 0.1's", distances[1], "<=", limit
            )
        ],
    )


@register_check(
    "opteq-lemma-7",
    "if k-contractions, k < 1, tend to one point by point, so do their fixed points",
    paper=PAPER,
    number="Lemma 7 (arXiv)",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_7(case: Case) -> Finding:
    """Move the injections by 1/n, which leaves every Lipschitz constant as it is."""
    composition: Composition = case.network
    k = composition.factor
    hypotheses = [Inequality("Lipschitz constant k", k, "<", 1.0)]
    if not hypotheses[0].holds:
        return Finding(hypotheses, [])
    z = equilibrium_of(composition, composition.start)
    shift = torch.randn_like(z[:1])
    over, moved = -torch.inf, []
    for n in (10, 1000, 100_000):

        def near(w: Tensor, n: int = n) -> Tensor:
            return composition(w) + shift / n

        other = equilibrium_of(near, z)
        moved.append(float((other - z).norm(dim=1).max()))
        promised = float((near(z) - z).norm(dim=1).max()) / (1 - k)
        over = largest(over, moved[-1] - promised)
    return Finding(
        [*hypotheses, residual_of(composition, z)],
        [
            Inequality("|z_n - z| less |T_n(z) - z|/(1 - k)", over, "<=", 0.0, SMALL),
            Inequality("|z_n - z| at n = 100,000", moved[-1], "<=", moved[0] / 1000),
        ],
    )


@register_check(
    "opteq-lemma-10",
    "I - T is monotone for a nonexpansive T, and its fixed points are a convex set",
    paper=PAPER,
    number="Lemma 10 (arXiv)",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_10(case: Case) -> Finding:
    """Look at pairs of points, and half-way between the fixed points that two starts lead to."""
    composition: Composition = case.network
    hypotheses = assumption_2(case)
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])
    states, lowest, between = points(case), torch.inf, 0.0
    for x in states:
        for y in states:
            if x is not y:
                apart = x - y
                inner = ((apart - composition(x) + composition(y)) * apart).sum(dim=1)
                lowest = smallest(lowest, float((inner / apart.square().sum(dim=1)).min()))
    ends = [equilibrium_of(composition, own) for own in states[:2]]
    middle = (ends[0] + ends[1]) / 2
    size = 1 + float(middle.norm(dim=1).max())
    between = float((composition(middle) - middle).norm(dim=1).max()) / size
    return Finding(
        [*hypotheses, *(residual_of(composition, own) for own in ends)],
        [
            Inequality("<(x - T x) - (y - T y), x - y>/|x - y|^2", lowest, ">=", 0.0, SMALL),
            Inequality("residual between two fixed points", between, "<=", 10 * SMALL),
        ],
    )


def _per_step(composition: Composition, alpha: float) -> Callable[[Tensor], Tensor]:
    """The same fixed points, in steps that do not shrink with alpha."""

    def step(z: Tensor) -> Tensor:
        return z + (composition(z) - z) / (alpha * len(composition.alphas))

    return step


def _slope_error(potential: Potential, z: Tensor, alpha: float, slope: Tensor) -> float:
    """How far a difference of the envelope is from the slope that it should have, relatively."""
    direction = torch.randn_like(z)
    d = 1e-4 * direction / direction.norm(dim=1, keepdim=True)
    ends = [alpha * envelope(potential, z + sign * d, 1 - alpha) for sign in (1, -1)]
    wanted = 2 * (slope * d).sum(dim=1)
    return float(((ends[0] - ends[1] - wanted).abs() / (1e-4 + 2e-4 * slope.norm(dim=1))).max())
