"""The thesis's statements about equilibria, gradients and the kernel as checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check
from equipoise.analysis.kernel import tangent_kernel
from equipoise.families.monotone.kernel import MonotoneRegression, monotone_forms
from equipoise.families.monotone.subject import MONOTONE, PAPER

__all__ = [
    "lemma_3_2_1",
    "lemma_3_2_2",
    "lemma_3_2_3",
    "lemma_3_3_2",
    "lemma_3_3_3",
    "lemma_3_3_4",
    "lemma_3_3_6",
    "proposition_3",
    "proposition_4",
]

EXACT = 1e-8
ROUNDING = 1e-12
DRAWS = 5


def spectral(matrix: Tensor) -> float:
    """Return the spectral norm."""
    return float(torch.linalg.matrix_norm(matrix.detach(), 2))


def monotone_margin(network: MonotoneRegression) -> Inequality:
    """Return the hypothesis that the matrix that is iterated has the margin that it claims.

    Args:
        network: The network.
    """
    W = network.W.detach()
    eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
    least = float(torch.linalg.eigvalsh(eye - (W + W.T) / 2)[0])
    margin = network.operator.margin
    return Inequality("smallest eigenvalue of I - (W + W^T)/2", least, ">=", margin, 1e-10)


def _directions(network: MonotoneRegression) -> tuple[Tensor, Tensor, Tensor]:
    """Random changes of `A`, `B` and `U`."""
    operator = network.operator
    return torch.randn_like(operator.A), torch.randn_like(operator.B), torch.randn_like(network.U)


def _change_of_w(network: MonotoneRegression, dA: Tensor, dB: Tensor) -> Tensor:
    """`P_A vec dA + P_B vec dB` of Lemma 3.2.1, as a matrix."""
    A = network.operator.A.detach()
    return -(A.T @ dA) - dA.T @ A + dB - dB.T


@register_check(
    "monotone-lemma-3.2.1",
    "the derivatives of g(Z) = Z - relu(W Z + U X) are I - D W in Z, -D [Z^T (x) I] P_A in A, "
    "-D [Z^T (x) I] P_B in B and -D [X^T (x) I] in U",
    paper=PAPER,
    number="Lemma 3.2.1",
    subject=MONOTONE,
)
def lemma_3_2_1(case: Case) -> Finding:
    """Compare with forward-mode derivatives along random directions."""
    network, x = case.network, case.x
    A, B, U = network.operator.A.detach(), network.operator.B.detach(), network.U.detach()
    z = monotone_forms(network, x).z + 0.1 * torch.rand(len(x), len(A), dtype=x.dtype)
    eye = torch.eye(len(A), dtype=x.dtype, device=x.device)

    def g(z: Tensor, A: Tensor, B: Tensor, U: Tensor) -> Tensor:
        W = (1 - network.operator.margin) * eye - A.T @ A + B - B.T
        return z - torch.relu(z @ W.T + x @ U.T)

    dA, dB, dU = _directions(network)
    dz = torch.randn_like(z)
    found: Tensor = torch.func.jvp(g, (z, A, B, U), (dz, dA, dB, dU))[1]
    W = network.W.detach()
    inside = z @ W.T + x @ U.T
    moved = dz @ W.T + z @ _change_of_w(network, dA, dB).T + x @ dU.T
    expected = dz - (inside > 0) * moved
    return Finding(
        [Inequality("distance of pre-activations from 0", float(inside.abs().min()), ">", 0.0)],
        [
            Inequality(
                "relative error", float((found - expected).norm() / found.norm()), "<=", EXACT
            )
        ],
    )


@register_check(
    "monotone-lemma-3.2.2",
    "the derivatives of the equilibria are Q^-1 D [Z^T (x) I] P_A in A, Q^-1 D [Z^T (x) I] P_B in "
    "B and Q^-1 D [X^T (x) I] in U, Q = I - D W",
    paper=PAPER,
    number="Lemma 3.2.2",
    subject=MONOTONE,
)
@torch.no_grad()
def lemma_3_2_2(case: Case) -> Finding:
    """Compare with differences of equilibria that the layer finds."""
    network, x = case.network, case.x
    z = monotone_forms(network, x).z
    W = network.W
    inside = z @ W.T + x @ network.U.T
    active = (inside > 0).to(z)
    dA, dB, dU = _directions(network)
    moved = active * (z @ _change_of_w(network, dA, dB).T + x @ dU.T)
    eye = torch.eye(len(W), dtype=x.dtype, device=x.device)
    expected = torch.stack(
        [
            torch.linalg.solve(eye - lit[:, None] * W, one)
            for lit, one in zip(active, moved, strict=True)
        ]
    )
    weights = [network.operator.A, network.operator.B, network.U]
    kink = float(inside.abs().min())
    h = min(1e-6, 0.1 * kink / float(expected.abs().max()))
    sides = []
    for sign in (1.0, -1.0):
        kept = [one.clone() for one in weights]
        for one, change in zip(weights, (dA, dB, dU), strict=True):
            one.add_(change, alpha=sign * h)
        sides.append(network.equilibrium(x))
        for one, old in zip(weights, kept, strict=True):
            one.copy_(old)
    found = (sides[0] - sides[1]) / (2 * h)
    error = float((found - expected).norm() / expected.norm())
    return Finding(
        [monotone_margin(network), Inequality("distance of pre-activations from 0", kink, ">", 0)],
        [Inequality("relative error", error, "<=", 1e-4)],
        "As in the text; the appendix prints other signs.",
    )


@register_check(
    "monotone-lemma-3.2.3",
    "the gradients of the loss in A, B, U and u have closed forms",
    paper=PAPER,
    number="Lemma 3.2.3",
    subject=MONOTONE,
)
def lemma_3_2_3(case: Case) -> Finding:
    """Compare with autograd through the layer, whose adjoint equation is solved by a splitting."""
    network = case.network
    exact = monotone_forms(network, case.x).gradients(case.y)
    loss = (network(case.x)[:, 0] - case.y).square().sum() / 2
    weights = {"A": network.operator.A, "B": network.operator.B, "U": network.U, "u": network.u}
    found = torch.autograd.grad(loss, list(weights.values()))
    # Where targets are near predictions, rounding of the predictions is what is left.
    size = float(case.network(case.x).detach().norm())
    error = float((monotone_forms(network, case.x).output - case.y).norm())
    bound = max(EXACT, 1e-12 * size / error if error else math.inf)
    return Finding(
        [monotone_margin(network)],
        [
            Inequality(
                f"relative error of dL/d{name}",
                float((exact[name] - one).norm() / one.norm()),
                "<=",
                bound,
            )
            for name, one in zip(weights, found, strict=True)
        ],
        "With I_N (x) u^T where u^T (x) I_N is printed.",
    )


@register_check(
    "monotone-proposition-3",
    "T_a = I - a (I - W) has a Lipschitz constant of at most sqrt(1 - 2 a m + a^2 L^2), "
    "L = |I - W|, below 1 for 0 < a < 2 m/L^2",
    paper=PAPER,
    number="Proposition 3",
    subject=MONOTONE,
)
@torch.no_grad()
def proposition_3(case: Case) -> Finding:
    """Compute the norm of the operator's own products, for step sizes over the whole range."""
    network = case.network
    operator, m = network.operator, network.operator.margin
    eye = torch.eye(len(network.u), dtype=case.x.dtype, device=case.x.device)
    L = spectral(eye - network.W)
    products = operator.apply_with(operator.weights(), eye)  # W^T, of the same norms
    conclusions = []
    for fraction in (0.01, 0.25, 0.5, 0.75, 0.99):
        a = fraction * 2 * m / L**2
        bound = math.sqrt(max(1 - 2 * a * m + (a * L) ** 2, 0.0))
        norm = spectral(eye - a * (eye - products))
        claim = f"|T_a| at a = {fraction:g} * 2m/L^2"
        conclusions += [
            Inequality(claim, norm, "<=", bound, ROUNDING),
            Inequality(claim, norm, "<", 1.0),
        ]
    return Finding([monotone_margin(network)], conclusions)


