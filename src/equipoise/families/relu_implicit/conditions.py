"""What the convergence theorems ask of width, scale and step, with the constants of their proofs.

The paper hides constants in `Omega` and `O`. Here they are explicit. Two steps of its proof had to
be mended (see the errata): Lemma 3.5 bounds `|u(t)|` by a number below `|u(0)| = sqrt(m)`, and all
that follows. With `|u|, |v| <= 2 sqrt(m)` in its place the gradients are at most
`6 sqrt(n) |e|` in `V` and `4 sqrt(n) |e|` in `A`, and the weights stay where they must if

    sqrt(m) >= 8 k c sqrt(n) |e(0)|/lambda_0,             (u and v)
    sqrt(m) >= 192 k c sqrt(n) |X|^2 |e(0)|/lambda_0^2,   (V)
    sqrt(m) >= 8 k sqrt(n) |e(0)|/(c lambda_0),           (A)

`k = 1` for the flow and 2 for descent, `c = max(|A(0)|, |V(0)|)/sqrt(m)`, `e = yhat - y`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.analysis.check import Inequality
from equipoise.families.relu_implicit.gram import limit_gram, limit_variance
from equipoise.families.relu_implicit.network import ReluImplicitNetwork

__all__ = [
    "Quantities",
    "concentration",
    "initialization",
    "quantities",
    "rounding_of",
    "samples_in_general_position",
]

MAX_DEVIATION = 6.0
"""Standard errors by which statistics of Gaussian entries may be off."""
UNIT = 1e-12


@dataclass(frozen=True)
class Quantities:
    """The numbers in which the theorems are stated, at a network's present weights.

    Attributes:
        m: The width.
        n: How many samples.
        gamma: The scale.
        c: `max(|A|, |V|)/sqrt(m)`.
        norm: `|X|`.
        lambda_0: The smallest eigenvalue of `G_inf`.
        first: The smallest eigenvalue of `G(0)`.
        error: `|yhat(0) - y|`.
        heads: `|u|/sqrt(m)` and `|v|/sqrt(m)`.
        rounding: What `lambda_0` may be of a singular `G_inf`.
    """

    m: int
    n: int
    gamma: float
    c: float
    norm: float
    lambda_0: float
    first: float
    error: float
    heads: tuple[float, float]
    rounding: float

    def over_lambda(self, number: float, power: int = 1) -> float:
        """Return `number/lambda_0^power`; infinity where `lambda_0` is zero up to rounding.

        Args:
            number: The numerator.
            power: The exponent.
        """
        return number / self.lambda_0**power if self.lambda_0 > self.rounding else math.inf

    @property
    def radius(self) -> float:
        """`R = sqrt(m) lambda_0/(16 c |X|^2)` of Lemma 3.4."""
        return math.sqrt(self.m) * self.lambda_0 / (16 * self.c * self.norm**2)

    def spectrum(self) -> list[Inequality]:
        """Return what Lemmas 3.4 to 3.6 ask of the spectrum at the start."""
        return [
            Inequality("lambda_0 = lambda_min(G_inf)", self.lambda_0, ">", self.rounding),
            Inequality("lambda_min(G(0)) >= 3 lambda_0/4", self.first, ">=", 0.75 * self.lambda_0),
        ]

    def scale(self) -> list[Inequality]:
        """Return what Lemmas 3.5 and 3.6 ask of `gamma` and of the norms at the start."""
        off = max(abs(one - 1) for one in self.heads)
        return [
            Inequality("gamma < min(1/2, 1/(4c))", self.gamma, "<", min(0.5, 0.25 / self.c)),
            Inequality("||u(0)|/sqrt(m) - 1|, and of v", off, "<=", UNIT),
        ]

    def width(self, *, descent: bool) -> list[Inequality]:
        """Return what the mended Lemma 3.5, or 3.6, asks of the width.

        Args:
            descent: Whether steps are of a finite length.
        """
        k = 2.0 if descent else 1.0
        e, root = self.error, math.sqrt(self.n)
        needs = {
            "u and v": self.over_lambda(8 * k * self.c * root * e),
            "V": self.over_lambda(192 * k * self.c * root * self.norm**2 * e, 2),
            "A": self.over_lambda(8 * k * root * e / self.c),
        }
        found = [
            Inequality(f"width that keeps {name} near the start", self.m, ">=", need**2)
            for name, need in needs.items()
        ]
        limit = 16 * self.c**2 * self.norm**2
        return [*found, Inequality("lambda_0 <= 16 c^2 |X|^2", self.lambda_0, "<=", limit)]

    def step(self, size: float) -> Inequality:
        """Return what Lemma 3.6 asks of the step, with 1 for the constant that it leaves open."""
        return Inequality("step <= lambda_0/n^2", size, "<=", self.lambda_0 / self.n**2)


@torch.no_grad()
def quantities(network: ReluImplicitNetwork, x: Tensor, y: Tensor) -> Quantities:
    """Return the numbers in which the theorems are stated.

    Args:
        network: The network, with one output.
        x: Samples as rows, as the network prepares them.
        y: Targets, shape (n,).
    """
    cell = network.cell
    root = math.sqrt(cell.width)
    phi = cell.inject(x)
    eigenvalues = torch.linalg.eigvalsh(limit_gram(x))
    largest = max(float(torch.linalg.matrix_norm(one, 2)) for one in (cell.A, cell.V))
    return Quantities(
        cell.width,
        len(x),
        cell.gamma,
        largest / root,
        float(torch.linalg.matrix_norm(x, 2)),
        float(eigenvalues[0]),
        float(torch.linalg.eigvalsh(phi @ phi.T)[0]),
        float((network(x)[:, 0] - y).norm()),
        (float(network.u.norm()) / root, float(network.v.norm()) / root),
        rounding_of(eigenvalues),
    )


def rounding_of(eigenvalues: Tensor) -> float:
    """Return what the smallest eigenvalue of a singular matrix may be found to be.

    Args:
        eigenvalues: Those of a symmetric matrix, in ascending order.
    """
    return 10 * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps * float(eigenvalues[-1])


def samples_in_general_position(x: Tensor) -> list[Inequality]:
    """Return Assumption 2: samples have length 1, and no two are parallel.

    Args:
        x: Samples as rows.
    """
    off = float((x.norm(dim=1) - 1).abs().max())
    cosines = (x @ x.T).abs().fill_diagonal_(0.0)
    return [
        Inequality("max ||x_i| - 1|", off, "<=", UNIT),
        Inequality("max |cos(x_i, x_j)|", float(cosines.max()), "<", 1 - UNIT),
    ]


def concentration(width: int, x: Tensor, delta: float) -> Inequality:
    """Return the width of Lemma 3.3 with an explicit constant, by Chebyshev's inequality.

    `E |G(0) - G_inf|_F^2 = v/m`, `v` the sum of the variances, at most `5 n^2/4`; so
    `m >= 16 v/(delta lambda_0^2)` is enough: of the order `n^2/lambda_0^2`, as printed.

    Args:
        width: `m`.
        x: Samples as rows.
        delta: The probability of failure.
    """
    lambda_0 = float(torch.linalg.eigvalsh(limit_gram(x))[0])
    variance = float(limit_variance(x).sum())
    need = 16 * variance / (delta * lambda_0**2) if lambda_0 > 0 else math.inf
    return Inequality(f"width for probability {1 - delta:g}", width, ">=", need)


def initialization(name: str, matrix: Tensor) -> list[Inequality]:
    """Return Assumption 1 as far as it can be seen: mean and variance of the entries.

    Args:
        name: The matrix.
        matrix: Its entries, which should be standard Gaussian.
    """
    matrix = matrix.detach()
    count = matrix.numel()
    mean = abs(float(matrix.mean())) * math.sqrt(count)
    variance = abs(float(matrix.var()) - 1) * math.sqrt(count / 2)
    return [
        Inequality(f"standard errors of the mean of {name}", mean, "<=", MAX_DEVIATION),
        Inequality(f"standard errors of the variance of {name}", variance, "<=", MAX_DEVIATION),
    ]
