"""OptEq's statements about feed-forward networks as checks."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor, nn

from equipoise.analysis.check import (
    Case,
    Finding,
    Inequality,
    Subject,
    count_of,
    largest,
    register_check,
    smallest,
)
from equipoise.core.module_mode import evaluation_mode
from equipoise.families.opteq.convert import to_hidden_units, to_opteq
from equipoise.families.opteq.feedforward import read
from equipoise.families.opteq.layer import OptEq
from equipoise.families.opteq.subject import PAPER, SMALL, Composition

__all__ = ["lemma_1", "lemma_2", "lemma_4"]


def _fresh(seed: int) -> Case:
    network = nn.Sequential(
        nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()
    x = torch.randn(16, 5, dtype=torch.float64)
    return Case(network, x, x[:, 0], f"random, 5-7-4-3, 16 samples, seed {seed}", seed)


@torch.no_grad()
def _adapt(model: nn.Module, x: Tensor, y: Tensor) -> Case | None:
    """Take the first part of a model that is a feed-forward network, at the input that it gets."""
    for part in model.modules():
        if not isinstance(part, nn.Sequential):
            continue
        try:
            read(part, "verify.network")
        except ValueError:
            continue
        seen: list[Tensor] = []
        hook = part.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        try:
            with evaluation_mode(model):
                model(x)
        finally:
            hook.remove()
        if seen:
            network = copy.deepcopy(part).double().eval()
            return Case(
                network,
                seen[0].double(),
                y,
                f"{count_of(len(part), 'part')}, {count_of(len(x), 'sample')}",
            )
    return None


FEEDFORWARD = Subject("a feed-forward network", _fresh, _adapt)


@register_check(
    "opteq-lemma-1",
    "every feed-forward network has weights Wb_k with W_k = Wb_k Wb_(k-1)^T, so that each of its "
    "layers is Wb^T s(Wb z + b), for states of m >= max(n_k + n_(k+1)) numbers",
    paper=PAPER,
    number="Lemma 1",
    subject=FEEDFORWARD,
)
@torch.no_grad()
def lemma_1(case: Case) -> Finding:
    """Convert the network, and compare matrices and outputs."""
    parts, made = read(case.network, "verify.network"), to_hidden_units(case.network)
    widths = [len(W) for W in made.weights][1:-1]
    needed = max((a + b for a, b in pairwise(widths)), default=0)
    lost = 0.0
    for before, own, wanted in zip(made.weights, made.weights[1:], parts.matrices, strict=False):
        lost = largest(lost, _relative(own @ before.T, wanted))
    return Finding(
        [Inequality("m and max(n_k + n_(k+1))", made.state_features, ">=", needed)],
        [
            Inequality("|W_k - Wb_k Wb_(k-1)^T|, relative", lost, "<=", SMALL),
            Inequality(
                "difference of the outputs, relative",
                _relative(made(case.x), case.network(case.x)),
                "<=",
                SMALL,
            ),
        ],
    )


@register_check(
    "opteq-lemma-2",
    "every feed-forward network is a deep OptEq, whose equilibrium a single pass reaches",
    paper=PAPER,
    number="Lemma 2",
    subject=FEEDFORWARD,
)
@torch.no_grad()
def lemma_2(case: Case) -> Finding:
    """Convert the network, and compare the outputs of an equilibrium and of one pass."""
    read(case.network, "verify.network")
    made = to_opteq(case.network, on_failure="ignore")
    wanted, found = case.network(case.x), made(case.x)
    layer = made.equilibrium
    assert isinstance(layer, OptEq)
    x = case.x if made[0] is layer else made[0](case.x)
    z = layer(x)
    passes = Composition(tuple(layer.layers.potentials(x)), (1.0,) * len(layer.layers.alpha))
    once = passes(torch.randn_like(z))
    slopes = [own.slopes for own in read(case.network, "verify.network").activations]
    return Finding(
        [Inequality("smallest slope of an activation", min(low for low, _ in slopes), ">=", 0.0)],
        [
            Inequality("difference of outputs, relative", _relative(found, wanted), "<=", SMALL),
            Inequality(
                "a pass from anywhere, and the equilibrium", _relative(once, z), "<=", SMALL
            ),
        ],
    )


@register_check(
    "opteq-lemma-4",
    "for any W (m x n) and A (m x k) of full rank, k > max(m, n), some B (n x k) of full rank has "
    "W = A B^T",
    paper=PAPER,
    number="Lemma 4 (arXiv)",
    subject=FEEDFORWARD,
)
@torch.no_grad()
def lemma_4(case: Case) -> Finding:
    """Take `B^T = A^+ W` and what `A` maps to zero, for each weight `W` and a random `A`."""
    lost, least, rank = 0.0, torch.inf, torch.inf
    for W in read(case.network, "verify.network").matrices:
        m, n = W.shape
        k = m + n  # room enough for a B of full rank, whatever the rank of W is
        A = torch.randn(m, k, dtype=W.dtype)
        _, sizes, V = torch.linalg.svd(A)
        free = V[m : m + n].T * (W.norm() if W.any() else 1.0)  # (k, n), mapped to zero by A
        B = (torch.linalg.pinv(A) @ W + free).T
        rank = smallest(rank, float(sizes[-1] / sizes[0]))
        lost = largest(lost, _relative(A @ B.T, W))
        least = smallest(least, float(torch.linalg.svdvals(B)[-1] / torch.linalg.svdvals(B)[0]))
    return Finding(
        [Inequality("smallest singular value of A, relative", rank, ">", 1e-12)],
        [
            Inequality("|W - A B^T|, relative", lost, "<=", SMALL),
            Inequality("smallest singular value of B, relative", least, ">", 1e-12),
        ],
        "k = m + n is taken: the printed k > max(m, n) is too small for a W of low rank",
    )


def _relative(value: Tensor, wanted: Tensor) -> float:
    return float((value - wanted).norm() / (1e-300 + wanted.norm()))
