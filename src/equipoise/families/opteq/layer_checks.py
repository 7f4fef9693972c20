"""OptEq's statements about one layer as checks; those about several are made of each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.families.opteq.conjugate import envelope
from equipoise.families.opteq.potential import Potential
from equipoise.families.opteq.subject import (
    OPTEQ,
    PAPER,
    SMALL,
    equilibrium_of,
    nonexpansive,
    points,
    residual_of,
)
from equipoise.prox import AbsoluteSum, Decorrelation, Incay, SquaredNorm

__all__ = ["lemma_5", "lemma_6", "table_1", "table_2", "theorem_1", "theorem_4"]

GAMMA = 0.4
"""The strength of regularisers."""


@register_check(
    "opteq-theorem-1",
    "if mu >= L_s |W|^2, f(z) = W^T s(W z + c)/mu is the gradient of psi and its fixed points "
    "minimise the convex phi = psi* - |.|^2/2",
    paper=PAPER,
    number="Theorem 1",
    subject=OPTEQ,
)
def theorem_1(case: Case) -> Finding:
    """Differentiate `psi`, and compare `phi` at each layer's own fixed point with elsewhere."""
    hypotheses = nonexpansive(case)
    slope, lowest, fixed = 0.0, torch.inf, []
    states = points(case)
    for potential in case.network.potentials:
        for y in states:
            slope = largest(slope, _relative(_gradient(potential, y), potential.prox(y)))
        if all(own.holds for own in hypotheses):
            z = equilibrium_of(potential.prox, states[0])
            fixed.append(residual_of(potential.prox, z))
            least = potential.at_step(z)
            others = torch.stack([potential.at_step(y) for y in states])
            size = 1 + others.abs().amax(dim=0)
            lowest = smallest(lowest, float(((others - least) / size).min()))
    conclusions = [
        Inequality("|grad psi - f|, relative", slope, "<=", SMALL),
        Inequality("phi elsewhere less phi at a fixed point", lowest, ">=", 0.0, SMALL),
    ]
    return Finding([*hypotheses, *fixed], conclusions)


