"""Regularisers that make features independent of each other over a batch."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from equipoise.core.transforms import full_precision, unwrapped
from equipoise.core.validate import require_count, require_positive, require_whole
from equipoise.prox.regularizer import REGULARIZERS, Regularizer

__all__ = ["HSIC", "Decorrelation"]


MAX_EXACT = 512
"""Observations up to which independence is measured exactly by default."""
LAST = 4.0
"""Frequencies beyond it, in units of one over the bandwidth, weigh 6e-5 of the Gaussian."""
MARGIN = 3.72
"""Bandwidths at which the Gaussian has fallen to 1e-3."""
PER_BANDWIDTH = LAST / (2 * math.pi)
"""Frequencies needed for each bandwidth that values reach and the margin, since kernels repeat."""
MIN_COUNT, MAX_COUNT = 10, 64
"""The numbers of frequencies, which reach 12 and 96 bandwidths."""


@final
@REGULARIZERS.register("decorrelation")
@dataclass(frozen=True)
class Decorrelation(Regularizer):
    """Uncorrelated features (OptEq, eq. 13 and Table 2, row 4).

    `R(Z) = |D Z Z^T D - I|_F^2/2`, `D = diag(1/|z_i|)`.

    Row `z_i` is feature `i`, which is axis 1 of the state, over all observations: the samples of
    the batch and their positions. So `R = sum_{i != j} (u_i . u_j)^2/2`, `u_i = z_i/|z_i|`, and
    `grad_i = (2/|z_i|) (I - u_i u_i^T) sum_{j != i} (u_i . u_j) u_j`. The paper prints `I + Proj`
    in place of `I - u_i u_i^T`.

    Args:
        epsilon: Added to `|z_i|^2` in both, so that a feature that is zero everywhere counts as
            uncorrelated.

    Shape:
        (batch, features, ...) for the state, () for the value.
    """

    epsilon: float = 1e-8

    coupled = True
    convex = False

    def __post_init__(self) -> None:
        require_positive("Decorrelation.epsilon", self.epsilon)

    def value(self, z: Tensor) -> Tensor:
        with full_precision(z.device.type):
            return self._correlations(_features("Decorrelation", z))[2].square().sum() / 2

    def gradient(self, z: Tensor) -> Tensor:
        with full_precision(z.device.type):
            unit, length, correlation = self._correlations(_features("Decorrelation", z))
            pull = 2 * correlation @ unit
            pull = (pull - unit * (unit * pull).sum(dim=1, keepdim=True)) / length
            return _unfeatures(pull, z)

    def _correlations(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The features in units of their lengths, the lengths, and the mixed products."""
        length = (rows.square().sum(dim=1, keepdim=True) + self.epsilon).sqrt()  # (features, 1)
        unit = rows / length
        different = 1 - torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        return unit, length, (unit @ unit.mT) * different


