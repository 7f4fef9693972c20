"""One OptEq layer in the coordinates of its hidden units: one product in each step, not two."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equipoise.families.opteq.linearization import LinearLayer
from equipoise.prox.activation import Activation
from equipoise.solvers.ahead import CompiledRuns
from equipoise.solvers.coordinates import Coordinates, ReducedSystem
from equipoise.solvers.kernels import find_kernels
from equipoise.solvers.problem import Linearization

__all__ = ["HiddenUnits", "hidden_system"]


@dataclass(frozen=True)
class HiddenUnits:
    """A layer `z -> k W^T s(W z + c) + r z`, `k = alpha/mu`, `r = 1 - alpha`, by its hidden units.

    States `z = k W^T q` have the coordinates `u = (q, p)` with `p = W z = k K q`, `K = W W^T`. The
    next ones are `q' = s(p + c) + r q` and `p' = k K q'`: one product. And
    `<z, z'> = k <q, p'>`, so that lengths of states need no product at all.

    Attributes:
        layer: The layer, without history.
        activation: `s`.
        c: Its injection, shape (samples, n).
        K: `W W^T`, shape (n, n).
        factor: `k`.
        rest: `r`.
    """

    layer: LinearLayer
    activation: Activation
    c: Tensor
    K: Tensor
    factor: float
    rest: float

    def coordinates(self, z: Tensor) -> Coordinates:
        """Return the coordinates of a solve from `z`.

        A state that is not zero has none of its own; the solve starts at the layer's value there,
        without its skip connection.
        """
        start = self.c.new_zeros(len(self.c), 2 * self.K.shape[0])
        if bool(z.any()):
            hidden = self.activation(self.layer.operator.affine_with(self.layer.weights, z, self.c))
            q, p = start.chunk(2, dim=1)
            torch.div(hidden, 1 - self.rest, out=q)
            torch.addmm(p, q, self.K, beta=0, alpha=self.factor, out=p)
        return self._from(start)

    def _from(self, start: Tensor) -> Coordinates:
        return Coordinates(start, self._step, self.factor, self._decode, self._select_rows)

    def _step(self, u: Tensor, out: Tensor | None = None) -> Tensor:
        q, p = u.chunk(2, dim=1)
        value = torch.empty_like(u) if out is None else out
        left, right = value.chunk(2, dim=1)
        hidden = self.activation.overwrite(torch.add(p, self.c, out=left))
        if self.rest:
            hidden.add_(q, alpha=self.rest)
        if hidden is not left:
            left.copy_(hidden)
        torch.addmm(right, left, self.K, beta=0, alpha=self.factor, out=right)
        return value

    def _decode(self, u: Tensor) -> Tensor:
        return self.layer.operator.adjoint_with(self.layer.turned, u[:, : self.K.shape[0]])

    def _select_rows(self, rows: Tensor) -> Coordinates:
        c = self.c.index_select(0, rows)
        return replace(self, c=c)._from(c)


def hidden_system(
    g: Tensor, layer: LinearLayer, slope: Tensor, K: Tensor, mu: float
) -> ReducedSystem:
    """Return `v = J v + g`, `J = alpha/mu W^T D W + 1 - alpha`, in hidden units.

    By Woodbury's identity `v = g/alpha + W^T E y/sqrt(mu)`, where
    `(I - E K E/mu) y = E W g/(alpha sqrt(mu))`, `E = sqrt(D)` and `K = W W^T`. That is symmetric
    on the whole space and needs one product in each step. `|y| <= |v|`, because
    `|v|^2 = |g|^2/alpha^2 + |y|^2 + <y, (I - E K E/mu) y>`.

    Args:
        g: The constant term.
        layer: The layer, without history.
        slope: `D`.
        K: `W W^T`.
        mu: The scale.
    """
    alpha = 1 - float(layer.rest or 0.0)
    root, unit = slope.sqrt(), 1 / math.sqrt(mu)
    constant = layer.operator.apply_with(layer.weights, g).mul_(root)
    if unit != alpha:
        constant.mul_(unit / alpha)

    def decode(y: Tensor) -> Tensor:
        # The adjoint's weights have the factor alpha/mu.
        back = layer.operator.adjoint_with(layer.turned, root * y)
        return torch.add(g if alpha == 1 else g / alpha, back, alpha=unit * mu / alpha)

    return ReducedSystem(constant, _product(root, K, 1 / mu), decode)


def _product(root: Tensor, K: Tensor, factor: float) -> Linearization:
    def product(y: Tensor, out: Tensor | None = None) -> Tensor:
        scaled = root * y
        image = scaled @ K if out is None else torch.mm(scaled, K, out=out)
        image.mul_(root)
        return image if factor == 1 else image.mul_(factor)

    def compiled() -> CompiledRuns | None:
        return None if find_kernels(root) is None else CompiledRuns(product=product)

    return Linearization(
        root,
        product,
        product,
        select_rows=lambda rows: _product(root.index_select(0, rows), K, factor),
        compiled=compiled,
    )