@register_check(
    "opteq-lemma-5",
    "a map f = grad psi with convex psi is the proximal map of a convex phi = psi* - |.|^2/2 if "
    "and only if it is nonexpansive",
    paper=PAPER,
    number="Lemma 5 (arXiv)",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_5(case: Case) -> Finding:
    """Look at all pairs of points: `y - f(y)` must be a subgradient of `phi` at `f(y)`."""
    ratio, monotone, support = 0.0, torch.inf, torch.inf
    states = points(case)
    for potential in case.network.potentials:
        for y in states:
            u, own = potential.prox(y), potential.at_step(y)
            for other in states:
                if other is y:
                    continue
                v, apart = potential.prox(other), other - y
                square = apart.square().sum(dim=1)
                ratio = largest(ratio, float(((v - u).norm(dim=1) / square.sqrt()).max()))
                monotone = smallest(monotone, float((((v - u) * apart).sum(dim=1) / square).min()))
                above = potential.at_step(other) - own - ((y - u) * (v - u)).sum(dim=1)
                support = smallest(support, float((above / (1 + square)).min()))
    return Finding(
        [
            Inequality("<f(y) - f(y'), y - y'>/|y - y'|^2, so psi is convex", monotone, ">=", 0.0),
            Inequality("|f(y) - f(y')|/|y - y'|", ratio, "<=", 1.0, SMALL),
        ],
        [Inequality("phi(v) - phi(u) - <y - u, v - u>, u = f(y)", support, ">=", 0.0, SMALL)],
    )


@register_check(
    "opteq-lemma-6",
    "if f is a proximal map and A is invertible and nonexpansive, f(A(z)) minimises |u|^2/2 - "
    "<u, A(z)> + phi(u)",
    paper=PAPER,
    number="Lemma 6 (arXiv)",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_6(case: Case) -> Finding:
    """Take a random rotation, shortened, for `A`."""
    states = points(case)
    width = states[0].shape[1]
    scales = torch.linspace(0.5, 1.0, width, dtype=states[0].dtype)
    A = torch.linalg.qr(torch.randn(width, width, dtype=states[0].dtype))[0] * scales
    lowest = torch.inf
    for potential in case.network.potentials:
        for z in states:
            moved = z @ A.T
            least = _tilted(potential, moved, moved)
            for y in states:
                above = _tilted(potential, y, moved) - least
                size = 1 + moved.square().sum(dim=1) + y.square().sum(dim=1)
                lowest = smallest(lowest, float((above / size).min()))
    values = torch.linalg.svdvals(A)
    return Finding(
        [
            *nonexpansive(case),
            Inequality("|A|", float(values[0]), "<=", 1.0, 1e-12),
            Inequality("smallest singular value of A", float(values[-1]), ">", 0.0),
        ],
        [Inequality("the function elsewhere less that at f(A(z))", lowest, ">=", 0.0, SMALL)],
    )


@register_check(
    "opteq-theorem-4",
    "the fixed points of f(z - gamma grad R(z)) minimise phi + gamma R for convex R",
    paper=PAPER,
    number="Theorem 4",
    subject=OPTEQ,
)
@torch.no_grad()
def theorem_4(case: Case) -> Finding:
    """Regularise each layer by itself, with `|z|^2/2` and with `sum log cosh z`."""
    hypotheses, conclusions = nonexpansive(case), list[Inequality]()
    if all(own.holds for own in hypotheses):
        for name, value, gradient in (
            ("|z|^2/2", _half_square, lambda z: z),
            ("sum log cosh z", _log_cosh, torch.tanh),
        ):
            found, *fixed = _regularized(case, name, value, gradient)
            hypotheses += fixed
            conclusions.append(found)
    return Finding(hypotheses, conclusions)


@register_check(
    "opteq-table-1",
    "changes of phi are changes of the layer: a Moreau envelope is a skip connection, phi o A is "
    "A^-1 f(A z), a quadratic form is a matrix activation",
    paper=PAPER,
    number="Table 1",
    subject=OPTEQ,
)
@torch.no_grad()
def table_1(case: Case) -> Finding:
    """Compare the changed function at what the changed layer returns with elsewhere."""
    hypotheses = nonexpansive(case)
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])
    states, alpha = points(case, 4), 0.6
    potential: Potential = case.network.potentials[0]
    skip = turned = torch.inf
    z = states[0]
    u = torch.lerp(z, potential.prox(z), alpha)
    least = alpha * envelope(potential, u, 1 - alpha) + (u - z).square().sum(dim=1) / 2
    for y in [*states, u + 0.1 * states[1]]:
        value = alpha * envelope(potential, y, 1 - alpha) + (y - z).square().sum(dim=1) / 2
        skip = smallest(skip, float(((value - least) / (1 + value.abs())).min()))
    width = z.shape[1]
    A = torch.linalg.qr(torch.randn(width, width, dtype=z.dtype))[0] * 0.7
    shift = torch.randn(width, dtype=z.dtype)

    def changed(z: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve(A, (potential.prox(z @ A.T + shift) - shift).T).T
        return solved

    found = equilibrium_of(changed, z)
    there = potential.at_step(found @ A.T + shift)  # its own image, since it is fixed
    for y in states:
        value = potential.at_step(y)  # at A(z) for the z that A maps to f(y)
        turned = smallest(turned, float(((value - there) / (1 + value.abs())).min()))
    rows = potential.apply(z) + potential.c
    root = torch.randn(rows.shape[1], rows.shape[1], dtype=z.dtype)
    S = root @ root.T
    S = S / torch.linalg.matrix_norm(S, 2)
    with torch.enable_grad():
        y = z.clone().requires_grad_()
        a = potential.apply(y) + potential.c
        (slope,) = torch.autograd.grad(((a @ S) * a).sum() / (2 * potential.mu), y)
    matrix = _relative(slope, potential.adjoint(rows @ S) / potential.mu)
    conclusions = [
        Inequality("skip: the envelope's function elsewhere less there", skip, ">=", 0.0, 1e-7),
        Inequality("change of variable: phi(A z) elsewhere less there", turned, ">=", 0.0, SMALL),
        Inequality("matrix: |grad psi - W^T S (W z + c)|, relative", matrix, "<=", SMALL),
    ]
    return Finding([*hypotheses, residual_of(changed, found)], conclusions)


@register_check(
    "opteq-table-2",
    "the operators of feature decay, sparsity, incay and decorrelation are the proximal maps and "
    "gradient steps of their functions",
    paper=PAPER,
    number="Table 2",
    subject=OPTEQ,
)
@torch.no_grad()
def table_2(case: Case) -> Finding:
    """Compare with the definitions at random features; signs as in the errata."""
    z = points(case, 1)[0]
    decay = _relative(SquaredNorm().prox(z, GAMMA) * (1 + GAMMA), z)
    sparse = AbsoluteSum().prox(z, GAMMA)
    wanted = (z.abs() - GAMMA).clamp_min(0) * z.sign()
    incay, own = Incay(), z.square().sum(dim=1, keepdim=True)
    longer = (1 + 4 * GAMMA / (own + 2 * incay.epsilon).square()) * z
    even = Decorrelation(epsilon=1e-300)
    with torch.enable_grad():
        features = z.clone().requires_grad_()
        rows = torch.nn.functional.normalize(features.T)
        overlap = rows @ rows.T - torch.eye(len(rows), dtype=z.dtype)
        (slope,) = torch.autograd.grad(overlap.square().sum() / 2, features)
    return Finding(
        [
            Inequality(
                "features that are zero everywhere", float((z == 0).all(0).sum()), "<=", 0.0
            ),
            # The normalised features of one sample are signs, and have no gradient.
            Inequality("samples, at least 2", len(z), ">=", 2.0),
        ],
        [
            Inequality("feature decay: |prox - z/(1 + gamma)|", decay, "<=", SMALL),
            Inequality("sparsity: |prox - shrinkage|", _relative(sparse, wanted), "<=", SMALL),
            Inequality(
                "incay: |step - (1 + 4 gamma/(|z|^2 + 2 eps)^2) z|",
                _relative(z - GAMMA * incay.gradient(z), longer),
                "<=",
                SMALL,
            ),
            Inequality(
                "decorrelation: |gradient - autograd|",
                _relative(even.gradient(z), slope),
                "<=",
                1e-7,
            ),
        ],
    )


def _regularized(
    case: Case,
    name: str,
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
) -> list[Inequality]:
    lowest, fixed = torch.inf, []
    states = points(case)
    for potential in case.network.potentials:

        def changed(z: Tensor, potential: Potential = potential) -> Tensor:
            return potential.prox(z - GAMMA * gradient(z))

        z = equilibrium_of(changed, states[0])
        fixed.append(residual_of(changed, z))
        before = z - GAMMA * gradient(z)
        least = potential.at_step(before) + GAMMA * value(potential.prox(before))
        for y in states:
            other = potential.at_step(y) + GAMMA * value(potential.prox(y))
            lowest = smallest(lowest, float(((other - least) / (1 + other.abs())).min()))
    claim = f"phi + gamma R elsewhere less that at a fixed point, R = {name}"
    return [Inequality(claim, lowest, ">=", 0.0, SMALL), *fixed]


def _half_square(z: Tensor) -> Tensor:
    return z.square().sum(dim=1) / 2


def _log_cosh(z: Tensor) -> Tensor:
    return torch.logaddexp(z, -z).sum(dim=1) - z.shape[1] * torch.log(z.new_tensor(2.0))


def _tilted(potential: Potential, y: Tensor, w: Tensor) -> Tensor:
    """`|u|^2/2 - <u, w> + phi(u)` at `u = f(y)`."""
    u = potential.prox(y)
    return u.square().sum(dim=1) / 2 - (u * w).sum(dim=1) + potential.at_step(y)


@torch.enable_grad()
def _gradient(potential: Potential, y: Tensor) -> Tensor:
    y = y.clone().requires_grad_()
    (slope,) = torch.autograd.grad(potential.psi(y).sum(), y)
    return slope


def _relative(value: Tensor, wanted: Tensor) -> float:
    return float((value - wanted).norm() / (1e-300 + wanted.norm()))
