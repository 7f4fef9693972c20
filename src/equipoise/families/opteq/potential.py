"""One layer of an OptEq as the gradient of its convex potential, in float64, on states as rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from equipoise.layers.certificate import averaged
from equipoise.operators import Dense, Operator, OperatorWeights
from equipoise.prox import Activation, Identity, MatrixActivation

__all__ = ["Potential"]

DENSE_WIDTH = 512
"""States up to this long have the operator written out as a matrix and factorised."""

FAR = 1e150
"""Where an activation is at the end of its range, or beyond every number that matters."""


class Potential:
    """`psi(y) = (1/mu) 1^T S(W y + c)` and its gradient, the layer (OptEq, Theorem 1).

    The layer is `f(y) = (1/mu) W^T s(W y + c)`.

    A matrix activation `s(a) = A^T A a` becomes the identity with `A W` and `A c` in place of `W`
    and `c`: the same `psi`.

    Args:
        operator: What `W` is.
        weights: Its weights, after norm control.
        activation: `s`.
        c: `U x + b`, batch first.
        mu: The scale.

    Attributes:
        shape: The shape of one state.
        c: `U x + b`, shape (batch, n).
        matrix: `W`, shape (n, m), where it is written out.
        epsilon: The machine epsilon of the layer's own precision.
        smoothness: A proven Lipschitz constant of `f`, `L_s |W|^2/mu`.
    """

    def __init__(
        self,
        operator: Operator,
        weights: OperatorWeights,
        activation: Activation,
        c: Tensor,
        mu: float,
    ) -> None:
        self.operator = operator
        # Copies, so that training may continue without changing what was read.
        self.weights = tuple(weight.detach().to(torch.float64, copy=True) for weight in weights)
        self.turned = operator.transposed(self.weights)
        self.mu = mu
        self.name = type(activation).__name__
        self.epsilon = torch.finfo(c.dtype).eps
        c = c.detach().to(torch.float64, copy=True)
        self.shape = operator.zeros(c[:1]).shape[1:]
        self.inner_shape = c.shape[1:]
        self.c = c.flatten(1)
        norm = float(operator.bound(self.weights))
        self.smoothness = activation.slopes[1] * norm * norm / mu
        self.matrix = self._write_out()
        self.activation: Activation = activation
        if isinstance(activation, MatrixActivation):
            self._absorb(activation)
        elif not activation.elementwise:
            raise ValueError(
                "objective.layer must have elementwise activations or a MatrixActivation; "
                f"got {self.name}, whose range is unknown."
            )

    def _write_out(self) -> Tensor | None:
        if isinstance(self.operator, Dense):
            return self.weights[0]
        if self.shape.numel() > DENSE_WIDTH:
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
        """Replace a smoothness bound that is too loose by the exact value, if there is a matrix."""
        if self.smoothness > 1 and self.matrix is not None:
            norm = float(torch.linalg.matrix_norm(self.matrix, 2))
            exact = self.activation.slopes[1] * norm * norm / self.mu
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
        """Return `phi(f(y)) = <f(y), y> - psi(y) - |f(y)|^2/2`, shape (batch,).

        This is Fenchel and Young's equality.
        """
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
        """Return a modulus of strong convexity of `phi`, or of `alpha M_phi^(1 - alpha)`.

        It is 0 if the function is only convex.

        Their conjugates' smoothness is `k = alpha L_s |W|^2/mu + 1 - alpha`; the modulus is
        `1/k - 1`.
        """
        smooth = averaged(self.smoothness, alpha)
        return max(0.0, 1 / smooth - 1) if smooth > 0 else math.inf
