"""One layer of an OptEq as the gradient of its convex potential, in float64, on states as rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.layers.certificate import averaged
from equipoise.operators.operator import Dense, Operator, OperatorWeights
from equipoise.prox import Activation, Identity, MatrixActivation

__all__ = ["FrozenLayer", "Potential"]

DENSE_WIDTH = 512
"""States up to this long have the operator written out as a matrix, which is then factorised instead of iterated with."""

FAR = 1e150
"""Where an activation is at the end of its range, or beyond every number that matters."""


@dataclass(frozen=True)
class FrozenLayer:
    """One layer of an OptEq at fixed weights and input, `F(z) = alpha f(z) + (1 - alpha) z` (OptEq, eq. 6).

    `f(z) = (1/mu) W^T s(W z + c)` is the gradient of the convex `psi` and the proximal map of
    `phi = psi* - |.|^2/2` if `mu >= L_s |W|^2` (OptEq, Theorem 1).

    Attributes:
        operator: What `W` is.
        weights: Its weights, after norm control.
        activation: `s`.
        c: `U x + b`, batch first.
        alpha: Share of the new value, in (0, 1].
        mu: The scale.
    """

    operator: Operator
    weights: OperatorWeights
    activation: Activation
    c: Tensor
    alpha: Tensor | float
    mu: float

    def pre_activation(self, z: Tensor) -> Tensor:
        """Return `W z + c`."""
        return self.operator.apply_with(self.weights, z) + self.c

    def adjoint(self, y: Tensor) -> Tensor:
        """Return `W^T y`."""
        return self.operator.adjoint_with(self.operator.transposed(self.weights), y)

    def prox(self, z: Tensor) -> Tensor:
        """Return `f(z)`, the proximal map of `phi` at `z`."""
        return self.adjoint(self.activation(self.pre_activation(z))) / self.mu

    def step(self, z: Tensor) -> Tensor:
        """Return `F(z)`."""
        return self.alpha * self.prox(z) + (1 - self.alpha) * z

    def psi(self, z: Tensor) -> Tensor:
        """Return `psi(z) = (1/mu) 1^T S(W z + c)`, whose gradient is `f`; shape (batch,)."""
        return (
            self.activation.potential(self.pre_activation(z)).reshape(z.shape[0], -1).sum(dim=1)
            / self.mu
        )

    def norm(self) -> Tensor:
        """Return a proven upper bound of `|W|`."""
        return self.operator.bound(self.weights)

    def lipschitz(self) -> Tensor | float:
        """Return a proven upper bound of the Lipschitz constant of `F`."""
        return averaged(self.activation.slopes[1] * self.norm().square() / self.mu, self.alpha)


class Potential:
    """`psi(y) = (1/mu) 1^T S(W y + c)` with its gradient, the layer `f(y) = (1/mu) W^T s(W y + c)` (OptEq, Theorem 1).

    A matrix activation `s(a) = A^T A a` becomes the identity with `A W` and `A c` in place of `W`
    and `c`: the same `psi`.

    Args:
        unit: The layer at its present weights and input.
        dense_width: States up to this long have `W` written out as a matrix.

    Attributes:
        shape: The shape of one state.
        c: `U x + b`, shape (batch, n).
        matrix: `W`, shape (n, m), where it is written out.
        smoothness: A proven Lipschitz constant of `f`, `L_s |W|^2/mu`.
    """

    def __init__(self, unit: FrozenLayer, dense_width: int | None = None) -> None:
        self.operator: Operator = unit.operator
        # Copies, so that training goes on without changing what was read.
        self.weights = tuple(
            weight.detach().to(torch.float64, copy=True) for weight in unit.weights
        )
        self.turned = unit.operator.transposed(self.weights)
        self.mu = unit.mu
        self.name = type(unit.activation).__name__
        c = unit.c.detach().to(torch.float64, copy=True)
        self.shape = unit.operator.zeros(c[:1]).shape[1:]
        self.inner_shape = c.shape[1:]
        self.c = c.flatten(1)
        self.smoothness = (
            unit.activation.slopes[1] * float(unit.operator.bound(self.weights)) ** 2 / unit.mu
        )
        self.matrix = self._write_out(DENSE_WIDTH if dense_width is None else dense_width)
        self.activation: Activation = unit.activation
        if isinstance(unit.activation, MatrixActivation):
            self._absorb(unit.activation)
        elif not unit.activation.elementwise:
            raise ValueError(
                "objective.layer must have elementwise activations or a MatrixActivation; "
                f"got {self.name}, whose range is unknown."
            )

    def _write_out(self, width: int) -> Tensor | None:
        if isinstance(self.operator, Dense):
            return self.weights[0]
        if self.shape.numel() > width:
            return None
        basis = torch.eye(self.shape.numel(), dtype=self.c.dtype, device=self.c.device)
        return (
            self.operator.apply_with(self.weights, basis.reshape(-1, *self.shape))
            .flatten(1)
            .T.contiguous()
        )

    def _absorb(self, activation: MatrixActivation) -> None:
        assert (
            self.matrix is not None
        )  # matrix activations act on vectors, whose operators are dense
        values, vectors = torch.linalg.eigh(activation.S.detach().to(self.c))
        keep = values > len(values) * torch.finfo(activation.S.dtype).eps * values[-1]
        root = vectors[:, keep] * values[keep].sqrt()  # A^T, without what A maps to zero
        self.matrix = root.T @ self.matrix
        self.c = self.c @ root
        self.activation = Identity()

    def select_rows(self, rows: Tensor) -> Potential:
        """Return the potential of some samples only."""
        part = object.__new__(Potential)
        part.__dict__.update(self.__dict__)
        part.c = self.c[rows]
        return part

    def sharpen(self) -> None:
        """Replace the bound of the smoothness by its exact value where the matrix is written out and the bound says too little."""
        if self.smoothness > 1 and self.matrix is not None:
            exact = (
                self.activation.slopes[1]
                * float(torch.linalg.matrix_norm(self.matrix, 2)) ** 2
                / self.mu
            )
            self.smoothness = min(self.smoothness, exact)

    def apply(self, y: Tensor) -> Tensor:
        """Return `W y`, for any number of rows."""
        if self.matrix is not None:
            return y @ self.matrix.T
        return self.operator.apply_with(self.weights, y.reshape(-1, *self.shape)).flatten(1)

    def adjoint(self, q: Tensor) -> Tensor:
        """Return `W^T q`, for any number of rows."""
        if self.matrix is not None:
            return q @ self.matrix
        return self.operator.adjoint_with(self.turned, q.reshape(-1, *self.inner_shape)).flatten(1)

    def hidden(self, y: Tensor) -> Tensor:
        """Return `q = s(W y + c)`."""
        return self.activation(self.apply(y) + self.c)

    def prox(self, y: Tensor) -> Tensor:
        """Return `f(y)`."""
        return self.adjoint(self.hidden(y)) / self.mu

    def slopes(self, y: Tensor) -> Tensor:
        """Return `D = s'(W y + c)`; the Jacobian of `f` is `W^T D W/mu`."""
        return self.activation.derivative(self.apply(y) + self.c)

    def psi(self, y: Tensor) -> Tensor:
        """Return `psi(y)`, shape (batch,)."""
        return self.activation.potential(self.apply(y) + self.c).sum(dim=1) / self.mu

    def at_step(self, y: Tensor) -> Tensor:
        """Return `phi(f(y)) = <f(y), y> - psi(y) - |f(y)|^2/2`, by Fenchel and Young's equality; shape (batch,)."""
        f = self.prox(y)
        return (f * (y - f / 2)).sum(dim=1) - self.psi(y)

    def merit(self, z: Tensor) -> Tensor:
        """Return `h(z) = |z|^2/2 - psi(z)`, the Moreau envelope of `phi` at 1; shape (batch,)."""
        return z.square().sum(dim=1) / 2 - self.psi(z)

    def ends(self, largest: float) -> tuple[Tensor, Tensor]:
        """Return the ends of the closed range of `s`, cut off at `largest`."""
        low, high = self.activation(self.c.new_tensor([-FAR, FAR])).clamp(-largest, largest)
        return low, high

    def modulus(self, alpha: float = 1.0) -> float:
        """Return a number by which `phi`, or `alpha M_phi^(1 - alpha)`, is strongly convex; 0 if it is only convex.

        Their conjugates' smoothness is `k = alpha L_s |W|^2/mu + 1 - alpha`; the modulus is
        `1/k - 1`.
        """
        smooth = averaged(self.smoothness, alpha)
        return max(0.0, 1 / smooth - 1) if smooth > 0 else math.inf