@register_check(
    "monotone-proposition-4",
    "along the gradient flow the predictions move by d yhat/dt = -K (yhat - y), "
    "K = J_A J_A^T + J_B J_B^T + J_U J_U^T + Z^T Z",
    paper=PAPER,
    number="Proposition 4",
    subject=MONOTONE,
)
def proposition_4(case: Case) -> Finding:
    """Compare the closed form with the Jacobians of autograd."""
    K = monotone_forms(case.network, case.x).kernel()
    found = tangent_kernel(case.network, case.x)
    least = float(torch.linalg.eigvalsh(K)[0])
    features = float(torch.linalg.svdvals(monotone_forms(case.network, case.x).z)[-1])
    low = features**2 if len(case.network.u) >= len(case.x) else 0.0
    return Finding(
        [monotone_margin(case.network)],
        [
            Inequality("|K - J J^T|/|K|", float((K - found).norm() / found.norm()), "<=", EXACT),
            Inequality("(3.14) lambda_min(K)", least, ">=", low, ROUNDING * float(K.norm())),
        ],
        "K = J J^T and I_N (x) u^T where J^T J and u^T (x) I_N are printed.",
    )


@register_check(
    "monotone-lemma-3.3.2",
    "|(I_N (x) u^T) Q^-1 D| <= |u|/m",
    paper=PAPER,
    number="Lemma 3.3.2",
    subject=MONOTONE,
)
def lemma_3_3_2(case: Case) -> Finding:
    """Differentiate predictions in `U X`; rows do not overlap, and the longest is the norm."""
    network, x = case.network, case.x
    c = (x @ network.U.T).detach().requires_grad_()
    layer = network.equilibrium
    z = layer(x, context=(c, *layer.cell.inject(x)[1:]))
    (rows,) = torch.autograd.grad((z @ network.u).sum(), c)
    longest = float(rows.norm(dim=1).max())
    W, u = network.W.detach(), network.u.detach()
    eye = torch.eye(len(W), dtype=x.dtype, device=x.device)
    lit = (z.detach() @ W.T + c.detach() > 0).to(x)
    printed = max(float(torch.linalg.solve((eye - one[:, None] * W).T, u).norm()) for one in lit)
    bound = float(u.norm()) / network.operator.margin
    return Finding(
        [monotone_margin(network)],
        [Inequality("longest row", longest, "<=", bound, ROUNDING * bound)],
        f"Without D, as printed, the norm is {printed:.4g} here; it has no such bound.",
    )


