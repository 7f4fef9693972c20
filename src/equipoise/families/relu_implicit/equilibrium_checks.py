"""The paper's statements about equilibria and gradients (section 2) as checks."""

from __future__ import annotations

import math

import torch

from equipoise.analysis.check import Case, Finding, Inequality, register_check
from equipoise.families.relu_implicit.subject import PAPER, RELU_IMPLICIT

__all__ = ["lemma_2_2"]

STEPS = 40
"""Iterates whose bounds are looked at."""
ROUNDING = 1e-12


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
    c = float(torch.linalg.matrix_norm(cell.A, 2)) / math.sqrt(cell.width)
    g = cell.gamma * max(1.0, c)
    phi = cell.inject(case.x)
    size = phi.norm(dim=1)
    z, other = torch.zeros_like(phi), 10 * torch.randn_like(phi)
    apart = start = (z - other).norm(dim=1)
    longest, ratio = 0.0, 0.0
    for _ in range(STEPS):
        z, other = cell.step(z, phi), cell.step(other, phi)
        longest = max(longest, float((z.norm(dim=1) / size).max()))
        now = (z - other).norm(dim=1)
        sound = apart > ROUNDING * start  # below, rounding decides
        ratio = max(ratio, float((now[sound] / apart[sound]).max()) if sound.any() else 0.0)
        apart = now
    final = float((apart / start).max())
    bound = 1 / (1 - g) if g < 1 else math.inf
    return Finding(
        [Inequality("g = gamma max(1, |A|/sqrt(m)) is below 1", g, "<", 1.0)],
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
