"""Integrals of smooth activations, accurate to rounding for every real argument.

No overflow, and no cancellation near zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["exponential_excess", "log_cosh", "sigmoid_integral", "softplus_integral"]


def sigmoid_integral(a: Tensor) -> Tensor:
    """Return `int_0^a sigmoid(t) dt = softplus(a) - log 2`, elementwise."""
    return a.clamp_min(0) + _log_mean(a.abs())


def log_cosh(a: Tensor) -> Tensor:
    """Return `int_0^a tanh(t) dt = log cosh a`, elementwise."""
    size = a.abs()
    near = torch.log1p(
        2 * torch.sinh(size.clamp_max(1) / 2).square()
    )  # log cosh a = log(1 + 2 sinh^2(a/2)) keeps a^2/2
    return torch.where(size < 1, near, size + _log_mean(2 * size))


def exponential_excess(a: Tensor) -> Tensor:
    """Return `int_0^a (e^t - 1) dt = e^a - 1 - a`, elementwise."""
    return torch.where(
        a.abs() < 0.5, a.square() * _polynomial(a.clamp(-0.5, 0.5), _EXCESS), torch.expm1(a) - a
    )


def softplus_integral(a: Tensor) -> Tensor:
    """Return `int_0^a softplus(t) dt = Li2(-1) - Li2(-e^a)`, elementwise.

    `Li2` is the dilogarithm.

    Since `softplus(t) = max(t, 0) + log(1 + e^-|t|)`, it is `max(a, 0)^2/2 + sign(a) G(|a|)` with
    `G(x) = int_0^x log(1 + e^-t) dt`. In `v = log(1 + e^-x)`, which lies in (0, log 2],
    `dG = -v/(1 - e^-v) dv`, whose Bernoulli series gains two digits with every term:
    `G(x) = P(log 2) - P(v)`, `P(v) = v + v^2/4 + v^3/36 - v^5/3600 + ...`. The difference is
    divided by `log 2 - v` beforehand, so that nothing cancels at small `x`.
    """
    x = a.abs()
    tail = -_log_mean(x) * _polynomial(torch.log1p(torch.exp(-x)), _DILOGARITHM)
    return a.clamp_min(0).square() / 2 + torch.sign(a) * tail


def _log_mean(x: Tensor) -> Tensor:
    """Return `log((1 + e^-x)/2)` for `x >= 0`."""
    return torch.log1p(torch.expm1(-x) / 2)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Return `sum_k coefficients[k] x^k` by Horner's rule."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value


def _divided_difference(coefficients: list[float], c: float) -> list[float]:
    """Return the coefficients of `(P(c) - P(x)) / (c - x)` by synthetic division."""
    quotient = [coefficients[-1]]
    for coefficient in reversed(coefficients[1:-1]):
        quotient.insert(0, coefficient + c * quotient[0])
    return quotient


_BERNOULLI = {
    2: 1 / 6,
    4: -1 / 30,
    6: 1 / 42,
    8: -1 / 30,
    10: 5 / 66,
    12: -691 / 2730,
    14: 7 / 6,
    16: -3617 / 510,
}
_SERIES = [0.0, 1.0, 0.25] + [_BERNOULLI.get(k - 1, 0.0) / math.factorial(k) for k in range(3, 18)]
_DILOGARITHM = _divided_difference(_SERIES, math.log(2))
_EXCESS = [1 / math.factorial(k + 2) for k in range(14)]
