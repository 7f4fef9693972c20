"""OptEq's statements about choosing equilibria and about training as checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.analysis.check import Case, Finding, Inequality, largest, register_check, smallest
from equipoise.families.opteq.layer import OptEq
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
from equipoise.families.opteq.training_bound import TrainingBound, training_bound
from equipoise.families.opteq.unrolled_network import UnrolledNetwork
from equipoise.prox import Custom
from equipoise.solvers import SAM, Stop, solve

__all__ = ["lemma_9", "lemma_16", "lemmas", "theorem_5", "theorem_6"]

MAX_PARAMETERS = 3000
"""Parameters of a network whose Jacobian is written out."""
PASSES = 8
"""Passes through the layers of the unrolled network."""
SLOPE = torch.tanh
"""The gradient of `l(x) = sum log cosh x`, whose Lipschitz constant is 1."""
LEMMAS = {
    "Lemma 12": "all states are bounded by B*",
    "Lemma 14": "a layer's derivatives in its state and its weights are bounded",
    "Lemma 15": "the state's derivatives in the weights of each layer are bounded",
    "Lemma 19": "the state is a Lipschitz function of all weights",
}


@register_check(
    "opteq-lemma-9",
    "S(x) = x - gamma (grad l(x) + lambda x) with gamma = 1/(2 L) and lambda <= L/2 contracts by "
    "1 - gamma lambda/2, and by no less than 1/4",
    paper=PAPER,
    number="Lemma 9 (arXiv)",
    subject=OPTEQ,
)
@torch.no_grad()
def lemma_9(case: Case) -> Finding:
    """Take a function with `L = 1`, at pairs of states."""
    gamma, decay = 0.5, 0.25
    states = points(case)
    low, high = math.inf, 0.0
    for x in states:
        for y in states:
            if x is y:
                continue
            moved = (x - y) - gamma * (SLOPE(x) - SLOPE(y) + decay * (x - y))
            ratio = moved.norm(dim=1) / (x - y).norm(dim=1)
            low = smallest(low, float(ratio.min()))
            high = largest(high, float(ratio.max()))
    return Finding(
        [Inequality("lambda and L/2", decay, "<=", 0.5)],
        [
            Inequality("smallest ratio of distances", low, ">=", 0.25),
            Inequality("largest ratio of distances", high, "<=", 1 - gamma * decay / 2),
        ],
    )


def _cone(seed: int) -> Case:
    """One layer whose fixed points are a cone, `W^T q` with `q >= 0`: orthonormal `W`, no input."""
    layer = OptEq(3, 6, 4, alpha=1.0, norm="none").double()
    with torch.no_grad():
        weight: Any = layer.layers.operators[0].weight
        weight.copy_(torch.linalg.qr(torch.randn(6, 4, dtype=torch.float64))[0].T)
        for own in layer.layers.inputs.parameters():
            own.zero_()
    x = torch.randn(4, 3, dtype=torch.float64)
    network = Composition(tuple(layer.layers.potentials(x)), (1.0,), layer)
    for potential in network.potentials:
        potential.sharpen()
    label = f"random, a cone of equilibria, 4 samples, seed {seed}"
    return Case(network, x, torch.zeros(4, dtype=torch.float64), label, seed)


@register_check(
    "opteq-theorem-5",
    "sequential averaging tends to the fixed point of T with the smallest convex R, for "
    "rho + 2 c < 1",
    paper=PAPER,
    number="Theorem 5",
    subject=OPTEQ,
    fresh=_cone,
)
@torch.no_grad()
def theorem_5(case: Case) -> Finding:
    """Minimise `|z - a|^2/2` over the equilibria, where its minimiser is known."""
    composition: Composition = case.network
    a = points(case, 2)[1]
    wanted = _nearest(composition, a)
    averaging = SAM(Custom(_distance_to(a)), lipschitz=1.0)
    hypotheses = [
        *assumption_2(case),
        Inequality("rho + 2 c", averaging.rho + 2 * averaging.decay, "<", 1.0),
    ]
    if not all(own.holds for own in hypotheses):
        return Finding(hypotheses, [])
    if wanted is None:
        unknown = Inequality(
            "distance to the wanted fixed point, which is not known", math.nan, "<=", 0
        )
        return Finding(hypotheses, [unknown])
    before, after = (
        float((_averaged(composition, averaging, steps) - wanted).norm(dim=1).max())
        for steps in (30, 3000)
    )
    return Finding(
        [*hypotheses, residual_of(composition, wanted)],
        [
            Inequality(
                "distance after 3,000 steps, half of that after 30", after, "<=", before / 2
            ),
        ],
        "the theorem names no rate: that its distance halves is our measure of convergence",
    )


def _nearest(composition: Composition, a: Tensor) -> Tensor | None:
    """The equilibrium nearest to `a`, if there is one alone, or if they are the cone."""
    if composition.factor < 1:
        return equilibrium_of(composition, composition.start)
    (potential, *others) = composition.potentials
    W = potential.matrix
    if others or W is None or potential.c.any():
        return None
    gap = W @ W.T - torch.eye(len(W), dtype=W.dtype)
    return potential.prox(a) if float(gap.abs().max()) < SMALL else None


def _distance_to(a: Tensor) -> Callable[[Tensor], Tensor]:
    def value(z: Tensor) -> Tensor:
        return (z - a).square().sum(dim=1) / 2

    return value


def _averaged(composition: Composition, averaging: SAM, steps: int) -> Tensor:
    # Negligible tolerance: it makes all of its steps.
    found: Tensor = solve(
        composition, composition.start, averaging, Stop(1e-15, max_steps=steps)
    ).value
    return found


def _trainable(seed: int) -> Case:
    """A dense network of one layer with square, well-conditioned weights and a smooth slope."""
    layer = OptEq(4, 5, 5, "identity", alpha=0.02, norm="none").double()
    with torch.no_grad():
        weight: Any = layer.layers.operators[0].weight
        weight.copy_(0.7 * torch.linalg.qr(torch.randn(5, 5).double())[0])
    x = torch.randn(3, 4, dtype=torch.float64)
    network = Composition(tuple(layer.layers.potentials(x)), (0.02,), layer)
    zero = torch.zeros(3, 1, dtype=torch.float64)
    unrolled = UnrolledNetwork.read(layer, _head(layer, seed), x, zero, PASSES)
    # The step of the theorem and what it assumes of the start are for targets that are near.
    y = unrolled.output(unrolled.theta).detach() + 1e-6 * torch.randn(3, dtype=torch.float64)
    return Case(network, x, y, f"random, one layer, 3 samples, alpha 0.02, seed {seed}", seed)


def _head(layer: OptEq, seed: int) -> nn.Linear:
    """A random linear map to one number."""
    head = nn.Linear(layer.state_features, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        head.weight.normal_(std=0.5, generator=generator)
    return head


def _bound(case: Case) -> tuple[list[Inequality], TrainingBound | None]:
    """What the theorem says of the layer with a random head, or why it cannot be asked."""
    layer: OptEq | None = case.network.layer
    dense = Inequality("layers that are dense, without wrappers", float(layer is not None), ">=", 1)
    if layer is None:
        return [dense], None
    count = sum(own.numel() for own in layer.parameters())
    fits = Inequality("parameters, whose Jacobian is written out", count, "<=", MAX_PARAMETERS)
    cell = layer.layers
    shared = Inequality("one alpha for all layers, mu = 1", cell.shared_alpha * cell.mu, ">=", 1.0)
    if not (fits.holds and shared.holds and cell.mu == 1):
        return [dense, fits, shared], None
    head = _head(layer, case.seed)
    y = case.y.reshape(len(case.x), -1)[:, :1].double()
    found = training_bound(copy.deepcopy(layer).double(), head, case.x, y, steps=PASSES)
    return [dense, fits, shared, *found.assumptions], found


@register_check(
    "opteq-theorem-6",
    "gradient descent with steps below min(1/Q_0, 1/Q_1) lowers the loss by the factor "
    "1 - step Q_0",
    paper=PAPER,
    number="Theorem 6",
    subject=OPTEQ,
    fresh=_trainable,
)
def theorem_6(case: Case) -> Finding:
    """Make ten steps of gradient descent with the theorem's step, with a random head."""
    hypotheses, bound = _bound(case)
    if bound is None:
        return Finding(hypotheses, [])
    rate = Inequality("measured factor of the loss", bound.measured_rate, "<=", bound.rate, 1e-12)
    return Finding(
        hypotheses, [rate], "the proof rests on Lemma 16, which is false: see the errata"
    )


