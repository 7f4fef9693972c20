"""Twelve cells such as users write, small and in float64, each with an input of some samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cells import bounded
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from equipoise import Cell, Shared

WIDTH = 4


class Recurrence(Cell):
    """`z = tanh(W z + U x + b)`."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(bounded(WIDTH, WIDTH, 0.7))
        self.U = nn.Linear(3, WIDTH)

    def inject(self, x: Tensor) -> Tensor:
        return self.U(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + context)


class Gated(Cell):
    """A gated recurrent unit fed with the same input forever."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.GRUCell(3, WIDTH)

    def inject(self, x: Tensor) -> Tensor:
        return x

    def initial(self, x: Tensor, context: Tensor) -> Tensor:
        return x.new_zeros(len(x), WIDTH)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return self.unit(context, z)


class Attention(Cell):
    """Self-attention over tokens, some of them padding; tokens come as whole numbers."""

    def __init__(self, tokens: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.out.weight.mul_(0.5)

    def inject(self, x: dict[str, Tensor]) -> Any:
        return {"tokens": x["tokens"], "real": x["real"], "shape": (*x["tokens"].shape[1:], WIDTH)}

    def initial(self, x: Any, context: Any) -> Tensor:
        return self.out.weight.new_zeros(len(context["tokens"]), *context["shape"])

    def step(self, z: Tensor, context: Any) -> Tensor:
        query, key, value = self.projection(z).chunk(3, dim=2)
        scores = query @ key.mT / WIDTH**0.5
        scores = scores.masked_fill(~context["real"][:, None], -torch.inf)
        mixed = self.out(scores.softmax(dim=2) @ value) + self.embedding(context["tokens"])
        return torch.tanh(mixed) * context["real"][:, :, None]


class ConvolutionWithNorm(Cell):
    """`z = norm(tanh(conv(z) + x))` with group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        with torch.no_grad():
            self.conv.weight.mul_(0.5)
            self.norm.weight.mul_(0.5)

    def inject(self, x: Tensor) -> Tensor:
        return self.enter(x)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.conv(z) + context))


class Resolutions(Cell):
    """Three resolutions of one image, each fed by its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleDict({name: nn.Conv2d(2, 2, 3, padding=1) for name in "abc"})
        with torch.no_grad():
            for conv in self.conv.values():
                conv.weight.mul_(0.5)

    def inject(self, x: Tensor) -> Any:
        return {"image": x, "sides": [x.shape[-1] // 2**k for k in range(3)]}

    def initial(self, x: Tensor, context: Any) -> Any:
        sides = zip("abc", context["sides"], strict=True)
        return {name: x.new_zeros(len(x), 2, side, side) for name, side in sides}

    def step(self, z: Any, context: Any) -> Any:
        def up(image: Tensor) -> Tensor:
            return nn.functional.interpolate(image, scale_factor=2)

        def down(image: Tensor) -> Tensor:
            return nn.functional.avg_pool2d(image, 2)

        return {
            "a": torch.tanh(self.conv["a"](z["a"] + 0.3 * up(z["b"])) + context["image"]),
            "b": torch.tanh(self.conv["b"](z["b"] + 0.3 * up(z["c"])) + 0.3 * down(z["a"])),
            "c": torch.tanh(self.conv["c"](z["c"]) + 0.3 * down(z["b"])),
        }


class Monotone(Cell):
    """`z = relu(W z + U x)` with `W = (1 - m) I - A^T A + B - B^T` (Winston & Kolter, 2020)."""

    def __init__(self, m: float = 0.5) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.B = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.U = nn.Linear(3, WIDTH)
        self.m = m

    def inject(self, x: Tensor) -> Any:
        eye = torch.eye(WIDTH, dtype=x.dtype)
        W = (1 - self.m) * eye - self.A.T @ self.A + self.B - self.B.T
        return self.U(x), Shared(W)

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        u, W = context
        return torch.relu(z @ W.T + u)


class Graph(Cell):
    """`z = tanh(A z W + x)` on the nodes of one graph, whose adjacency matrix is sparse."""

    def __init__(self, nodes: int = 5) -> None:
        super().__init__()
        dense = torch.where(torch.rand(nodes, nodes) < 0.5, 1.0, 0.0) + torch.eye(nodes)
        self.register_buffer("A", (dense / dense.sum(dim=1, keepdim=True)).to_sparse())
        self.W = nn.Parameter(bounded(2, 2, 0.8))

    def inject(self, x: Tensor) -> Tensor:
        return x

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        batch, nodes, width = z.shape
        columns = z.transpose(0, 1).reshape(nodes, -1)
        mixed = (self.A @ columns).view(nodes, batch, width).transpose(0, 1)
        return torch.tanh(mixed @ self.W.T + context)


class Dropout(Recurrence):
    """A dropout mask, drawn once for each solve."""

    def inject(self, x: Tensor) -> Any:
        u = self.U(x)
        return u, nn.functional.dropout(torch.ones_like(u), 0.5, self.training)

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(context[0])

    def step(self, z: Tensor, context: Any) -> Tensor:
        u, mask = context
        return torch.tanh((mask * z) @ self.W.T / 2 + u)


class SpectralNorm(Recurrence):
    """A weight divided by its spectral norm, by torch's parametrization with its buffers."""

    def __init__(self) -> None:
        super().__init__()
        del self.W
        self.linear = parametrizations.spectral_norm(
            nn.Linear(WIDTH, WIDTH, bias=False), n_power_iterations=2
        )
        for _ in range(200):  # to where power iteration ends
            self.linear.weight  # noqa: B018

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(0.8 * self.linear(z) + context)


