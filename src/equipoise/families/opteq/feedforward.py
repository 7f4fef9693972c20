"""Feed-forward networks in pieces, and their weights as products of an OptEq's (OptEq, Lemma 1)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equipoise.core.registry import choose
from equipoise.core.validate import require_count
from equipoise.families.opteq.network_tracing import require_plain_calls
from equipoise.prox.activation import Activation, Identity
from equipoise.prox.resolve import as_activation, from_module

__all__ = ["FeedForward", "factorize", "read"]

MAX_LOST_UNITS = 4
"""Larger errors of the factors' products, in units in the last place, need a larger state."""

WITH_SHAPE = " For other networks, give to_opteq an input_shape."

ROUNDING = 1e-13
"""Errors of computing the factors in float64 stay below this for units of similar scales."""

NOTHING = -24
"""The scale, as a power of 2, of a weight that is zero.

Rounding errors of its factors' product should vanish beside a bias.
"""


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network in pieces.

    `y = last(A_K+1 s_K(... s_1(A_1 first(x) + b_1) ...) + b_K+1)`.

    Attributes:
        matrices: `A_1, ..., A_K+1`.
        biases: `b_1, ..., b_K+1`, zeros where the network has none.
        activations: `s_1, ..., s_K`, at least one.
        first: What is done to the input before, if anything.
        last: What is done to the output after, if anything.
    """

    matrices: list[Tensor]
    biases: list[Tensor]
    activations: list[Activation]
    first: nn.Module | None = None
    last: nn.Module | None = None


class _Exponential(nn.Module):
    """`exp(a)`: the output of a scikit-learn regressor with Poisson loss."""

    def forward(self, a: Tensor) -> Tensor:
        return a.exp()


def read(net: object, owner: str) -> FeedForward:
    """Take an `nn.Sequential`, or a fitted MLP of scikit-learn, apart.

    Args:
        net: The network.
        owner: Who asks, for messages.
    """
    if isinstance(net, nn.Module):
        parts = _read_module(net, owner)
    elif not hasattr(net, "hidden_layer_sizes"):
        raise ValueError(
            f"{owner}.net must be an nn.Sequential, or an MLP of scikit-learn; got "
            f"{type(net).__name__}."
        )
    elif not hasattr(net, "coefs_"):
        raise ValueError(
            f"{owner}.net must be fitted; got {type(net).__name__} without coefs_. Call its "
            "fit(X, y) first."
        )
    else:
        parts = _read_estimator(net, owner)
    if not parts.activations:  # a single linear layer: what it computes may count as a hidden layer
        (W,) = parts.matrices
        parts.activations.append(Identity())
        parts.matrices.append(torch.eye(len(W), dtype=W.dtype, device=W.device))
        parts.biases.append(W.new_zeros(len(W)))
    return parts


def _read_estimator(net: Any, owner: str) -> FeedForward:
    matrices = [torch.tensor(coefficients.T, dtype=torch.float64) for coefficients in net.coefs_]
    biases = [torch.tensor(intercepts, dtype=torch.float64) for intercepts in net.intercepts_]
    activation = as_activation({"logistic": "sigmoid"}.get(net.activation, net.activation))
    outputs = {
        "softmax": nn.Softmax(dim=-1),
        "logistic": nn.Sigmoid(),
        "exp": _Exponential(),
        "identity": None,
    }
    last = outputs[choose(f"{owner}.net.out_activation_", net.out_activation_, tuple(outputs))]
    if isinstance(last, nn.Sigmoid) and net.n_outputs_ == 1:
        # Two classes with one number: the softmax of 0 and that number is both probabilities.
        matrices[-1], biases[-1] = F.pad(matrices[-1], (0, 0, 1, 0)), F.pad(biases[-1], (1, 0))
        last = nn.Softmax(dim=-1)
    return FeedForward(matrices, biases, [activation] * (len(matrices) - 1), last=last)


def _read_module(net: nn.Module, owner: str) -> FeedForward:
    first: nn.Module | None = None
    matrices: list[Tensor] = []
    biases: list[Tensor] = []
    activations: list[Activation] = []
    require_plain_calls(net, owner)
    waiting: tuple[str, nn.Module] | None = None  # the activation after the last linear layer
    for place, module in _walk(net, f"{owner}.net"):
        if type(module) is nn.Identity or _is_passing(module, place):
            continue
        if type(module) is nn.Flatten and not matrices and first is None:
            first = copy.deepcopy(module)
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            W, b = module.weight.detach(), module.bias
            if matrices:
                activations.append(_admissible(*waiting) if waiting else Identity())
                if W.shape[1] != len(matrices[-1]):
                    raise ValueError(
                        f"{place} must take the {len(matrices[-1])} numbers of the layer "
                        f"before; got {W.shape[1]}."
                    )
            if not (W.isfinite().all() and (b is None or b.isfinite().all())):
                raise ValueError(f"{place} must have finite weights; got NaN or infinity.")
            matrices.append(W)
            biases.append(W.new_zeros(len(W)) if b is None else b.detach())
            waiting = None
        elif waiting or not matrices:
            before = (
                "two activations in a row are not one"
                if waiting
                else "nothing but nn.Flatten may come before"
            )
            raise ValueError(
                f"{place} must be an nn.Linear, as {before}; got {type(module).__name__}."
            )
        else:
            waiting = place, module
            if type(module) not in (nn.Softmax, nn.LogSoftmax):  # which may be last
                _admissible(place, module)
    if not matrices:
        raise ValueError(f"{owner}.net must hold at least one nn.Linear; got none.")
    return FeedForward(
        matrices, biases, activations, first, copy.deepcopy(waiting[1]) if waiting else None
    )


def _walk(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for index, child in enumerate(module):
            yield from _walk(child, f"{place}[{index}]")
    else:
        yield place, module


def _is_passing(module: nn.Module, place: str) -> bool:
    """Whether this is dropout that drops nothing."""
    if not isinstance(module, nn.modules.dropout._DropoutNd):
        return False
    if module.training and module.p > 0:
        raise ValueError(
            f"{place} must be in evaluation mode, as it is random in training; got {module}. "
            "Call net.eval()."
        )
    return True


def _admissible(place: str, module: nn.Module) -> Activation:
    try:
        return from_module(module)
    except ValueError as error:
        known = type(module).__module__ == nn.ReLU.__module__
        raise ValueError(
            f"{place} must be an nn.Linear or an admissible activation; got "
            f"{type(module).__name__}{f': {error}' if known else '.'}"
            f"{'' if known else WITH_SHAPE}"
        ) from None


def factorize(parts: FeedForward, m: int | None, owner: str) -> list[Tensor]:
    """Return `Wb_0, ..., Wb_K+1` with `m` columns and `A_k = Wb_k Wb_k-1^T` (OptEq, Lemma 1).

    `m >= n_k-1 + n_k - rank(A_k)` for neighbouring hidden layers is enough, and by Sylvester's
    inequality necessary where `A_k-1` and `A_k+1` have full rank, since `Wb_k-1` and `Wb_k` must
    then have it too.

    Args:
        parts: The network.
        m: Columns of the factors; by default the largest `n_k-1 + n_k`, or `n_k-1 + n_k + n_k+1`
            where that would lose digits.
        owner: Who asks, for messages.
    """
    matrices = [A.double() for A in parts.matrices]
    widths = [len(A) for A in matrices[:-1]]
    eps = torch.finfo(parts.matrices[0].dtype).eps
    pair, triple = (
        max(sum(widths[k : k + n]) for k in range(max(1, len(widths) + 1 - n))) for n in (2, 3)
    )
    size = pair if m is None else m
    require_count(f"{owner}.state_features", size)
    ranks = (
        [int(torch.linalg.matrix_rank(A, rtol=max(A.shape) * eps)) for A in matrices[1:-1]]
        if size < pair
        else widths[1:]
    )
    least = max(
        [*widths, *(n + k - rank for n, k, rank in zip(widths, widths[1:], ranks, strict=False))]
    )
    if size < least:
        raise ValueError(
            f"{owner}.state_features must be at least {least} for weights of these ranks, "
            f"{pair} for any; got {m}."
        )
    made = _apart(matrices, size) if size >= triple else _complemented(matrices, size)
    made = [W.to(own) for W, own in zip(made, [parts.matrices[0], *parts.matrices], strict=True)]
    lost = max(
        _lost(before.double(), Wb.double(), A)
        for before, Wb, A in zip(made, made[1:], matrices, strict=False)
    )
    if m is None and not lost <= max(MAX_LOST_UNITS * eps, ROUNDING):
        return factorize(parts, triple, owner)
    if not lost <= math.sqrt(eps):
        raise ValueError(
            f"{owner}.state_features must be larger for weights of such ranks and scales, of "
            "which half the digits would be lost; "
            f"got {m}. With {triple} none are."
        )
    return made


def _lost(before: Tensor, Wb: Tensor, A: Tensor) -> float:
    """Return the error of a product relative to `A`, whatever the scales of its units.

    Units that are small here and weigh much in the next layer must not drown in the rounding errors
    of large ones: an error counts relative to `u_i v_j`, the size of the entries of `A` by rows,
    and then by columns.
    """
    u = _positive(A.square().mean(dim=1, keepdim=True).sqrt())
    v = _positive((A / u).square().mean(dim=0, keepdim=True).sqrt())
    return float(((Wb @ before.mT - A) / u / v).square().mean().sqrt())


def _positive(sizes: Tensor) -> Tensor:
    """Units that are zero count as if they were as large as the largest one."""
    largest = sizes.max()
    return torch.where(sizes > 0, sizes, largest if largest > 0 else 1.0)


def _apart(matrices: Sequence[Tensor], m: int) -> list[Tensor]:
    """Give each unit a coordinate of its own among three neighbouring layers.

    No product then adds anything to `A_k`.

    `Wb_k` is `A_k` on the coordinates of the layer before, `I` on those of its own layer, and 0
    elsewhere.
    """
    A = matrices[0]
    before: list[int] = []
    own = list(range(len(A)))
    W = torch.eye(len(A), m, dtype=A.dtype, device=A.device)
    made = [A.mT @ W, W]
    for A in matrices[1:-1]:
        taken = {*before, *own}
        free = [place for place in range(m) if place not in taken][: len(A)]
        W = A.new_zeros(len(A), m)
        W[:, own] = A
        W[range(len(A)), free] = 1
        made.append(W)
        before, own = own, free
    W = A.new_zeros(len(matrices[-1]), m)
    W[:, own] = matrices[-1]
    return [*made, W]


def _complemented(matrices: Sequence[Tensor], m: int) -> list[Tensor]:
    """Take the shortest `Wb_k` with the right product.

    It is completed orthogonally to `Wb_k-1`, so that its rows are independent.

    With `m >= n_k-1 + n_k` the fill-in `f_k I` makes the condition number of each `Wb_k` a small
    constant if `f_k-1 f_k = |A_k|`. Where there is less room it goes to the left singular vectors
    that need it most.
    """
    scales = _scales([float(torch.linalg.matrix_norm(A, 2)) for A in matrices[1:-1]])
    A = matrices[0]
    W = scales[0] * torch.eye(len(A), m, dtype=A.dtype, device=A.device)
    made = [A.mT @ W / scales[0] ** 2, W]
    for A, scale in zip(matrices[1:], [*scales[1:], 0.0], strict=True):
        n, rows = len(W), len(A)
        Q, R = torch.linalg.qr(W.mT, mode="complete")
        shortest = torch.linalg.solve_triangular(
            R[:n], A, upper=True, left=False
        )  # in the coordinates Q of the state
        room = m - n
        if scale == 0 or room >= rows:
            fill = torch.eye(rows, room, dtype=A.dtype, device=A.device)
        else:
            fill = torch.linalg.svd(shortest)[0][:, rows - room :]
        W = torch.cat([shortest, scale * fill], dim=1) @ Q.mT
        made.append(W)
    return made


def _scales(norms: Sequence[float]) -> list[float]:
    """Return powers of 2 whose neighbours have about these products, all near to 1."""
    logs = [0.0]
    for norm in norms:
        logs.append((math.log2(norm) if norm > 0 else NOTHING) - logs[-1])
    turned = [-log if place % 2 else log for place, log in enumerate(logs)]
    middle = (max(turned) + min(turned)) / 2
    return [
        2.0 ** round(log + middle if place % 2 else log - middle) for place, log in enumerate(logs)
    ]
