"""The implicit ReLU network whose training is proved to converge."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from equipoise.core.transforms import require_dtype
from equipoise.core.validate import require_between, require_count, require_flag
from equipoise.layers.cell import Cell
from equipoise.layers.certificate import Certificate, Factor, Link, Statement
from equipoise.layers.lipschitz import Bound, Part, round_up
from equipoise.operators import dense_norm
from equipoise.solvers.problem import Linearization

__all__ = ["ReluImplicitCell"]


class ReluImplicitCell(Cell):
    """`z = relu((gamma/sqrt(m)) A z + phi)`, `phi = relu(V x)/sqrt(m)` (Gao et al., 2022, eq. 3).

    `A` and `V`, the paper's `W`, begin with standard Gaussian entries, so that `|A|` is about
    `2 sqrt(m)` and the step contracts by about `2 gamma` (Lemma 2.2). The theorems ask for
    `gamma < min(1/2, 1/(4c))` with `|A(0)| <= c sqrt(m)`, which `gamma = 0.1` meets.

    Args:
        inputs: Length of an input.
        width: `m`.
        gamma: The scale, in (0, 1).
        project: Whether training keeps `(gamma/sqrt(m)) |A|` below 1 by a projection after each
            step. In the regime of the theorems it stays there by itself.

    Shape:
        Input (batch, inputs), state (batch, width).
    """

    linearize_keeps_graph = True

    def __init__(
        self, inputs: int, width: int, gamma: float = 0.1, *, project: bool = False
    ) -> None:
        super().__init__()
        require_count("ReluImplicit.inputs", inputs)
        require_count("ReluImplicit.width", width)
        require_between("ReluImplicit.gamma", gamma, 0, 1, "()")
        require_flag("ReluImplicit.project", project)
        self.width = width
        self.gamma = float(gamma)
        self._project = project
        self.A = nn.Parameter(torch.randn(width, width))
        self.V = nn.Parameter(torch.randn(width, inputs))

    @property
    def scale(self) -> float:
        """`gamma/sqrt(m)`."""
        return self.gamma / math.sqrt(self.width)

    def inject(self, x: Tensor) -> Tensor:
        """Return `phi`."""
        require_dtype(x, self.V)
        return torch.relu(x @ self.V.T) / math.sqrt(self.width)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.relu(torch.addmm(context, z, self.A.T, alpha=self.scale))

    def linearize(self, z: Tensor, context: Tensor) -> Linearization:
        """`J = (gamma/sqrt(m)) D A`, `D` the active units (Lemma 2.3)."""
        value = self.step(z, context)
        return _linearized(value, (value.detach() > 0).to(z), self.A.detach(), self.scale)

    @torch.no_grad()
    def norm(self) -> float:
        """`(gamma/sqrt(m)) |A|`, rounded up."""
        return self.scale * float(dense_norm(self.A.detach().double())) * (1 + 1e-15)

    def lipschitz(self) -> float | None:
        return None  # a norm at each solve would cost more than the solve; `certificate` has it

    def certificate(self) -> Certificate:
        """Return what Lemma 2.2 proves: a contraction where `(gamma/sqrt(m)) |A| < 1`."""
        norm = self.norm()
        c = norm / self.gamma  # |A| / sqrt(m)
        allowed = min(0.5, 1 / (4 * c)) if c else 0.5
        return Certificate(
            chain=(Link(type(self).__name__, norm),),
            factors=(Factor("A", norm, norm / self.scale),),
            further=(
                Statement(
                    "gamma is as small as the convergence theorems ask of the first weights",
                    holds=True if self.gamma < allowed else None,
                    number=self.gamma,
                    margin=allowed - self.gamma,
                    theorem="Gao et al. (2022), Theorems 3.1 and 3.2: gamma < min(1/2, 1/(4c)), "
                    "c = |A|/sqrt(m)",
                ),
            ),
            remedy="Lower gamma, or set project=True.",
        )

    @torch.no_grad()
    def input_lipschitz(self) -> Part:
        """Return `|V|/sqrt(m)`, how far `phi` moves."""
        norm = float(dense_norm(self.V.double())) / math.sqrt(self.width)
        return Bound("V", round_up(norm), "|V|/sqrt(m)")

    @property
    def projects(self) -> bool:
        return self._project

    def norms(self) -> dict[str, float]:
        return {"A": self.norm()}

    @property
    def norm_limit(self) -> float:
        return 1.0

    @torch.no_grad()
    def project_(self) -> None:
        """Divide `A` where the step would not contract: to 0.99 of the limit."""
        norm = self.norm()
        if norm >= 1:
            self.A.mul_(0.99 / norm)


def _linearized(value: Tensor, active: Tensor, A: Tensor, scale: float) -> Linearization:
    return Linearization(
        value.detach(),
        jvp=lambda v: (v @ A.T).mul_(active).mul_(scale),
        vjp=lambda v: ((v * active) @ A).mul_(scale),
        select_rows=lambda rows: _linearized(value.detach()[rows], active[rows], A, scale),
        graph=value if value.requires_grad else None,
    )