@final
@REGULARIZERS.register("hsic")
@dataclass(frozen=True)
class HSIC(Regularizer):
    """Independent features, by the Hilbert-Schmidt criterion (OptEq, section 7.2.1).

    `R(Z) = sum_{i<j} (N-1)^-2 tr(K_i H K_j H)`.

    `K_i` is the matrix of `exp(-(s - t)^2/(2 bandwidth^2))` over the values of feature `i`, axis 1
    of the state, in all `N` observations: the samples of the batch and their positions.
    `H = I - 1 1^T/N`. Since `tr(K_i H K_j H)` is the product of the centred kernels, the pairs are
    summed through the sum of all of them, in time and memory of the order of `features * N^2`.

    A Gaussian is the mean of `cos(w (s - t))` over Gaussian `w`, so that a few `w` in place of all
    give a form whose time and memory grow with `N` alone. With `w` at equal distances up to 4 over
    the bandwidth (the midpoint rule) kernels are exact to 1e-3 as far as the values of a feature
    reach: 10 frequencies for 12 bandwidths, more for more, up to 64 for 96. Where values lie
    further apart, 64 random frequencies are used and a warning says so; their error is about one
    over the root of their number everywhere. Under `torch.func.vmap`, which hides the values, 64
    are taken for all.

    It is computed in float32 at least, and outside of autocast, since large numbers cancel.

    Args:
        bandwidth: The distance at which two values count as different.
        features: The number of random frequencies. None takes the exact form up to 512
            observations, and the midpoint rule beyond, as for batches of images, where the exact
            form would take minutes.
        seed: Seed of random frequencies.

    Shape:
        (batch, features, ...) for the state, () for the value.
    """

    bandwidth: float = 1.0
    features: int | None = None
    seed: int = 0
    _random: Tensor = field(init=False, repr=False, compare=False)

    coupled = True
    convex = False

    def __post_init__(self) -> None:
        require_positive("HSIC.bandwidth", self.bandwidth)
        if self.features is not None:
            require_count("HSIC.features", self.features)
        require_whole("HSIC.seed", self.seed)
        source = torch.Generator().manual_seed(self.seed)
        count = MAX_COUNT if self.features is None else self.features
        random = torch.randn(count, dtype=torch.float64, generator=source)
        object.__setattr__(self, "_random", random)

    def value(self, z: Tensor) -> Tensor:
        rows = _features("HSIC", z)
        observations = rows.shape[1]
        if observations < 2:
            raise ValueError(
                f"HSIC must see at least 2 observations of each feature; got {observations} "
                f"in a state of shape {tuple(z.shape)}. "
                "Use larger batches."
            )
        with full_precision(z.device.type):
            # Kernels see differences alone, which are exact where the values are small.
            rows = (rows - rows.detach().mean(dim=1, keepdim=True)) / self.bandwidth
            if self.features is None and observations <= MAX_EXACT:
                pairs = _exact(rows)
            else:
                pairs = _by_frequencies(rows, *self._frequencies(rows))
        return pairs / (observations - 1) ** 2

    def _frequencies(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The frequencies for values in units of the bandwidth, and their weights."""
        if self.features is None:
            low, high = rows.detach().aminmax(dim=1)
            reach = unwrapped([high - low])
            count = (
                MAX_COUNT if reach is None else (float(reach[0].amax()) + MARGIN) * PER_BANDWIDTH
            )
            if count <= MAX_COUNT:
                number = max(MIN_COUNT, math.ceil(count))
                places = (torch.arange(number, dtype=torch.float64) + 0.5) * (LAST / number)
                weights = torch.exp(-places.square() / 2)
                return places.to(rows), (weights / weights.sum()).to(rows)
            if math.isfinite(count):
                warnings.warn(
                    f"HSIC was asked of {rows.shape[1]:,} values that lie up to "
                    f"{count / PER_BANDWIDTH - MARGIN:.0f} bandwidths apart, so that {MAX_COUNT} "
                    f"random frequencies are used, with an error of about {MAX_COUNT**-0.5:.2f}. "
                    "Raise HSIC.bandwidth.",
                    stacklevel=3,
                )
        random = self._random.to(rows)
        return random, torch.full_like(random, 1 / len(random))


def _exact(rows: Tensor) -> Tensor:
    """The criterion of all pairs of features, by kernels in units of the bandwidth."""
    kernel = torch.exp((rows[:, :, None] - rows[:, None, :]).square() / -2)  # (features, N, N)
    kernel = kernel - kernel.mean(dim=1, keepdim=True)
    kernel = kernel - kernel.mean(dim=2, keepdim=True)
    return (kernel * (kernel.sum(dim=0) - kernel)).sum() / 2


def _by_frequencies(rows: Tensor, frequencies: Tensor, weights: Tensor) -> Tensor:
    """The criterion with kernels `sum_k weights_k cos(frequencies_k (s - t))`."""
    angles = rows[:, :, None] * frequencies  # (features, N, frequencies)
    waves = torch.cat([angles.cos(), angles.sin()], dim=2) * weights.sqrt().repeat(2)
    waves = waves - waves.mean(dim=1, keepdim=True)
    every = waves.transpose(0, 1).flatten(1)  # (N, all waves)
    return (_squares(every) - _squares(waves)) / 2


def _features(owner: str, z: Tensor) -> Tensor:
    """The state as a matrix with one row for each feature and one column for each observation."""
    if z.ndim < 2:
        raise ValueError(
            f"{owner} must see a state of shape (batch, features, ...); got shape {tuple(z.shape)}."
        )
    if not z.is_floating_point():
        raise ValueError(f"{owner} must see a state of real floating-point numbers; got {z.dtype}.")
    rows = z.transpose(0, 1).flatten(1)
    return rows if rows.dtype.itemsize >= 4 else rows.float()


def _unfeatures(rows: Tensor, z: Tensor) -> Tensor:
    """The inverse of `_features`, for the state `z`."""
    return rows.reshape(z.transpose(0, 1).shape).transpose(0, 1).to(z)


def _squares(matrix: Tensor) -> Tensor:
    """Return `|A A^T|_F^2 = |A^T A|_F^2`, summed over a batch, by the smaller product."""
    product = matrix @ matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix.mT @ matrix
    total: Tensor = product.square().sum()
    return total
