"""The cells of the benchmarks, for Equipoise and, as its users would write them, for torchdeq."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise import Cell, Linearization, Shared


class Problem(Cell):
    """A cell that torchdeq can run too, as a function of state and input."""

    width = 512

    @property
    def cell(self) -> Cell:
        return self

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], self.width)

    def function(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda z: self.plain(z, x)

    def plain(self, z: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError


class Symmetric(Problem):
    """`relu(z W^T + x U^T + b) W`, with masks kept for Jacobian products."""

    symmetric = True

    def __init__(self, width: int = 512, inputs: int = 784, norm: float = 0.99) -> None:
        super().__init__()
        W = torch.randn(width, width)
        self.W = nn.Parameter(W * (norm / torch.linalg.matrix_norm(W, 2)))
        self.U = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(width))

    def inject(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x, self.U.T)

    def step(self, z: Tensor, c: Tensor) -> Tensor:
        return torch.relu(torch.addmm(c, z, self.W.T)) @ self.W

    def linearize(self, z: Tensor, c: Tensor) -> Linearization:
        a = torch.addmm(c, z, self.W.T)
        return self._linear(torch.relu(a) @ self.W, (a > 0).to(a.dtype))

    def _linear(self, value: Tensor, mask: Tensor) -> Linearization:
        def product(v: Tensor) -> Tensor:
            return (v @ self.W.T).mul_(mask) @ self.W

        return Linearization(
            value, product, product, select_rows=lambda rows: self._linear(value[rows], mask[rows])
        )

    def plain(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(z @ self.W.T + x @ self.U.T + self.b) @ self.W


class Hidden(Symmetric):
    """The same equilibrium, iterated in its pre-activations `a = K relu(a) + c`.

    `K = W W^T` is formed once for each solve, so that a step needs one product with a matrix of
    hidden size in place of two; the read-out `relu(a) W` is the equilibrium. With gradients that
    enter through the read-out, the adjoint stays within the active units, where `I - D K D` is
    symmetric.
    """

    def inject(self, x: Tensor) -> tuple[Tensor, Shared]:
        return super().inject(x), Shared((self.W @ self.W.T).detach())

    def initial(self, x: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return context[0].detach()

    def step(self, a: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        c, K = context
        q = torch.relu(a)
        return (
            torch.addmm(c, q @ self.W, self.W.T)
            if torch.is_grad_enabled()
            else torch.addmm(c, q, K)
        )

    def readout(self, a: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        return torch.relu(a) @ self.W

    def linearize(self, a: Tensor, context: tuple[Tensor, Tensor]) -> Linearization:
        c, K = context
        return self._active(a, (a > 0).to(a.dtype), c, K)

    def _active(self, a: Tensor, mask: Tensor, c: Tensor, K: Tensor) -> Linearization:
        return Linearization(
            torch.addmm(c, torch.relu(a), K),
            jvp=lambda v: (v * mask) @ K,
            vjp=lambda v: (v @ K).mul_(mask),
            select_rows=lambda rows: self._active(a[rows], mask[rows], c[rows], K),
        )


class Tanh(Problem):
    """`tanh(z W^T + x U^T + b)` with a non-symmetric `W` of given spectral radius."""

    def __init__(self, width: int = 512, inputs: int = 784, radius: float = 0.9) -> None:
        super().__init__()
        W = torch.randn(width, width)
        self.W = nn.Parameter(W * (radius / torch.linalg.eigvals(W).abs().max()))
        self.U = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(width))

    def inject(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x, self.U.T)

    def step(self, z: Tensor, c: Tensor) -> Tensor:
        return torch.tanh(torch.addmm(c, z, self.W.T))

    def linearize(self, z: Tensor, c: Tensor) -> Linearization:
        value = self.step(z, c)
        return self._linear(value, 1 - value.square())

    def _linear(self, value: Tensor, slope: Tensor) -> Linearization:
        return Linearization(
            value,
            jvp=lambda v: (v @ self.W.T).mul_(slope),
            vjp=lambda v: (v * slope) @ self.W,
            select_rows=lambda rows: self._linear(value[rows], slope[rows]),
        )

    def plain(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + x @ self.U.T + self.b)


class Straggler(Problem):
    """`gain * conv(z) + x` with an isometric 3 x 3 convolution.

    A sample with gain 0.99 needs a hundred times the steps of one with 0.3. The spectrum fills a
    circle, so no acceleration helps.
    """

    shape = (32, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        channels = self.shape[0]
        kernel = torch.zeros(channels, channels, 3, 3)
        shifts = torch.randint(9, (channels,))
        kernel.view(channels, channels, 9)[:, torch.arange(channels), shifts] = torch.linalg.qr(
            torch.randn(channels, channels)
        )[0]
        self.kernel = nn.Parameter(kernel)

    def inject(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return x

    def initial(self, x: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(x[0])

    def step(self, z: Tensor, context: tuple[Tensor, Tensor]) -> Tensor:
        x, gain = context
        z = nn.functional.pad(z, (1, 1, 1, 1), mode="circular")
        return torch.addcmul(x, gain, nn.functional.conv2d(z, self.kernel))

    def start(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return torch.zeros_like(x[0])

    def plain(self, z: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.step(z, x)

    @classmethod
    def batch(cls, size: int = 64) -> tuple[Tensor, Tensor]:
        gain = torch.full((size, 1, 1, 1), 0.3)
        gain[0] = 0.99
        return torch.randn(size, *cls.shape), gain
