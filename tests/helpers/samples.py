"""Random OptEq layers in float64, and their functions written once more in NumPy."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from scipy.special import spence, xlogy
from torch import Tensor

from equipoise.families.opteq import OptEq


def opteq(
    n: int | list[int],
    m: int,
    activation="relu",
    *,
    norm=0.9,
    mu=1.0,
    alpha: float | list[float] = 0.8,
    batch=3,
    **more,
) -> tuple[OptEq, Tensor]:
    """A layer with L_s |W|^2/mu = norm^2, solved to machine precision, and an input."""
    more = {"tolerance": 1e-13, "max_steps": 3000, "solver": "newton", "on_failure": "raise"} | more
    layer = OptEq(4, m, n, activation, alpha, "none", mu=mu, **more).double()
    cell = layer.layers
    with torch.no_grad():
        for operator, inject, own in zip(
            cell.operators, cell.inputs, cell.activations, strict=True
        ):
            W = torch.randn_like(operator.weight)
            operator.weight.copy_(
                W * norm * math.sqrt(mu / own.slopes[1]) / torch.linalg.matrix_norm(W, 2)
            )
            inject.weight.copy_(torch.randn_like(inject.weight))
            inject.bias.copy_(torch.randn_like(inject.bias))
    return layer, torch.randn(batch, 4, dtype=torch.float64)


def arrays(layer: OptEq, x: Tensor, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """W, and c = U x + b for the whole batch, computed outside of the layer."""
    inject = layer.layers.inputs[index]
    W = layer.layers.operators[index].weight.detach().numpy()
    return W, x.numpy() @ inject.weight.detach().numpy().T + inject.bias.detach().numpy()


class ReferenceLayer:
    """One layer of an OptEq written with torch's own functions: the adjoint comes from autograd."""

    def __init__(self, layer, x: Tensor, index: int) -> None:
        cell = layer.layers
        operator, self.activation = cell.operators[index], cell.activations[index]
        self.side = getattr(operator, "side", 1)
        operator = getattr(operator, "inner", operator)
        self.parts = list(getattr(operator, "parts", [operator]))
        self.weights = [own.detach() for own in cell.effective_weights()[index]]
        self.c = cell.inputs[index](x).detach()
        with torch.no_grad():
            self.alpha, self.mu = float(cell.alpha[index]), cell.mu

    def apply(self, z: Tensor) -> Tensor:
        if self.side > 1:
            z = self.side * F.adaptive_avg_pool2d(z, [side // self.side for side in z.shape[2:]])
        for part, weight in zip(self.parts, self.weights, strict=True):
            if weight.dim() == 2:
                return F.linear(z, weight)
            height, width = weight.shape[2:]
            margin = ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)
            mode = "circular" if part.padding == "circular" else "constant"
            z = F.conv2d(F.pad(z, margin, mode), weight, groups=part.groups)
        return z

    def prox(self, z: Tensor) -> Tensor:
        value, pull = torch.func.vjp(self.apply, z.detach())
        return pull(self.activation(value + self.c))[0] / self.mu

    def step(self, z: Tensor) -> Tensor:
        return self.alpha * self.prox(z) + (1 - self.alpha) * z

    def matrix(self, *shape: int) -> Tensor:
        """W, written out for states of a shape."""
        size = math.prod(shape)
        basis = torch.eye(size, dtype=self.c.dtype).reshape(size, *shape)
        return self.apply(basis).reshape(size, -1).T


def reference(layer, x: Tensor) -> list[ReferenceLayer]:
    """The layers of an OptEq at an input."""
    return [ReferenceLayer(layer, x, index) for index in range(len(layer.layers.operators))]


def sigmoid(a: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(a / 2)) / 2


ACTIVATION = {
    "relu": lambda a: np.maximum(a, 0),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "softplus": lambda a: np.logaddexp(0, a),
    "elu": lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0))),
}
POTENTIAL = {
    "relu": lambda a: np.maximum(a, 0) ** 2 / 2,
    "tanh": lambda a: np.logaddexp(a, -a) - math.log(2),
    "sigmoid": lambda a: np.logaddexp(0, a) - math.log(2),
    "softplus": lambda a: spence(2.0) - spence(1 + np.exp(a)),  # Li2(-1) - Li2(-e^a)
    "elu": lambda a: np.where(a > 0, a**2 / 2, np.expm1(np.minimum(a, 0)) - np.minimum(a, 0)),
}
CONJUGATE = {
    "relu": lambda q: np.where(q >= 0, q**2 / 2, np.inf),
    "tanh": lambda q: (xlogy(1 + q, 1 + q) + xlogy(1 - q, 1 - q)) / 2,
    "sigmoid": lambda q: xlogy(q, q) + xlogy(1 - q, 1 - q) + math.log(2),
}
INVERSE = {"tanh": np.arctanh, "sigmoid": lambda q: np.log(q / (1 - q))}


class Explicit:
    """phi of one sample at z = W^T q/mu, for tanh and sigmoid; the rows of W are independent."""

    def __init__(self, name: str, W: np.ndarray, c: np.ndarray, mu: float) -> None:
        self.name, self.W, self.c, self.mu = name, W, c, mu
        self.low, self.high = (-1.0, 1.0) if name == "tanh" else (0.0, 1.0)

    def state(self, q: np.ndarray) -> np.ndarray:
        return self.W.T @ q / self.mu

    def phi(self, q: np.ndarray) -> float:
        z = self.state(q)
        return float((CONJUGATE[self.name](q).sum() - self.c @ q) / self.mu - z @ z / 2)

    def slope(self, q: np.ndarray) -> np.ndarray:
        return (INVERSE[self.name](q) - self.c - self.W @ self.state(q)) / self.mu

    def pull(self, slope: np.ndarray) -> np.ndarray:
        """The gradient in q of a function whose gradient in z is given."""
        return self.W @ slope / self.mu

    def bounds(self) -> list[tuple[float, float]]:
        margin = 1e-12
        return [(self.low + margin, self.high - margin)] * len(self.W)

    def start(self) -> np.ndarray:
        return np.full(len(self.W), (self.low + self.high) / 2)