@register_check(
    "monotone-lemma-3.3.3",
    "|Z|_F <= |X|_F |U|/m",
    paper=PAPER,
    number="Lemma 3.3.3",
    subject=MONOTONE,
)
@torch.no_grad()
def lemma_3_3_3(case: Case) -> Finding:
    """Measure the equilibria that the layer finds."""
    network, x = case.network, case.x
    bound = float(x.norm()) * spectral(network.U) / network.operator.margin
    return Finding(
        [monotone_margin(network)],
        [Inequality("|Z|_F", float(network.equilibrium(x).norm()), "<=", bound)],
    )


@register_check(
    "monotone-lemma-3.3.4",
    "changes of the weights change equilibria by at most |X|_F (|dU|/m + |dW| |U|/m^2), and "
    "predictions accordingly",
    paper=PAPER,
    number="Lemma 3.3.4",
    subject=MONOTONE,
)
@torch.no_grad()
def lemma_3_3_4(case: Case) -> Finding:
    """Try random changes, small and large."""
    network, x = case.network, case.x
    m, size = network.operator.margin, float(x.norm())
    W, U, u = network.W, network.U.clone(), network.u.clone()
    z = network.equilibrium(x)
    states, outputs = 0.0, 0.0
    weights = [network.operator.A, network.operator.B, network.U, network.u]
    kept = [one.clone() for one in weights]
    for draw in range(DRAWS):
        for one in weights:
            one.add_(torch.randn_like(one) * (0.1 ** (draw - 1)) * one.std())
        other = network.equilibrium(x)
        dU, dW, du = spectral(network.U - U), spectral(network.W - W), float((network.u - u).norm())
        moved = size * (dU / m + dW * spectral(U) / m**2)
        states = largest(states, float((other - z).norm()) / moved)
        length = float(network.u.norm())
        allowed = length * moved + size * spectral(U) / m * du
        outputs = largest(outputs, float((other @ network.u - z @ u).norm()) / allowed)
        for one, old in zip(weights, kept, strict=True):
            one.copy_(old)
    return Finding(
        [monotone_margin(network)],
        [
            Inequality("largest change of Z over its bound", states, "<=", 1.0),
            Inequality("largest change of yhat over its bound", outputs, "<=", 1.0),
        ],
    )


@register_check(
    "monotone-lemma-3.3.6",
    "|dW| <= 2 |A| |dA| + |dA|^2 + 2 |dB|",
    paper=PAPER,
    number="Lemma 3.3.6",
    subject=MONOTONE,
)
@torch.no_grad()
def lemma_3_3_6(case: Case) -> Finding:
    """Try random changes, small and large, and the worst of one sign."""
    network = case.network
    operator = network.operator
    A, B, W = operator.A.clone(), operator.B.clone(), network.W
    worst = 0.0
    for draw in range(DRAWS):
        dA = A.clone() if draw == 0 else torch.randn_like(A) * 0.1**draw
        dB = torch.zeros_like(B) if draw == 0 else torch.randn_like(B) * 0.1**draw
        operator.A.add_(dA)
        operator.B.add_(dB)
        bound = 2 * spectral(A) * spectral(dA) + spectral(dA) ** 2 + 2 * spectral(dB)
        worst = largest(worst, spectral(network.W - W) / bound)
        operator.A.copy_(A)
        operator.B.copy_(B)
    return Finding([], [Inequality("largest |dW| over its bound", worst, "<=", 1.0, 1e-10)])
