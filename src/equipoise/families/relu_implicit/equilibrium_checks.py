"""The paper's statements about equilibria and gradients (section 2) as checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.families.relu_implicit.conditions import initialization
from equipoise.families.relu_implicit.lemma import closed_forms
from equipoise.families.relu_implicit.network import ReluImplicitNetwork
from equipoise.families.relu_implicit.subject import PAPER, RELU_IMPLICIT

__all__ = ["lemma_2_1", "lemma_2_2", "lemma_2_3", "unrolled_output"]

STEPS = 40
"""Iterates whose bounds are looked at."""
ROUNDING = 1e-12
EXACT = 1e-8
"""Relative difference of a closed form and of autograd."""
UNROLLED = 120
"""Steps that autograd goes through: those of a contraction by 1/2 leave nothing after 60."""


def unrolled_output(network: ReluImplicitNetwork, x: Tensor) -> Tensor:
    """Return the predictions after many plain steps, for autograd to go through all of them.

    It uses nothing that is known of equilibria, and so can witness what is.

    Args:
        network: The network.
        x: Samples as rows.
    """
    cell = network.cell
    phi = cell.inject(x)
    z = torch.zeros_like(phi)
    for _ in range(UNROLLED):
        z = cell.step(z, phi)
    return z @ network.u[0] + phi @ network.v[0]


def _contraction(network: ReluImplicitNetwork) -> tuple[float, Inequality]:
    """`g` of Lemmas 2.2 and 2.3, and the hypothesis that it is below 1."""
    cell = network.cell
    c = float(torch.linalg.matrix_norm(cell.A.detach(), 2)) / math.sqrt(cell.width)
    g = cell.gamma * largest(1.0, c)
    return g, Inequality("g = gamma max(1, |A|/sqrt(m)) is below 1", g, "<", 1.0)


@register_check(
    "relu-implicit-lemma-2.1",
    "a matrix of independent sub-Gaussian entries has |A| <= C K (sqrt(m) + sqrt(n) + t) with "
    "probability at least 1 - 2 exp(-t^2)",
    paper=PAPER,
    number="Lemma 2.1",
    subject=RELU_IMPLICIT,
)
@torch.no_grad()
def lemma_2_1(case: Case) -> Finding:
    """Compare the norms of `A` and `V` with the bound for standard Gaussian entries."""
    cell = case.network.cell
    t = math.sqrt(2 * math.log(2 / 1e-6))
    hypotheses, conclusions = [], []
    for name, matrix in (("A", cell.A), ("V", cell.V)):
        hypotheses += initialization(name, matrix)
        bound = sum(math.sqrt(side) for side in matrix.shape) + t
        norm = float(torch.linalg.matrix_norm(matrix, 2))
        conclusions.append(Inequality(f"|{name}|", norm, "<=", bound))
    return Finding(
        hypotheses,
        conclusions,
        "Gaussian entries have C K = 1 with probability 1 - 2 exp(-t^2/2) (Davidson & Szarek, "
        "2001); t is that of the probability 1 - 1e-6.",
    )


@register_check(
    "relu-implicit-lemma-2.2",
    "if |A| <= c sqrt(m) and gamma = min(g, g/c), g < 1, there is one equilibrium, plain steps "
    "converge to it at the rate g, and |z_l| <= |phi|/(1 - g)",
    paper=PAPER,
    number="Lemma 2.2",
    subject=RELU_IMPLICIT,
)
@torch.no_grad()
def lemma_2_2(case: Case) -> Finding:
    """Iterate from zero and from elsewhere."""
    cell = case.network.cell
    g, contraction = _contraction(case.network)
    phi = cell.inject(case.x)
    size = phi.norm(dim=1)
    z, other = torch.zeros_like(phi), 10 * torch.randn_like(phi)
    apart = start = (z - other).norm(dim=1)
    longest, ratio = 0.0, 0.0
    for _ in range(STEPS):
        z, other = cell.step(z, phi), cell.step(other, phi)
        length = z.norm(dim=1)
        # Of an input zero the state must be zero, for which 0/0 says nothing.
        alone = torch.where(length == 0, 0.0, math.inf)
        longest = largest(longest, float(torch.where(size == 0, alone, length / size).max()))
        now = (z - other).norm(dim=1)
        sound = ~(apart <= ROUNDING * start)  # below, rounding decides
        ratio = largest(ratio, float((now[sound] / apart[sound]).max()) if sound.any() else 0.0)
        apart = now
    final = float((apart / start).max())
    bound = 1 / (1 - g) if g < 1 else math.inf
    return Finding(
        [contraction],
        [
            Inequality("max_l |z_l|/|phi|", longest, "<=", bound, ROUNDING * bound),
            Inequality("largest ratio of two distances of iterates", ratio, "<=", g, ROUNDING),
            Inequality(
                f"distance of two starts after {STEPS} steps",
                final,
                "<=",
                max(g**STEPS, ROUNDING),
            ),
        ],
    )


@register_check(
    "relu-implicit-lemma-2.3",
    "the gradients of the loss in A, V, u and v have closed forms, and I - gamma D A/sqrt(m) has "
    "no singular value below 1 - g",
    paper=PAPER,
    number="Lemma 2.3",
    subject=RELU_IMPLICIT,
)
def lemma_2_3(case: Case) -> Finding:
    """Compare with autograd through many plain steps."""
    network, x, y = case.network, case.x, case.y
    cell = network.cell
    g, contraction = _contraction(network)
    with torch.no_grad():
        forms = closed_forms(network, x)
        exact = forms.gradients(y)
        inside = torch.addmm(forms.phi, forms.z, cell.A.T, alpha=cell.scale)
        kink = smallest(float(inside.abs().min()), float((x @ cell.V.T).abs().min()))
        masks = torch.cat([(inside > 0).to(x), torch.randint(0, 2, inside.shape).to(x)])
        eye = torch.eye(cell.width, dtype=x.dtype, device=x.device)
        least = smallest(
            *(
                float(torch.linalg.svdvals(eye - cell.scale * mask[:, None] * cell.A)[-1])
                for mask in masks[: 2 * len(x)][:8]
            )
        )
    loss = (unrolled_output(network, x) - y).square().sum() / 2
    weights = {"A": cell.A, "V": cell.V, "u": network.u, "v": network.v}
    found = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    conclusions = [
        Inequality(
            f"relative error of dL/d{name}",
            float((exact[name] - found[name].reshape(exact[name].shape)).norm())
            / float(found[name].norm()),
            "<=",
            EXACT,
        )
        for name in weights
    ]
    conclusions.append(Inequality("smallest singular value", least, ">=", 1 - g, ROUNDING))
    return Finding(
        [contraction, Inequality("distance of pre-activations from 0", kink, ">", 0.0)],
        conclusions,
        "eq. 10 with its missing factor gamma/sqrt(m), and (ii) of singular values, as its proof "
        "has it.",
    )
