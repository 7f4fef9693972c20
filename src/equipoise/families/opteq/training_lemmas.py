"""The constants of the theorem on training, and the inequalities of its proof, measured.

OptEq v1, section G.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equipoise.analysis.check import Inequality
from equipoise.families.opteq.unrolled_network import UnrolledNetwork
from equipoise.prox.activation import Activation

__all__ = ["find_constants", "measure_lemmas"]


ROUNDING = 1e-9
"""Relative to the bound."""


def _at_most(claim: str, value: float, bound: float) -> Inequality:
    return Inequality(claim, value, "<=", bound, _rounding(bound))


def _rounding(bound: float) -> float:
    return ROUNDING * abs(bound) if math.isfinite(bound) else 0.0


def find_constants(
    network: UnrolledNetwork, extractor: float
) -> tuple[dict[str, float], tuple[Inequality, ...]]:
    """Return the constants of eq. 30, and what the theorem and its proof assume.

    Args:
        network: The network.
        extractor: `L_g`.
    """
    head, *rest = network.split(network.theta)
    weights, inputs, biases = rest[::3], rest[1::3], rest[2::3]
    N, L, K, alpha = len(network.x), len(weights), network.passes + 1, network.alpha
    slopes = [own.slopes for own in network.activations]
    kappa = min(slope for slope, _ in slopes)
    bent = max(_derivative_lipschitz(own) for own in network.activations)
    offset = max(float(own(head.new_zeros(1)).abs().max()) for own in network.activations)
    norms = [float(torch.linalg.matrix_norm(W, 2)) for W in weights]
    least = min(_smallest(W) for W in weights)
    sigma = max(least - 0.25, 0.0)
    B_Ub = 2 * max(
        *(float(torch.linalg.matrix_norm(U, 2)) for U in inputs),
        *(float(b.norm()) for b in biases),
    )
    B_x, B_L = 2 * float(network.x.norm()), 2 * float(torch.linalg.matrix_norm(head, 2))
    widths = [len(W) for W in weights]
    bound = (
        alpha
        * (K - 1)
        * sum(math.sqrt(N * n) * offset + B_Ub * (B_x + math.sqrt(N)) for n in widths)
    )
    C_z = math.sqrt(head.shape[1] * max(widths)) * offset + 6 * bound + 3 * B_Ub * B_x
    C_D = max(3 * bound, B_x)
    B_J = 2 * alpha * math.sqrt(L) * K * C_z
    C_J = (
        bent * bound * alpha * (9 * math.sqrt(L) * C_z * extractor + 2 * math.sqrt(3 * L) * K * C_D)
    )
    root = math.sqrt(float(network.loss(network.theta)))
    head_least = _smallest(head)
    Q0 = K**2 * L * alpha**2 * kappa**2 * sigma**2 * N * head_least**2 / 4
    Q1 = C_J * root + 2 * alpha * math.sqrt(L) * K * C_z * extractor * B_J * B_L + B_J * root
    constants = {
        "B*": bound,
        "B_Ub": B_Ub,
        "B_x": B_x,
        "B_L": B_L,
        "sigma_m": sigma,
        "kappa": kappa,
        "L_s": bent,
        "C_D": C_D,
        "C_z": C_z,
        "B_J": B_J,
        "C_J": C_J,
        "Q0": Q0,
        "Q1": Q1,
        "Q2": 10 * C_z * B_L * extractor / Q0 if Q0 else math.inf,
    }
    large = alpha * K * C_z * B_L * root * math.sqrt(2)
    return constants, (
        _at_most("Assumption 1: slope of the activation", max(own[1] for own in slopes), 1),
        Inequality("Theorem 6: strongly monotone, kappa", kappa, ">", 0),
        Inequality("Theorem 6: smooth activation, L_s", bent, "<", math.inf),
        _at_most("Assumption 5: max |W_l|", max(norms), 0.75),
        Inequality("Assumption 5: min sigma_min(W_l) and 1/4", least, ">", 0.25),
        Inequality("Assumption 5: sigma_min(W_(L+1))", head_least, ">", 0),
        _at_most("Lemma 12: alpha and ln 2/(2 L)", alpha, math.log(2) / (2 * L)),
        _at_most("Lemma 16: alpha K L", alpha * K * L, 1),
        _at_most("Lemma 14: sqrt N and B_x", math.sqrt(N), B_x),
        _at_most(
            "eq. 31: 2 alpha K C_z B_L |y - y_0|/Q_0", 2 * large / Q0 if Q0 else math.inf, 0.25
        ),
    )


def measure_lemmas(
    network: UnrolledNetwork, constants: dict[str, float], extractor: float
) -> tuple[Inequality, ...]:
    """Return the inequalities of Lemmas 12 and 14 to 19 and of the last step, measured.

    Args:
        network: The network.
        constants: Those of `find_constants`.
        extractor: `L_g`.
    """
    theta, N, K, alpha = network.theta, len(network.x), network.passes + 1, network.alpha
    head, *rest = network.split(theta)
    L = len(rest) // 3
    z = network.state(theta)
    residual = (z @ head.mT - network.y).norm()
    B, C_z, B_Ub, B_x, B_L = (constants[name] for name in ("B*", "C_z", "B_Ub", "B_x", "B_L"))
    inner = C_z - B_Ub * B_x  # Lemma 14 has 2 B_Ub B_x where C_z has 3
    own = {"W": inner, "U": B_x, "b": math.sqrt(N)}
    found = [_at_most("Lemma 12: |z^K|", float(z.norm()), B)]
    layers: dict[str, list[float]] = {"z": [], "W": [], "U": [], "b": []}
    for number in range(L):
        args = (z, *rest[3 * number : 3 * number + 3])
        for place, name in enumerate(layers):
            function = _with(network, number, args, place)
            layers[name].append(_norm(torch.func.jacrev(function)(args[place]), z.numel()))
    found.append(_at_most("Lemma 14: |df_l/dz|", max(layers["z"]), 1))
    found += [
        _at_most(f"Lemma 14: |df_l/d{name}_l|", max(layers[name]), alpha * bound)
        for name, bound in own.items()
    ]
    spread = torch.split(
        torch.func.jacrev(lambda t: network.state(t).flatten())(theta),
        [shape.numel() for shape in network.shapes],
        dim=1,
    )
    gradient = torch.func.grad(network.loss)(theta)
    slopes = torch.split(gradient, [shape.numel() for shape in network.shapes])
    for place, (name, bound) in enumerate(own.items()):
        largest = max(float(torch.linalg.matrix_norm(own, 2)) for own in spread[1 + place :: 3])
        limit = (K - 1) * alpha * bound
        found.append(_at_most(f"Lemma 15: |dz^K/d{name}_l|", largest, limit))
        steepest = max(float(own.norm()) for own in slopes[1 + place :: 3])
        limit *= B_L * float(residual)
        found.append(_at_most(f"eq. 22: |grad_{name}_l|", steepest, limit))
    biases = sum(float(own.square().sum()) for own in slopes[3::3])
    least = 4 * constants["Q0"] * float(residual) ** 2
    found.append(Inequality("Lemma 16: sum_l |grad_b_l|^2", biases, ">=", least, _rounding(least)))
    steepest = float(slopes[0].norm())
    found.append(_at_most("eq. 27: |grad_W_(L+1)|", steepest, 3 * K * B * float(residual)))
    direction = torch.randn(
        theta.shape, dtype=theta.dtype, generator=torch.Generator().manual_seed(0)
    )
    length = 1e-4 * float(theta.norm() / direction.norm())
    other = theta + length * direction
    moved = float((other - theta).norm())
    change = float((network.state(other) - z).norm()) / moved
    limit = 2 * alpha * math.sqrt(L) * K * C_z * extractor
    found.append(_at_most("Lemma 19: change of z^K", change, limit))
    turned = float((torch.func.grad(network.loss)(other) - gradient).norm()) / moved
    curvature = max(turned, _curvature(network))
    found.append(_at_most("Q_1: largest curvature of the loss", curvature, constants["Q1"]))
    return tuple(found)


def _with(
    network: UnrolledNetwork, number: int, args: tuple[Tensor, ...], place: int
) -> Callable[[Tensor], Tensor]:
    """A layer as a function of one of its arguments."""

    def function(value: Tensor) -> Tensor:
        given = [value if each == place else arg for each, arg in enumerate(args)]
        z, W, U, b = given
        return network.layer(number, z, W, U, b).flatten()

    return function


def _norm(jacobian: Tensor, rows: int) -> float:
    return float(torch.linalg.matrix_norm(jacobian.reshape(rows, -1), 2))


def _curvature(network: UnrolledNetwork, iterations: int = 50) -> float:
    """The largest curvature of the loss, from below: power iterations on the Hessian."""
    theta = network.theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(network.loss(theta), theta, create_graph=True)
    v = torch.ones_like(theta)
    found = 0.0
    for _ in range(iterations):
        v = v / v.norm()
        (v,) = torch.autograd.grad(gradient, theta, v, retain_graph=True)
        found = max(found, float(v.norm()))
    return found


def _smallest(W: Tensor) -> float:
    """The smallest `|W^T y|/|y|`: zero if there are more rows than columns."""
    return float(torch.linalg.svdvals(W)[-1]) if W.shape[0] <= W.shape[1] else 0.0


def _derivative_lipschitz(activation: Activation) -> float:
    """A Lipschitz constant of the slope, sampled; infinite where finer samples show a jump."""
    found = []
    for count in (20_001, 80_001):
        a = torch.linspace(-20, 20, count, dtype=torch.float64)
        slope = activation.derivative(a)
        found.append(float((slope.diff() / a.diff()).abs().max()))
    return math.inf if found[1] > 2 * found[0] else found[1]