@register_check(
    "opteq-lemma-16",
    "the loss's gradient is at least sqrt(lambda_min(J J^T)) times the distance of the outputs; "
    "printed with a constant that is too large",
    paper=PAPER,
    number="Lemma 16 (arXiv), corrected",
    subject=OPTEQ,
    fresh=_trainable,
)
def lemma_16(case: Case) -> Finding:
    """Compare the gradient with the smallest eigenvalue, and with what is printed."""
    hypotheses, bound = _bound(case)
    if bound is None or case.network.layer is None:
        return Finding(hypotheses[:3], [])
    layer = copy.deepcopy(case.network.layer).double()
    y = case.y.reshape(len(case.x), -1)[:, :1].double()
    network = UnrolledNetwork.read(layer, _head(layer, case.seed), case.x, y, PASSES)
    gradient = float(torch.func.grad(network.loss)(network.theta).square().sum())
    distance = 2 * float(network.loss(network.theta))
    (printed,) = (each for each in bound.lemmas if each.claim.startswith("Lemma 16:"))
    word = "holds" if printed.holds else "is false"
    return Finding(
        hypotheses[:3],
        [Inequality("|grad|^2", gradient, ">=", bound.kernel[0] * distance, 1e-9 * gradient)],
        f"as printed it {word} here: {printed.value:.3g} >= {printed.bound:.3g}",
    )


def _register_lemma(name: str, statement: str) -> Callable[[Case], Finding]:
    def measure(case: Case) -> Finding:
        hypotheses, bound = _bound(case)
        if bound is None:
            return Finding(hypotheses, [])
        # What later parts of the proof assume is no part of the lemma.
        own = [each for each in hypotheses if not each.claim.startswith(("eq. 31", "Lemma"))]
        own += [each for each in hypotheses if each.claim.startswith(f"{name}:")]
        own = [each for each in own if "sigma_min" not in each.claim and "kappa" not in each.claim]
        return Finding(own, [each for each in bound.lemmas if each.claim.startswith(f"{name}:")])

    number = name.replace(" ", "-").lower()
    return register_check(
        f"opteq-{number}",
        statement,
        paper=PAPER,
        number=f"{name} (arXiv)",
        subject=OPTEQ,
        fresh=_trainable,
    )(measure)


lemmas = {name: _register_lemma(name, statement) for name, statement in LEMMAS.items()}