class WeightNorm(Recurrence):
    """A weight as direction and length, by torch's parametrization."""

    def __init__(self) -> None:
        super().__init__()
        del self.W
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        with torch.no_grad():
            self.linear.parametrizations.weight.original0.fill_(0.4)

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + context)


class Buffers(Recurrence):
    """A running mean and an order of the entries, both of them buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("order", torch.randperm(WIDTH))

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        return torch.tanh((z - self.mean)[:, self.order] @ self.W.T + context)


class FourierOperator(Cell):
    """`z = tanh(irfft(R rfft(z)) + P z + x)` on functions of one variable, with complex `R`."""

    def __init__(self, modes: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.R = nn.Parameter(0.2 * torch.randn(2, 2, modes, dtype=torch.complex128))
        self.P = nn.Conv1d(2, 2, 1)
        with torch.no_grad():
            self.P.weight.mul_(0.3)

    def inject(self, x: Tensor) -> Any:
        return x, x.shape[-1]

    def initial(self, x: Tensor, context: Any) -> Tensor:
        return torch.zeros_like(x)

    def step(self, z: Tensor, context: Any) -> Tensor:
        x, length = context
        waves = torch.fft.rfft(z)[..., : self.modes]
        smooth = torch.fft.irfft(torch.einsum("bim,iom->bom", waves, self.R), n=length)
        return torch.tanh(smooth + self.P(z) + x)


@dataclass(frozen=True)
class Realistic:
    """A cell and its input.

    Attributes:
        make: Makes the cell.
        draw: Draws an input for a number of samples.
        damping: With which plain iteration converges.
    """

    make: Callable[[], Cell]
    draw: Callable[[int], Any]
    damping: float = 1.0


def _draw(*shape: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.randn(samples, *shape)


def _draw_tokens(samples: int) -> dict[str, Tensor]:
    lengths = torch.randint(2, 5, (samples, 1))
    return {"tokens": torch.randint(0, 7, (samples, 4)), "real": torch.arange(4) < lengths}


REALISTIC = {
    "recurrence": Realistic(Recurrence, _draw(3)),
    "gated": Realistic(Gated, _draw(3)),
    "attention": Realistic(Attention, _draw_tokens),
    "convolution": Realistic(ConvolutionWithNorm, _draw(1, 4, 4)),
    "resolutions": Realistic(Resolutions, _draw(2, 8, 8)),
    "monotone": Realistic(Monotone, _draw(3), damping=0.2),
    "graph": Realistic(Graph, _draw(5, 2)),
    "dropout": Realistic(Dropout, _draw(3)),
    "spectral_norm": Realistic(SpectralNorm, _draw(3)),
    "weight_norm": Realistic(WeightNorm, _draw(3)),
    "buffers": Realistic(Buffers, _draw(3)),
    "fourier": Realistic(FourierOperator, _draw(2, 8)),
}
